"""Processes that are forks of a process that has imported their libraries."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests import busy_child
from tests.busy_child import Environment, Imported, Program, Read, Zeros
from tinker_server.backends.processes import forking, launcher, preloaded
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.preloaded import begin_noted, note
from tinker_server.backends.processes.rpc import Child

BUSY = "tests.busy_child"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy children are forks."""
    monkeypatch.setattr(launcher, "FORKED", dict.fromkeys((BUSY, "tests.starts_a_thread", "tests.no_such_module"), ()))


@asynccontextmanager
async def running(env: dict[str, str], module: str = BUSY) -> AsyncIterator[Child]:
    child = await launch("busy", module, env)
    yield child
    await child.stop()


async def test_children_of_a_kind_share_its_imports() -> None:
    async with running({"RANK": "0"}) as first, running({"RANK": "1"}) as second:
        assert await first.call(Imported()) == await second.call(Imported()) != busy_child.IMPORTED_S
        assert [(await child.call(Environment()))["RANK"] for child in (first, second)] == ["0", "1"]
        assert first.process.pid != second.process.pid


async def test_a_child_has_imported_all_with_its_own_variables() -> None:
    """Libraries read them while they are imported."""
    seen = []
    for threads in ("1", "2", "1"):
        async with running({"OMP_NUM_THREADS": threads}) as child:
            seen.append(((await child.call(Environment()))["OMP_NUM_THREADS"], await child.call(Imported())))
    assert [threads for threads, _ in seen] == ["1", "2", "1"]
    assert seen[0] == seen[2] and seen[0][1] != seen[1][1]


async def test_no_variable_of_one_child_is_seen_by_the_next() -> None:
    async with running({"VLLM_RPC_BASE_PATH": "/first"}), running({}) as second:
        assert "VLLM_RPC_BASE_PATH" not in await second.call(Environment())


async def test_where_the_end_of_a_fork_cannot_be_waited_for_each_child_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    async with running({}) as first, running({}) as second:
        assert await first.call(Imported()) != await second.call(Imported())


async def test_a_child_finds_what_it_inherits_by_a_variable() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"inherited")
    child = await launch("busy", BUSY, {}, {"INHERITED": reading})
    os.close(reading)
    assert await child.call(Read("INHERITED")) == b"inherited"
    await child.stop()
    os.close(writing)


async def test_a_child_is_known_by_the_module_that_it_runs() -> None:
    async with running({}) as child:
        assert " ".join(psutil.Process(child.process.pid).cmdline()).split()[1:3] == ["-m", BUSY]


async def test_children_outlive_the_process_that_has_imported_and_the_next_start_makes_it_again() -> None:
    async with running({}) as first:
        importer = psutil.Process(first.process.pid).parent()
        assert importer is not None and importer.cmdline()[2] == forking.__name__
        importer.kill()
        assert await first.call(Zeros(1)) == bytes(1)
        async with running({}) as second:
            assert await second.call(Imported()) != await first.call(Imported())
        assert await first.call(Zeros(1)) == bytes(1)


def find_importers() -> set[int]:
    """Return the numbers of this process's children that import for others."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return {child.pid for child in children if forking.__name__ in child.cmdline()}


async def test_a_server_begins_the_imports_of_its_last_start_at_once(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "3", "RANK": "0"}
    async with running(own):
        note(tmp_path)
    preloaded._end_all()  # as the server's end does
    begin_noted(tmp_path)
    begun = find_importers()
    async with running(own | {"RANK": "1"}) as child:
        parent = psutil.Process(child.process.pid).parent()
        assert parent is not None and parent.pid in begun


async def test_imports_that_a_start_has_not_used_end_with_it_and_are_forgotten(tmp_path: Path) -> None:
    async with running({}):
        note(tmp_path)
    preloaded._end_all()
    begin_noted(tmp_path)
    assert find_importers()
    note(tmp_path)
    assert not find_importers()
    begin_noted(tmp_path)
    assert not find_importers()


async def test_a_child_says_what_it_says_where_the_server_does(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where that has changed since its libraries were imported."""
    async with running({}) as child:
        for number in (1, 2):
            standard = await asyncio.to_thread(Path(f"/proc/{child.process.pid}/fd/{number}").readlink)
            assert standard == await asyncio.to_thread(Path("/proc/self/fd/2").readlink)


async def test_a_module_that_starts_threads_is_imported_by_each_child(capfd: pytest.CaptureFixture[str]) -> None:
    module = "tests.starts_a_thread"
    async with running({}, module) as first, running({}, module) as second:
        assert await first.call(Zeros(1)) == bytes(1)
        found = [await child.call(Imported()) for child in (first, second)]
    assert len(set(found)) == 2
    assert "started threads while it was imported: at import" in capfd.readouterr().err


def test_a_library_that_begins_cuda_is_found_by_what_it_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia"
    monkeypatch.setattr(forking, "_DRIVERS", str(driver))
    assert "CUDA" not in str(forking.reason_against(BUSY))
    with driver.with_name("nvidia-uvm").open("w"):
        assert f"begun CUDA while it was imported, and opened {driver}-uvm" in str(forking.reason_against(BUSY))


async def test_a_module_that_cannot_be_imported_fails_in_the_child(capfd: pytest.CaptureFixture[str]) -> None:
    child = await launch("busy", "tests.no_such_module", {})
    async with asyncio.timeout(20):
        await child.died.wait()
    await child.stop()
    assert "No module named tests.no_such_module" in capfd.readouterr().err


async def test_a_child_is_a_program_to_what_it_starts() -> None:
    """By multiprocessing, which imports the program first."""
    async with running({}) as child:
        assert await child.call(Program()) == BUSY


async def test_a_child_takes_the_signals_that_a_new_program_does() -> None:
    async with running({}) as child:
        own = await asyncio.to_thread(Path(f"/proc/{child.process.pid}/status").read_text)
        ignored = int(next(line.split()[1] for line in own.splitlines() if line.startswith("SigIgn")), 16)
        assert not ignored & (1 << (signal.SIGCHLD - 1))
