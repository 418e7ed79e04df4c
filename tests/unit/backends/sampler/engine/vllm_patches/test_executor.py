"""Calls of all ranks of an engine: each answer belongs to its call, also after one that failed.

pytest tests/unit/backends/sampler/engine/vllm_patches/test_executor.py
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import WorkerProc

from tinker_server.backends.sampler.engine.vllm_patches.executor import Executor


class Rank:
    """Answers calls as a worker does: `attempt` never fails."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: deque[Any] = deque()

    def take(self, call: tuple[Any, ...]) -> None:
        method, args, _, output_rank = call
        if output_rank not in (None, self.number):
            return
        done, failed = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
        match method, args:
            case "attempt", ("load", (path,), {}):
                self.answers.append((done, ("no such file" if path == "missing" else None, [path, self.number])))
            case "init_device", _:
                self.answers.append((done, "the wrapper's own"))
            case "execute_model", _:
                self.answers.append((done, self.number))
            case _:
                self.answers.append((failed, f"{method} is called as it is"))

    def dequeue(self, timeout: float | None = None) -> Any:
        return self.answers.popleft()


@pytest.fixture
def executor() -> Any:
    made, ranks = Executor.__new__(Executor), [Rank(0), Rank(1)]

    def enqueue(call: tuple[Any, ...]) -> None:
        for rank in ranks:
            rank.take(call)

    fields = {"rpc_broadcast_mq": SimpleNamespace(enqueue=enqueue), "response_mqs": ranks}
    made.__dict__.update(fields, is_failed=False, futures_queue=deque())
    made.kv_output_aggregator = made.ec_output_aggregator = None
    return made


def test_answers_are_those_to_the_call_after_one_that_failed_on_all_ranks(executor: Any) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^no such file$"):
            executor.collective_rpc("load", args=("missing",))
    assert executor.collective_rpc("load", args=("there",)) == [["there", 0], ["there", 1]]
    assert not any(rank.answers for rank in executor.response_mqs)


def test_steps_and_vllms_own_calls_go_as_they_are(executor: Any) -> None:
    assert executor.collective_rpc("init_device") == ["the wrapper's own"] * 2
    assert executor.collective_rpc("execute_model", unique_reply_rank=0) == 0
