"""The route /forward, by which SDKs before 0.25 ask for a forward_backward with `forward_only`."""

from typing import Literal

from api_schemas.base import Request
from api_schemas.fields import ModelId, SeqId
from api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest


class ForwardRequest(Request):
    """Compute log probabilities, and leave the gradient alone."""

    type: Literal["forward"] = "forward"
    model_id: ModelId
    seq_id: SeqId
    forward_input: ForwardBackwardInput
    """Datums and loss."""

    def as_forward_backward(self) -> ForwardBackwardRequest:
        """The same request as later clients send it."""
        return ForwardBackwardRequest(
            model_id=self.model_id,
            seq_id=self.seq_id,
            forward_only=True,
            forward_backward_input=self.forward_input,
        )
