"""A program that starts threads of OpenMP, then a process that needs some: `python -m tests.copied_before_threads`."""

import os
import signal
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from tinker_server.backends.processes.later_forks import keep_copy


def add_many() -> float:
    """Add in an OpenMP region of all threads."""
    return float(torch.ones(1 << 20).add(1).sum())


def say(answer: Connection) -> None:
    """Send a sum, a variable, the number of threads, the parent, and how an interpreter ended that was spawned."""
    spawned = get_context("spawn").Process(target=add_many)
    spawned.start()
    spawned.join()
    answer.send((add_many(), os.environ["SET_LATER"], torch.get_num_threads(), os.getppid(), spawned.exitcode))


def main() -> None:
    """Print what the process says."""
    copies = keep_copy()
    add_many()
    os.environ["SET_LATER"] = "yes"
    ours, theirs = copies.Pipe()
    process = copies.Process(target=say, kwargs={"answer": theirs}, name="later")
    process.start()
    found, variable, num_threads, parent, spawned = ours.recv()
    process.join()
    print(found, variable, num_threads, parent != os.getpid(), spawned, process.exitcode)
    print(copies.call(lambda: (add_many(), os.environ["SET_LATER"], os.getpid() != parent)))
    for function in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os.environ["ABSENT"]):
        try:
            copies.call(function)
        except (EOFError, KeyError) as error:
            print(type(error).__name__)


if __name__ == "__main__":
    main()
