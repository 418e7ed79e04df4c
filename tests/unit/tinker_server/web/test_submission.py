"""What an operation says of itself when it is queued."""

import numpy as np
import pytest

from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest
from tinker_server.web.submission import answer_bytes


@pytest.mark.parametrize(("loss_fn", "num_tensors"), [("cross_entropy", 2), ("ppo", 1), ("nonsense", 1)])
def test_a_batch_counts_the_bytes_of_every_tensor_that_its_answer_will_have(loss_fn: str, num_tensors: int) -> None:
    chunks = [EncodedTextChunk(tokens=np.arange(3))]
    data = [
        Datum(model_input=ModelInput(chunks=[*chunks]), loss_fn_inputs={"target_tokens": np.ones(shape, np.int64)})
        for shape in ((3,), (3, 4))
    ]
    loss_input = ForwardBackwardInput(data=data, loss_fn=loss_fn)
    request = ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=loss_input)
    assert answer_bytes(request) == (3 + 3 * 4) * 4 * num_tensors
