"""What an operation says of itself when it is queued."""

from typing import Any, cast

import numpy as np
import pytest

from api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest
from api_schemas.wire import JSON
from tinker_server.models.scheduler import Scheduler
from tinker_server.store.futures.records import Operation
from tinker_server.web.submission import Submission


class Queue:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    async def submit(self, operation: Operation) -> str:
        self.operations.append(operation)
        return "r"


@pytest.mark.parametrize(("loss_fn", "num_tensors"), [("cross_entropy", 2), ("ppo", 1), ("nonsense", 1)])
async def test_a_batch_counts_the_bytes_of_every_tensor_that_its_answer_will_have(
    loss_fn: str, num_tensors: int
) -> None:
    chunks = [EncodedTextChunk(tokens=np.arange(3))]
    data = [
        Datum(model_input=ModelInput(chunks=[*chunks]), loss_fn_inputs={"target_tokens": np.ones(shape, np.int64)})
        for shape in ((3,), (3, 4))
    ]
    loss_input = ForwardBackwardInput(data=data, loss_fn=loss_fn)
    request = ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=loss_input)
    queue: Any = Queue()
    await Submission("forward_backward", request, b"", JSON, "").accept(cast(Scheduler, queue), "alice", "m", 1)
    assert [operation.answer_bytes for operation in queue.operations] == [(3 + 3 * 4) * 4 * num_tensors]
