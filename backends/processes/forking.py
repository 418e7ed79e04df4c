"""Import what processes of a kind need, then be copied for each of them: `python -m
tinker_server.backends.processes.forking MODULE...`.

This process imports the modules and computes nothing. For each request at its standard input, a socket, it forks, and
the fork runs the `main` of the module that the request names. For it to be as a process that has imported all by
itself, the variables that are read at an import are this process's own (`preloaded.LATE` are set in the fork), and
neither CUDA nor threads may have begun here. A fork of a process that has begun CUDA is broken, so each then becomes a
new interpreter.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from setproctitle import setproctitle

from tinker_server.backends.processes.guarded import GUARD

REQUEST_BYTES = 1 << 16
MOST_DESCRIPTORS = 16
"""Of a request: where the answer goes, the pipe of the guard, the standard error, the connection to the server, and
those that variables name."""
_STANDARD_INPUT = 0
_DESCRIPTORS = Path("/proc/self/fd")
_DRIVERS = "/dev/nvidia"
"""The devices that CUDA opens as it begins, through whatever library; what only asks for a card's name closes them."""


@dataclass(frozen=True)
class Request:
    """A process to start."""

    module: str
    env: Mapping[str, str]
    """Variables beside this process's own."""
    named: list[str]
    """Variables that name the descriptors behind the first four."""

    def encode(self) -> bytes:
        """Return it in the form in which it is sent."""
        return json.dumps([self.module, dict(self.env), self.named]).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Request":
        """Return what `encode` was called on."""
        return cls(*json.loads(data))


def serve(requests: socket.socket, reason: str | None) -> Callable[[], None]:
    """Start a process for each request, until the server closes its end. Return in each new process what that runs.
    With a `reason` not to be copied, each imports its own libraries."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended are gone at once
    # Python 3.12 warns of OpenBLAS' threads too, which that ends before a fork. `reason_against` looks for Python's.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    while True:
        data, fds, *_ = socket.recv_fds(requests, REQUEST_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return become(Request.decode(data), fds, is_copied=reason is None)
        for fd in fds:
            os.close(fd)


def become(request: Request, fds: list[int], *, is_copied: bool) -> Callable[[], None]:
    """Make this fork the process of a request, and return its program."""
    reply, guarding, errors, connection, *named = fds
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(errors, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.set_inheritable(guarding, True)
    os.posix_spawn("/bin/sh", ["/bin/sh", "-c", GUARD, str(guarding)], os.environ)
    for fd in (guarding, errors):
        os.close(fd)
    os.environ.update(request.env)
    os.environ.update({variable: str(fd) for variable, fd in zip(request.named, named, strict=True)})
    command = [sys.executable, "-m", request.module, str(connection)]
    if not is_copied:
        _answer(reply)
        for fd in (connection, *named):
            os.set_inheritable(fd, True)
        os.execv(sys.executable, command)
    sys.argv = command[2:]
    setproctitle(" ".join(command))
    _answer(reply)
    program = sys.modules["__main__"] = importlib.import_module(request.module)  # which multiprocessing imports first
    main: Callable[[], None] = program.main
    return main


def _answer(reply: int) -> None:
    """Send this process's number, and a descriptor of it, which is never another's: it tells the server of the end."""
    this = os.pidfd_open(os.getpid())
    with socket.socket(fileno=reply) as answering, suppress(ConnectionError):  # whoever asked may have been cancelled
        socket.send_fds(answering, [str(os.getpid()).encode()], [this])
    os.close(this)


def reason_against(*modules: str) -> str | None:
    """Import modules, and say why copies of this process would not work then; None if they do."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the processes fail themselves, and say what of
            return f"{module} cannot be imported ({type(error).__name__}: {error})"
    if os.environ.get("TORCH_COMPILE_DISABLE") != "1":
        # What names compiled code in caches, by the files of torch and Triton: each process that compiles would compute
        # it for half a second.
        if codecache := sys.modules.get("torch._inductor.codecache"):
            codecache.torch_key()
        if (triton := sys.modules.get("torch._inductor.runtime.triton_compat")) and triton.HAS_TRITON:
            triton.triton_key()
    # Torch, which asks NVML for GPUs where CUDA shall not begin, leaves it open: it is closed once for each time.
    with suppress(OSError):  # it is not loaded
        nvml = ctypes.CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        while nvml.nvmlShutdown() == 0:
            pass
    paths = {str(descriptor.resolve()) for descriptor in _DESCRIPTORS.iterdir()}
    if opened := sorted(path for path in paths if path.startswith(_DRIVERS)):
        return f"a library has begun CUDA while it was imported, and opened {', '.join(opened)}"
    if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        return f"a library has started threads while it was imported: {', '.join(others)}"
    return None


def import_and_serve(modules: Sequence[str], requests: socket.socket) -> Callable[[], None]:
    """Import what all processes of a kind need, and serve."""
    reason = reason_against(*modules)
    if reason is not None:
        print(f"{reason}: each process imports its own libraries", file=sys.stderr, flush=True)
    gc.collect()
    gc.freeze()  # collections would write to what the forks share
    return serve(requests, reason)


def take_requests() -> socket.socket:
    """Return the standard input, which is the connection to the server, and leave nothing to read in its place."""
    requests = socket.socket(fileno=os.dup(_STANDARD_INPUT))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), _STANDARD_INPUT)
    return requests


if __name__ == "__main__":
    import_and_serve(sys.argv[1:], take_requests())()
