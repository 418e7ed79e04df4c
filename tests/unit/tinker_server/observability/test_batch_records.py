"""Which batches are decoded again for people: few bytes of an owner at a time, and none of a run that is deleted."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from tests.fake_server import policy_body
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.training import ForwardBackwardOutput
from tinker_server.observability.batch_records import LARGEST_BODY_BYTES, BatchRecords
from tinker_server.observability.kept_datums import KeptBatch
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation
from tinker_server.store.records import Step


def trained(run_id: str, size_bytes: int, owner: str = "alice") -> Work[Any]:
    """A forward_backward that has succeeded, said to have a body of this size."""
    body = policy_body(run_id, 1, [1, 2], [([3, 4], 1.0), ([5], -1.0)])
    operation = Operation("forward_backward", run_id, 1, body, wire.PROTOBUF, owner, size_bytes=size_bytes)
    outputs = [{"logprobs": np.full(length, -1, np.float32)} for length in (3, 2)]
    step = Step(model_id=run_id, seq_id=1, step=0, at=time.time(), waited_s=0, run_s=0)
    output = ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={})
    return Work(operation, None, response=output, base_model="tiny", step=step)


async def kept_of(put: list[KeptBatch], most: int) -> set[str]:
    """The runs of what is kept, once there is so much, or after a while."""
    for _ in range(200):
        if len(put) >= most:
            break
        await asyncio.sleep(0.005)
    return {batch.run_id for batch in put}


async def test_an_owners_bodies_are_read_as_far_as_they_are_few_bytes_together() -> None:
    put: list[KeptBatch] = []
    records, part = BatchRecords(put.append, is_wanted=True), LARGEST_BODY_BYTES // 2
    for run_id in ("s:train:0", "s:train:1", "s:train:2"):
        await records.on_success(trained(run_id, part))
    await records.on_success(trained("t:train:0", part, "bob"))
    assert await kept_of(put, 3) == {"s:train:0", "s:train:1", "t:train:0"}
    await records.on_success(trained("s:train:3", LARGEST_BODY_BYTES))
    assert "s:train:3" in await kept_of(put, 4)
    await records.stop()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_batch_of_a_run_that_is_deleted_meanwhile_is_not_kept(is_begun: bool) -> None:
    put: list[KeptBatch] = []
    records = BatchRecords(put.append, is_wanted=True)
    await records.on_success(trained("s:train:0", 1 << 20))
    if is_begun:
        await asyncio.sleep(0)
    records.forget("s:train:0")
    await records.on_success(trained("s:train:1", LARGEST_BODY_BYTES - (1 << 20)))
    assert await kept_of(put, 1) == {"s:train:1"}
    records.forget("s:train:2")
    await records.stop()
