"""Child processes end with the server, whatever it died of, and everything that they started ends with them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from tests.busy_child import LONGEST_ANSWER, EndSlowly, Environment, Grandchild, Nap, NotToBeRead, Work, Zeros
from tests.specs import tiny_spec
from tinker_server.backends.model_spec import Mesh, Placement
from tinker_server.backends.processes import launcher
from tinker_server.backends.processes.launcher import Others, Seat, launch, launch_sampler, launch_trainer
from tinker_server.backends.processes.rpc import Child, ChildDied
from tinker_server.backends.protocol import BackendFailed, InvalidInput

BUSY = "tests.busy_child"
SERVER = """
import asyncio, sys
from tinker_server.backends.processes.launcher import FORKED, launch
from tests.busy_child import LONGEST_ANSWER, Grandchild, Nap

FORKED.update(dict.fromkeys(sys.argv[1:], ()))

async def main():
    child = await launch("busy", "tests.busy_child", {})
    print(await child.call(Grandchild()), flush=True)
    await child.call(Nap(60))

asyncio.run(main())
"""


@pytest.fixture(params=[True, False], ids=["forked", "anew"])
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Busy children are forks of a process that has imported their module, or import it themselves."""
    if request.param:
        monkeypatch.setattr(launcher, "FORKED", {BUSY: ()})
    return bool(request.param)


def survivors(pids: list[int]) -> list[int]:
    """Those that still run."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def test_a_killed_server_takes_busy_children_and_their_children_with_it(forked: bool) -> None:
    names = [BUSY] if forked else []
    with subprocess.Popen([sys.executable, "-c", SERVER, *names], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        pids += [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
        assert len(survivors(pids)) == (2 + 5 if forked else 2 + 3)  # the guards, and the process that has imported
        time.sleep(0.2)  # the child is in its nap, holding the interpreter's lock
        server.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        while survivors(pids) and time.monotonic() - killed_at < 2:
            time.sleep(0.02)
        assert survivors(pids) == []


async def test_a_stopped_child_leaves_nothing_behind(tmp_path: Path, forked: bool) -> None:
    await (await launch("busy", BUSY, {})).stop()  # what is kept for further children is opened
    own = tmp_path / "own"
    own.mkdir()
    (own / "socket").touch()
    descriptors = _num_descriptors()
    child = await launch("busy", BUSY, {}, folder=str(own))
    pids = [int(pid) for pid in (await child.call(Grandchild())).split()]
    leader = psutil.Process(pids[0])
    group = [pid for pid in psutil.pids() if _group(pid) == leader.pid]
    assert len(group) == 3  # the child, its own, and the guard
    await child.stop()
    await asyncio.sleep(0.1)
    assert survivors(group) == []
    assert not own.exists()
    assert _num_descriptors() <= descriptors + 1  # the event loop's watcher of children


async def test_a_start_that_is_cancelled_leaves_nothing_behind(tmp_path: Path, forked: bool) -> None:
    own = tmp_path / "own"
    await (await launch("busy", BUSY, {})).stop()  # the event loop opens what it keeps
    descriptors = _num_descriptors()
    others = set(psutil.Process().children(recursive=True))  # of other tests in this process
    num_cancelled = 0
    for num_turns in range(1, 13):
        own.mkdir()
        starting = asyncio.create_task(launch("busy", BUSY, {}, folder=str(own)))
        for _ in range(num_turns):  # of the event loop, not of a clock: a fast machine starts a child in a millisecond
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if starting.cancelled():
            num_cancelled += 1
        else:
            await starting.result().stop()
        assert not own.exists()
    assert num_cancelled
    children = [child.pid for child in set(psutil.Process().children(recursive=True)) - others]
    await asyncio.sleep(1)
    assert survivors(children) == []
    assert _num_descriptors() <= descriptors


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_a_child_that_works_when_the_server_stops_is_not_waited_for_long(forked: bool) -> None:
    child = await launch("busy", BUSY, {})
    await child.call(Grandchild())
    working = asyncio.create_task(child.call(Nap(30)))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await child.stop()
    assert time.monotonic() - began < 3
    with pytest.raises(ChildDied):
        await working


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_child_is_noticed_at_once(loop_factory: Callable[[], asyncio.AbstractEventLoop], forked: bool) -> None:
    async def kill() -> None:
        child = await launch("busy", BUSY, {})
        try:
            napping = asyncio.create_task(child.call(Nap(60)))
            await asyncio.sleep(0.5)
            os.kill(child.process.pid, signal.SIGKILL)
            with pytest.raises(ChildDied):
                await asyncio.wait_for(napping, 5)
            assert child.died.is_set()
        finally:
            await child.stop(grace_s=1)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(kill())


async def test_an_answer_that_cannot_be_read_ends_the_child_and_fails_its_calls() -> None:
    child = await launch("busy", BUSY, {})
    try:
        with pytest.raises(ChildDied):
            await asyncio.wait_for(child.call(NotToBeRead()), 20)
        assert child.died.is_set()
        with pytest.raises(ChildDied):
            await child.call(Nap(0))
    finally:
        await child.stop(grace_s=1)


async def test_an_answer_that_is_too_long_fails_its_call_alone() -> None:
    child = await launch("busy", BUSY, {})
    try:
        with pytest.raises(InvalidInput, match=f"the answer has .* bytes; at most {LONGEST_ANSWER} can be given"):
            await child.call(Zeros(LONGEST_ANSWER))
        assert await child.call(Zeros(10)) == bytes(10)
    finally:
        await child.stop(grace_s=1)


@pytest.mark.parametrize("module", [launcher._SAMPLER, launcher._HOLDER])
def test_no_module_that_begins_cuda_is_imported_for_forks(module: str) -> None:
    """Kernels of linear attention ask the card for its name as they are imported."""
    program = "import importlib, sys; [*map(importlib.import_module, sys.argv[1:])]; print(*sys.modules)"
    command = [sys.executable, "-c", program, module, *launcher.FORKED[module]]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert module in imported
    assert not [name for name in imported if "flash_linear_attention" in name]


def test_compilers_are_imported_before_ranks_on_cuda_alone_with_the_keys_of_their_caches() -> None:
    on_cuda = launcher.modules_before(
        launcher._RANK, launcher._for_device(replace(tiny_spec(Path()), device="cuda"), ())
    )
    on_cpu = launcher.modules_before(launcher._RANK, launcher._for_device(tiny_spec(Path()), ()))
    assert set(on_cuda) - set(on_cpu) == set(launcher._COMPILER)
    program = (
        "import sys; from tinker_server.backends.processes.forking import reason_against\n"
        "reason = reason_against(*sys.argv[1:]); from triton.runtime.cache import triton_key\n"
        "print(reason, triton_key.cache_info().currsize)"
    )
    command = [sys.executable, "-c", program, *launcher._COMPILER]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None 1\n"


async def test_an_engine_for_another_machine_that_does_not_start_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fail(*_: object) -> None:
        raise BackendFailed("the imports ended")

    monkeypatch.setattr(launcher, "_start_module", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BackendFailed, match="the imports ended"):
        await launcher.launch_at(theirs, tiny_spec(tmp_path), None)
    assert not [*tmp_path.iterdir()]  # noqa: ASYNC240


@pytest.fixture
def busy_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of engines and ranks, forks of a process that has imported the module of a busy child."""
    for module in ("_RANK", "_SAMPLER"):
        monkeypatch.setattr(launcher, module, BUSY)
    monkeypatch.setattr(launcher, "FORKED", {BUSY: ()})


async def test_ranks_on_cuda_see_their_gpus_alone_by_the_machines_names(
    monkeypatch: pytest.MonkeyPatch, busy_children: None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-aa,7")
    spec = replace(tiny_spec(Path()), device="cuda", mesh=Mesh(shard=2), placement=Placement((1, 2)))
    ranks = await launch_trainer(spec)
    try:
        found = [await rank.call(Environment()) for rank in ranks]
    finally:
        await asyncio.gather(*(rank.stop(grace_s=0.1) for rank in ranks))
    assert {one["CUDA_VISIBLE_DEVICES"] for one in found} == {"GPU-aa,7"}
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in found] == [("0", "0", "2"), ("1", "1", "2")]
    assert len({one["MASTER_PORT"] for one in found}) == 1
    assert found[0]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


async def test_an_engine_sees_its_own_gpus_alone_by_the_machines_names(
    monkeypatch: pytest.MonkeyPatch, busy_children: None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-aa,7,8")
    placement = Placement((0,), engines=((0, 1), (2, 3)))
    spec = replace(
        tiny_spec(Path()), device="cuda", tensor_parallel=2, placement=placement, compiled_dir=Path("/cache")
    )
    [engine] = await launch_sampler(spec.of_engine(1))
    try:
        found = await engine.call(Environment())
    finally:
        await engine.stop(grace_s=0.1)
    assert (found["CUDA_VISIBLE_DEVICES"], engine.name) == ("7,8", "sampler tiny engine 1")
    assert found["TRITON_CACHE_DIR"] == "/cache/triton"  # one for all engines


async def test_every_process_of_a_model_has_its_caches_in_the_data_directory_or_where_the_operator_says(
    monkeypatch: pytest.MonkeyPatch, busy_children: None
) -> None:
    """A user without a home directory cannot write to the libraries' own."""
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/operators")
    spec = replace(tiny_spec(Path()), compiled_dir=Path("/cache"))
    children = [*await launch_sampler(spec), *await launch_trainer(spec)]
    try:
        found = [await child.call(Environment()) for child in children]
    finally:
        await asyncio.gather(*(child.stop(grace_s=0.1) for child in children))
    for one in found:
        assert one["VLLM_CACHE_ROOT"] == "/cache/vllm" and one["TORCHINDUCTOR_CACHE_DIR"] == "/operators"


async def test_the_cache_that_torch_takes_by_itself_is_no_choice_of_the_operator(
    monkeypatch: pytest.MonkeyPatch, busy_children: None
) -> None:
    """Torch sets the variable while it is imported, in the server too."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    [engine] = await launch_sampler(replace(tiny_spec(Path()), compiled_dir=Path("/cache")))
    try:
        found = await engine.call(Environment())
    finally:
        await engine.stop(grace_s=0.1)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/cache/inductor"


async def test_a_child_that_is_ended_while_it_works_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tinker_server.backends.processes.guarded")
    child = await launch("busy", BUSY, {})
    working = asyncio.create_task(child.call(Nap(30)))
    await asyncio.sleep(0.1)
    await child.stop(grace_s=0.1)
    with pytest.raises(ChildDied):
        await working
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "INFO",
        "ended the busy process, which had not ended by itself within 0.1 s",
    )


@pytest.mark.parametrize("last", [Work(30), EndSlowly(30)])
async def test_a_child_ends_by_itself_at_once(
    last: Work | EndSlowly, caplog: pytest.LogCaptureFixture, forked: bool
) -> None:
    caplog.set_level("INFO", "tinker_server.backends.processes.guarded")
    child = await launch("busy", BUSY, {})
    await child.call(Zeros(1))
    calling = asyncio.create_task(child.call(last))
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    await child.stop(grace_s=5)
    assert time.monotonic() - began_s < 2
    assert not caplog.records
    await asyncio.gather(calling, return_exceptions=True)


async def test_ranks_of_several_machines_meet_at_the_address_of_the_first(
    monkeypatch: pytest.MonkeyPatch, busy_children: None
) -> None:
    spec, there = replace(tiny_spec(Path()), mesh=Mesh(shard=2)), list[Seat]()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")

    async def start(seat: Seat) -> list[Child]:
        there.append(seat)
        return []

    ranks = await launch_trainer(spec, Others("127.0.0.2", (start, start)))
    try:
        found = [await rank.call(Environment()) for rank in ranks]
    finally:
        await asyncio.gather(*(rank.stop(grace_s=0.1) for rank in ranks))
    port = int(found[0]["MASTER_PORT"])
    assert there == [Seat(rank, 6, "127.0.0.2", port) for rank in (2, 3, 4, 5)]
    assert [(one["RANK"], one["LOCAL_WORLD_SIZE"], one["WORLD_SIZE"]) for one in found] == [
        ("0", "2", "6"),
        ("1", "2", "6"),
    ]
    assert {one["MASTER_ADDR"] for one in found} == {"127.0.0.2"}
    assert "MASTER_LISTEN_FD" in found[0] and "MASTER_LISTEN_FD" not in found[1]
    # Not that of the machine's name, and not in place of what the operator has chosen.
    assert (found[0]["GLOO_SOCKET_IFNAME"], found[0]["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert launcher._for_rank(spec, there[0])["NCCL_SOCKET_IFNAME"] == "=lo"


async def test_ranks_and_engines_of_a_single_machine_listen_on_loopback_whatever_its_name_stands_for(
    monkeypatch: pytest.MonkeyPatch, busy_children: None
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    spec = replace(tiny_spec(Path()), mesh=Mesh(shard=2))
    children = [*await launch_trainer(spec), *await launch_sampler(spec)]
    try:
        found = [await child.call(Environment()) for child in children]
    finally:
        await asyncio.gather(*(child.stop(grace_s=0.1) for child in children))
    assert [env.get("GLOO_SOCKET_IFNAME") for env in found] == ["lo"] * 3
    assert not any("NCCL_SOCKET_IFNAME" in env for env in found)  # NCCL may take what is fastest


async def test_ranks_here_end_where_one_elsewhere_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Child]()
    real = launcher.launch

    async def noted(*args: Any, **kwargs: Any) -> Child:
        started.append(await real(*args, **kwargs))
        return started[-1]

    async def refuse(seat: Seat) -> list[Child]:
        raise BackendFailed("the machine is lost")

    monkeypatch.setattr(launcher, "launch", noted)
    with pytest.raises(BackendFailed, match="the machine is lost"):
        await launch_trainer(tiny_spec(Path()), Others("127.0.0.1", (refuse,)))
    assert len(started) == 1 and not psutil.pid_exists(started[0].process.pid)
