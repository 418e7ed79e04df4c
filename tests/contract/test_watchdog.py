"""Ranks that die or hang are noticed; their models are lost by name, and the next one starts them again.

pytest tests/contract/test_watchdog.py
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.trainers import LORA, SMOOTH, config
from tinker_server.backends.processes.rpc import ChildHangs
from tinker_server.backends.protocol import ModelLost
from tinker_server.backends.trainer.client import TrainerClient

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_ranks_that_die_or_hang_are_started_again_by_the_next_model(tiny_text: Path, num_ranks: int) -> None:
    batch = cross_entropy([datum(prompt(words(9)), make_renderer(tiny_text))])
    client = TrainerClient(config(tiny_text, num_ranks=num_ranks), patience_s=20)
    await client.start()
    try:
        first = await client.create_model("first", LORA, "owner")
        idle = client._supervisor.children[-1]
        os.kill(idle.process.pid, signal.SIGKILL)
        await asyncio.wait_for(idle.died.wait(), 10)
        second = await client.create_model("second", LORA, "owner")  # and not only the one after it
        with pytest.raises(ModelLost, match="first is no longer loaded"):
            await client.optim_step(first, SMOOTH)
        await client.forward_backward(second, batch, backward=True)

        client._patience_s = 2
        os.kill(client._supervisor.children[-1].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ChildHangs, match="has not answered in time"):
            await client.optim_step(second, SMOOTH)
        assert time.monotonic() - began < 15
        with pytest.raises(ModelLost, match="second is no longer loaded"):
            await client.optim_step(second, SMOOTH)
        client._patience_s = 20
        third = await client.create_model("third", LORA, "owner")
        await client.forward_backward(third, batch, backward=True)
        await client.optim_step(third, SMOOTH)
    finally:
        await client.stop()
