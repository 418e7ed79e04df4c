"""The route /forward, by which SDKs before 0.25 ask for a forward_backward with `forward_only`."""

from typing import Literal

from tinker_server.api_schemas.base import Request
from tinker_server.api_schemas.fields import ModelId, SeqId
from tinker_server.api_schemas.training import ForwardBackwardInput


class ForwardRequest(Request):
    """Compute log probabilities without changing the gradient."""

    type: Literal["forward"] = "forward"
    model_id: ModelId
    seq_id: SeqId
    forward_input: ForwardBackwardInput
    """Datums and loss."""
