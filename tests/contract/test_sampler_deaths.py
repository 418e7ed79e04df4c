"""Deaths of the sampler's process: a real process, with a light one in the engine's place."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest
import pytest_asyncio

from tests.sampling import ask, sampler_config
from tests.waiting import until
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes import supervisor
from tinker_server.backends.processes.crash_isolation import CrashIsolation, Suspect
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.rpc import Child, Command
from tinker_server.backends.processes.supervisor import Silence, Supervisor
from tinker_server.backends.protocol import BackendFailed, ChatTask, ignore_loading
from tinker_server.backends.sampler.pool import SamplerPool

STARTS: list[tuple[float, Child]] = []
"""Processes, and when their start began, by the monotonic clock."""


async def launch_light(spec: ModelSpec) -> list[Child]:
    began_s, child = time.monotonic(), await launch(spec.name, "tests.fake_sampler_process", {})
    STARTS.append((began_s, child))
    return [child]


@pytest_asyncio.fixture
async def sampler(tmp_path: Path) -> AsyncIterator[SamplerPool]:
    STARTS.clear()
    running = SamplerPool(replace(sampler_config(tmp_path, tmp_path), silence_s=4), launch_light)
    await running.start()
    yield running
    await running.stop()


@pytest.mark.parametrize("poison", [13, 14])
async def test_a_request_that_kills_the_engine_fails_alone_and_by_name(sampler: SamplerPool, poison: int) -> None:
    """Beside twenty of another owner and five of its own."""
    beside = [asyncio.create_task(ask(sampler, 1)) for _ in range(20)]
    own = [asyncio.create_task(ask(sampler, 1, "bad")) for _ in range(5)]
    await asyncio.sleep(0.2)
    with pytest.raises(BackendFailed, match="the engine died twice while it worked on this request"):
        await ask(sampler, poison, "bad")
    assert await asyncio.gather(*beside, *own) == [1] * 25
    assert await ask(sampler, 0) == 0
    assert len(STARTS) <= 4  # at first, after the death of all, of the owner's, of the one alone


async def test_many_poisonous_requests_of_one_owner_never_fail_anothers(sampler: SamplerPool) -> None:
    """More deaths in a row than a fixed number of starts would allow."""
    bad = [asyncio.create_task(ask(sampler, 13, "bad")) for _ in range(4)]
    good = [asyncio.create_task(ask(sampler, token)) for token in (0, 1) * 5]
    failures = await asyncio.gather(*bad, return_exceptions=True)
    assert all(isinstance(one, BackendFailed) for one in failures)
    assert await asyncio.gather(*good) == [0, 1] * 5
    assert len(STARTS) >= 5


@pytest.mark.parametrize("is_emitted", [True, False])
async def test_a_chat_runs_again_unless_a_part_of_its_answer_was_emitted(
    sampler: SamplerPool, is_emitted: bool
) -> None:
    """The engine dies under it, once."""
    parts: list[str] = []
    body = {"first": "hello" if is_emitted else None}
    chat = asyncio.create_task(sampler.chat(ChatTask("messages", body, None, "good"), parts.append))
    if is_emitted:
        with pytest.raises(BackendFailed, match="died while it answered; send the request again"):
            await asyncio.wait_for(chat, 60)
        assert parts == ["hello"]
    else:
        await asyncio.wait_for(chat, 60)
        assert parts == ["done"]
    assert await ask(sampler, 0) == 0


async def test_while_the_engine_does_not_start_samples_wait_with_growing_pauses(
    sampler: SamplerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.1)
    (tmp_path / "broken").touch()
    waiting = [asyncio.create_task(ask(sampler, token)) for token in (0, 1, 0)]
    # At first, after the first death, and three times after a failed start.
    await until(lambda: len(STARTS) == 5, limit_s=60)
    assert not any(one.done() for one in waiting)
    pauses = [began_s - child.died_s for (_, child), (began_s, _) in itertools.pairwise(STARTS[1:])]
    assert all(pause > wanted for pause, wanted in zip(pauses, (0.1, 0.2, 0.4), strict=True)), pauses
    (tmp_path / "broken").unlink()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 30) == [0, 1, 0]


async def test_an_engine_that_scores_otherwise_than_it_draws_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "unwritten").touch()
    running = SamplerPool(sampler_config(tmp_path, tmp_path), launch_light)
    with pytest.raises(
        BackendFailed, match="self-test failed: sampled and re-scored log probs differ by 1 nats per token"
    ):
        await running.start()
    await running.stop()


async def test_a_process_that_hangs_is_started_again_and_its_work_runs_once_more(sampler: SamplerPool) -> None:
    [child] = sampler.engines[0].supervisor.children
    await ask(sampler, 0)
    psutil.Process(child.process.pid).suspend()
    assert await asyncio.wait_for(ask(sampler, 1), 30) == 1
    assert not psutil.pid_exists(child.process.pid)


class Asked:
    """A child that says of its progress what the test says, and ends when it is asked to."""

    name = "light"

    def __init__(self) -> None:
        self.died, self.asked = asyncio.Event(), asyncio.Event()
        self.answer = asyncio.get_running_loop().create_future()

    async def call(self, _: Command[int]) -> int:
        self.asked.set()
        progress: int = await self.answer
        return progress

    async def stop(self, grace_s: float) -> None:
        self.died.set()


@pytest.mark.parametrize("num_iterations", range(4))
async def test_a_stop_that_meets_a_sign_of_progress_ends(num_iterations: int) -> None:
    """The stop comes so many iterations of the event loop later: the watch must not take the one for the other."""
    asked = Asked()

    async def start() -> list[Child]:
        return [cast(Child, asked)]

    async def prepare(_: list[Child]) -> None:
        """It is ready at once."""

    isolation = CrashIsolation(is_exclusive=True)
    silence = Silence(0.4, lambda: isolation.is_busy, lambda child: child.call(Command[int]()))
    running = Supervisor("light", start, prepare, silence=silence)
    await running.start(ignore_loading)

    async def work() -> None:
        async with isolation.admit(Suspect(), running.running):
            await asyncio.sleep(60)

    working = asyncio.create_task(work())
    await asked.asked.wait()
    working.cancel()
    asked.answer.set_result(1)
    for _ in range(num_iterations):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await running.stop()


async def test_a_request_that_hangs_the_engine_fails_like_one_that_kills_it(sampler: SamplerPool) -> None:
    beside = [asyncio.create_task(ask(sampler, 1)) for _ in range(3)]
    with pytest.raises(BackendFailed, match="died twice"):
        await asyncio.wait_for(ask(sampler, 7, "bad"), 60)
    assert await asyncio.gather(*beside) == [1] * 3


async def test_cancelled_requests_are_no_suspects(sampler: SamplerPool) -> None:
    cancelled = [asyncio.create_task(ask(sampler, 1)) for _ in range(5)]
    dying = asyncio.create_task(ask(sampler, 14, "bad"))
    await asyncio.sleep(0.7)
    for one in cancelled:
        one.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    assert await asyncio.wait_for(ask(sampler, 0), 30) == 0
    with pytest.raises(BackendFailed):
        await dying
