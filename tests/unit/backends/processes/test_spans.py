"""Spans of a call in a child process are emitted to the callback of the caller."""

import asyncio
import os
import signal
import time

import pytest

from tests.busy_child import LONGEST_ANSWER, Nap, Zeros
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.rpc import ChildDied
from tinker_server.backends.processes.spans import ProcessSpan, spans_to
from tinker_server.backends.protocol import InvalidInput


async def test_spans_of_calls_have_the_times_of_their_process_and_an_outcome() -> None:
    child = await launch("trainer tiny rank 0", "tests.busy_child", {})
    heard: list[ProcessSpan] = []
    began_ns = time.time_ns()
    try:
        async with asyncio.timeout(60):
            await child.call(Zeros(1))  # to nobody
            with spans_to(heard.append):
                await asyncio.create_task(child.call(Nap(1)))
                with pytest.raises(InvalidInput, match="ask for less at once"):
                    await child.call(Zeros(2 * LONGEST_ANSWER))
                cut_short = asyncio.create_task(child.call(Nap(60)))
                await asyncio.sleep(0)
                os.kill(child.process.pid, signal.SIGKILL)
                with pytest.raises(ChildDied):
                    await cut_short
    finally:
        await child.stop(grace_s=1)
    assert [(one.process, one.command, one.outcome) for one in heard] == [
        ("trainer tiny rank 0", "Nap", "value"),
        ("trainer tiny rank 0", "Zeros", "invalid"),
        ("trainer tiny rank 0", "Nap", "unanswered"),
    ]
    assert heard[0].ended_ns - heard[0].began_ns >= 0.9e9
    times_ns = [time for one in heard for time in (one.began_ns, one.ended_ns)]
    assert times_ns == sorted(times_ns) and times_ns[0] >= began_ns and times_ns[-1] <= time.time_ns()
