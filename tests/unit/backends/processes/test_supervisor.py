"""A group of processes starts and ends together, and is started again. Real processes that do nothing."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from tests.busy_child import Nap, Refuse, Work
from tinker_server.backends.processes import supervisor
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.processes.supervisor import Silence, Supervisor, call_all
from tinker_server.backends.protocol import BackendFailed, Loading, ignore_loading


class Group:
    """Two processes, the starts of which can be made to fail."""

    def __init__(self) -> None:
        self.started: list[Child] = []
        self.failures = 0

    async def start(self) -> list[Child]:
        children = [await launch(f"busy {number}", "tests.busy_child", {}) for number in range(2)]
        self.started += children
        return children

    async def prepare(self, children: list[Child]) -> None:
        if self.failures:
            self.failures -= 1
            raise BackendFailed("there is no memory left")
        await asyncio.gather(*(child.call(Nap(0)) for child in children))

    def pids(self) -> list[int]:
        return [child.process.pid for child in self.started if psutil.pid_exists(child.process.pid)]


@pytest_asyncio.fixture
async def group() -> AsyncIterator[Group]:
    group = Group()
    yield group
    assert group.pids() == []


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)


async def test_where_errors_are_not_agreed_the_first_does_not_wait_for_those_who_wait_for_it(group: Group) -> None:
    """As of a rank that cannot start: the others wait for it, for hours if need be."""
    first, second = await group.start()
    with pytest.raises(BackendFailed, match="no weights"):
        async with asyncio.timeout(5):
            await call_all([first, second], [Work(100), Refuse()], 200, agreed=False)
    await asyncio.gather(first.stop(0), second.stop(0))


async def test_a_process_that_was_ended_is_not_ended_again(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another by then."""
    first, second = await group.start()
    await asyncio.gather(first.stop(0), second.stop(0))
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    await first.stop(0)
    assert not killed


async def test_when_one_dies_the_others_end_and_the_next_caller_starts_all_again(group: Group) -> None:
    heard: list[tuple[str, Loading | None]] = []
    supervised = Supervisor("two", group.start, group.prepare)
    await supervised.start(lambda name, loading: heard.append((name, loading)))
    assert [name for name, loading in heard if loading is None] == ["two", "busy 0", "busy 1"]
    first = supervised.children
    os.kill(first[0].process.pid, signal.SIGKILL)
    await asyncio.wait_for(first[1].died.wait(), 20)
    assert not supervised.is_alive
    group.failures = 2
    again = await asyncio.wait_for(asyncio.gather(*(supervised.running() for _ in range(3))), 60)
    assert group.failures == 0 and again[0] is again[1] is again[2] is supervised.children
    assert await supervised.wait_for_restart(0) == 1
    assert len(group.started) == 8 and len(group.pids()) == 2
    assert [(one.is_alive, one.restarts) for one in supervised.processes()] == [(True, 1)] * 2
    await supervised.stop()


async def test_the_log_says_how_long_each_phase_of_a_start_took(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    async def prepare(children: list[Child]) -> None:
        for doing in ("reads weights", "reads weights", "compiles"):
            for child in children:
                supervised.on_loading(child.name, Loading(doing))
            await asyncio.sleep(0.6)

    supervised = Supervisor("two", group.start, prepare)
    with caplog.at_level("INFO"):
        await supervised.start(ignore_loading)
    await supervised.stop()
    (line,) = [line for line in caplog.messages if "is ready" in line]
    assert re.fullmatch(r"two is ready after \d+ s: starts 0 s, reads weights 1 s, compiles 1 s", line), line


async def test_phases_that_are_reported_when_they_are_over_replace_what_they_are_parts_of(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    async def prepare(children: list[Child]) -> None:
        (name, *_) = (child.name for child in children)
        supervised.on_loading(name, Loading("reads weights and prepares kernels"))
        await asyncio.sleep(1.2)
        for doing, seconds in (("starts vLLM", 1.2), ("reads weights", 1.1), ("measures memory", 0.001)):
            supervised.on_loading(name, Loading(doing, began_s_ago=seconds))
        supervised.on_loading(name, Loading("draws"))

    supervised = Supervisor("two", group.start, prepare)
    with caplog.at_level("INFO"):
        await supervised.start(ignore_loading)
    await supervised.stop()
    (line,) = [line for line in caplog.messages if "is ready" in line]
    assert re.fullmatch(
        r"two is ready after \d+ s: starts \d s, starts vLLM 0 s, reads weights 1 s, measures memory 0 s, draws 0 s",
        line,
    ), line


async def test_a_group_that_restarts_by_itself_does_not_do_so_after_it_was_stopped(group: Group) -> None:
    async def restart() -> None:
        await supervised.running()

    supervised = Supervisor("two", group.start, group.prepare, restart=restart)
    await supervised.start(ignore_loading)
    os.kill(supervised.children[0].process.pid, signal.SIGKILL)
    assert await asyncio.wait_for(supervised.wait_for_restart(0), 60) == 1
    os.kill(supervised.children[1].process.pid, signal.SIGKILL)
    while supervised.is_alive:  # noqa: ASYNC110 - it emits no event
        await asyncio.sleep(0.01)
    await supervised.stop()
    started = len(group.started)
    await asyncio.sleep(0.5)
    assert len(group.started) == started


async def test_a_stop_that_meets_the_end_of_a_silent_process_leaves_none_behind(group: Group) -> None:
    async def no_progress(child: Child) -> int:
        return 0

    supervised = Supervisor("two", group.start, group.prepare, silence=Silence(0.4, lambda: True, no_progress))
    await supervised.start(ignore_loading)
    for child in supervised.children:
        psutil.Process(child.process.pid).suspend()
    while supervised.children:  # noqa: ASYNC110 - it emits no event
        await asyncio.sleep(0.01)
    await supervised.stop()
    assert group.pids() == []
