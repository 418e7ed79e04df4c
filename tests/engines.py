"""Engines that start in seconds, where the start is not what is tested: forks of a process that has imported vLLM.

A sampler's process and the engine beneath it would each import it anew, 9 s of a core. The process that forks has the
environment that the launcher gives. It computes nothing, so has no threads that a fork would miss.
"""

import asyncio
import atexit
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from tests.specs import tiny_spec
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes import launcher
from tinker_server.backends.processes.messages import STREAM_LIMIT
from tinker_server.backends.processes.rpc import Child, Process

IMPORTED = (
    "tinker_server.backends.sampler.engine.vllm_patches.worker",
    "vllm.model_executor.models.qwen3_vl",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_model_runner",
)
STARTS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""The modules by which vLLM starts an engine, and its ranks."""
MESSAGE_BYTES = 4096
_ONE_AT_A_TIME = threading.Lock()


async def fork_sampler(spec: ModelSpec) -> list[Child]:
    """Start an engine's process as `launcher.launch_sampler` does, but with all imports done, and without a guard."""
    ours, theirs = socket.socketpair()
    env = {name: value for name, value in launcher._for_engine(spec).items() if name.startswith("VLLM_")}
    folder = env[launcher._VLLM_SOCKETS]
    with theirs:
        pid = await asyncio.to_thread(_forked, env, theirs)
    reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)

    async def end(grace_s: float) -> None:
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            async with asyncio.timeout(grace_s):
                while True:
                    os.kill(pid, 0)
                    await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    return [Child(launcher.sampler_name(spec), Process(pid, end), reader, writer)]


def _forked(env: Mapping[str, str], connection: socket.socket) -> int:
    """Return the number of a new process at the other end of a connection, with these variables of vLLM's."""
    with _ONE_AT_A_TIME:
        forker = _forker()
        socket.send_fds(forker, [json.dumps(env).encode()], [connection.fileno()])
        answer = forker.recv(MESSAGE_BYTES)
    assert answer, "the process that forks engines has ended"
    return int(answer)


@cache
def _forker() -> socket.socket:
    """Start the process that forks; return the connection to it, with which it ends."""
    ours, theirs = socket.socketpair()
    # A fork of a process that has had several OpenMP threads would wait for them.
    one_thread = {"OMP_NUM_THREADS": "1"}
    env = {**os.environ, **launcher._WITHOUT_BARS, **launcher._for_vllm(tiny_spec(Path()), ()), **one_thread}
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], start_new_session=True)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _fork_on_request(requests: socket.socket) -> None:
    """Fork an engine's process for each request, until the connection ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended are gone at once
    while True:
        env, fds, *_ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        if not env:
            return
        if (pid := os.fork()) == 0:
            requests.close()
            _serve(fds[0], json.loads(env))
        os.close(fds[0])
        requests.sendall(str(pid).encode())


def _serve(connection: int, env: Mapping[str, str]) -> None:
    """Be an engine's process, whose engine is a fork in its turn."""
    from tinker_server.backends.sampler.engine import process

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(env)
    for name in STARTS:
        importlib.import_module(name).get_mp_context = lambda: get_context("fork")  # type: ignore[attr-defined]
    sys.argv[1:] = [str(connection)]
    held = [connection]

    def leave() -> None:
        """Only the end of this process ends the connection, by which the server sees it."""
        if held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=leave)
    asyncio.run(process.serve_engine())
    sys.exit()


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    _fork_on_request(socket.socket(fileno=int(sys.argv[1])))
