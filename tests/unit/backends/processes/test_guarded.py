"""The end of a process is the end of everything in its group, also of what takes its time to give memory back."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from tinker_server.backends.processes import guarded
from tinker_server.backends.processes.guarded import Guarded

LARGE = """
import mmap, os, sys, time
if not os.fork():  # its pages, none of them huge, take the kernel some hundredths of a second to take back
    memory = mmap.mmap(-1, 1 << 29, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[::4096] = bytes(len(memory) // 4096)
    os.write(int(sys.argv[1]), str(os.getpid()).encode())
time.sleep(60)
"""
UNREAPED = """
import os, subprocess, sys, time
leader = os.getpid()
if not os.fork():  # a parent outside of the group, which waits for no child
    os.setpgid(0, 0)
    child = subprocess.Popen(["sleep", "60"], process_group=leader)
    os.write(int(sys.argv[1]), f"{child.pid} {os.getpid()}".encode())
time.sleep(60)
"""


@contextlib.asynccontextmanager
async def run_program(program: str) -> AsyncIterator[tuple[Guarded, list[int]]]:
    """A process that runs a program, with the numbers that this writes."""
    ours, theirs = os.pipe()
    process = await Guarded.start("busy", [sys.executable, "-c", program, str(theirs)], os.environ, [theirs])
    os.close(theirs)
    try:
        yield process, [int(pid) for pid in (await asyncio.to_thread(os.read, ours, 100)).split()]
    finally:
        os.close(ours)
        await process.end(0)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("leader_died", [False, True])
async def test_an_end_lasts_until_all_of_the_group_has_given_back_its_memory(leader_died: bool) -> None:
    async with run_program(LARGE) as (process, [large]):
        if leader_died:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            assert not has_ended(large)
        ends = [asyncio.create_task(process.end(0.1)) for _ in range(2)]  # the second waits as well
        for end in ends:
            await end
            assert has_ended(large)


async def test_a_cancelled_end_is_gone_on_with_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_program(LARGE) as (process, [large]):
        killed, has_killed, kill = list[int](), asyncio.Event(), os.killpg

        def note(group: int, sign: int) -> None:
            kill(group, sign)
            killed.append(group)
            has_killed.set()

        monkeypatch.setattr(os, "killpg", note)
        ending = asyncio.create_task(process.end(0))
        await has_killed.wait()
        ending.cancel()
        await asyncio.wait([ending])
        await process.end(0)
        assert has_ended(large)
        assert killed == [process.pid], "the number may be another group's then"


async def test_an_end_does_not_wait_for_zombies() -> None:
    async with run_program(UNREAPED) as (process, [zombie, parent]):
        began_s = time.monotonic()
        await process.end(0)
        assert time.monotonic() - began_s < 5
        assert psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE
        os.kill(parent, signal.SIGKILL)


async def test_an_end_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    process = await Guarded.start("busy", ["sleep", "60"], {})
    monkeypatch.setattr(guarded, "_DYING_S", 0.1)
    monkeypatch.setattr(guarded, "_find_living", lambda *_: [7, 8])  # as if a driver held them
    await process.end(0)
    assert "busy: processes 7, 8 have not ended 0.1 s after they were killed" in caplog.text
