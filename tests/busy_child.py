"""A child process that works without giving way: `python -m tests.busy_child FD`."""

import atexit
import ctypes
import os
import pickle
import subprocess
import time
from dataclasses import dataclass
from multiprocessing.spawn import get_preparation_data

from tinker_server.backends.processes import rpc
from tinker_server.backends.processes.rpc import Command
from tinker_server.backends.protocol import BackendFailed

LONGEST_ANSWER = 1 << 20
IMPORTED_S = time.monotonic()


@dataclass(frozen=True)
class Grandchild(Command[str]):
    """Start a process of the child's own; answers both process ids."""


@dataclass(frozen=True)
class Nap(Command[None]):
    """Do nothing for so long, and let no other thread run."""

    seconds: int


@dataclass(frozen=True)
class Work(Command[None]):
    """Do nothing for so long, and let other threads run."""

    seconds: int


@dataclass(frozen=True)
class EndSlowly(Command[None]):
    """Have the end of the interpreter take so long, as with CUDA and vLLM."""

    seconds: int


@dataclass(frozen=True)
class NotToBeRead(Command[None]):
    """Answer with what the server cannot load."""


@dataclass(frozen=True)
class Refuse(Command[None]):
    """Fail by name."""


@dataclass(frozen=True)
class Zeros(Command[bytes]):
    """Answer so many of them."""

    size: int


@dataclass(frozen=True)
class Environment(Command[dict[str, str]]):
    """Answer with the variables of the process."""


@dataclass(frozen=True)
class Imported(Command[float]):
    """Answer when the module was imported, by the monotonic clock."""


@dataclass(frozen=True)
class Program(Command[str]):
    """Answer with the module that multiprocessing takes for the program."""


@dataclass(frozen=True)
class Read(Command[bytes]):
    """Answer with what a descriptor gives that a variable names."""

    variable: str


class Unloadable:
    """Fails where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pickle.loads, ("no bytes",))


def handle(command: object, _: object) -> object:
    """Carries out each command."""
    match command:
        case Grandchild():
            started = subprocess.Popen(["sleep", "60"])
            return f"{os.getpid()} {started.pid}"
        case Nap(seconds):
            ctypes.PyDLL(None).sleep(seconds)  # unlike time.sleep, keeps the interpreter's lock
            return None
        case Work(seconds):
            time.sleep(seconds)
            return None
        case EndSlowly(seconds):
            atexit.register(time.sleep, seconds)
            return None
        case Refuse():
            raise BackendFailed("no weights")
        case Zeros(size):
            return bytes(size)
        case Environment():
            return dict(os.environ)
        case Imported():
            return IMPORTED_S
        case Program():
            return str(get_preparation_data("busy")["init_main_from_name"])
        case Read(variable):
            return os.read(int(os.environ[variable]), 100)
        case NotToBeRead():
            return Unloadable()
    raise AssertionError(command)


def main() -> None:
    from tests import busy_child  # whose classes the commands are, and not this module's run as a program

    rpc.MAX_ANSWER_BYTES = LONGEST_ANSWER
    rpc.serve(lambda keep_waiting: busy_child.handle)


if __name__ == "__main__":
    main()
