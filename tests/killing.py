"""Work that is killed at each of its steps in turn, each time in a process of its own."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import count

Work = Callable[[Callable[..., None]], None]
"""Calls what it is given before each of its steps."""


def kill_at_each_step(work: Work, look: Callable[[int], None], every: int = 1) -> None:
    """Do the work in processes that are killed, the first before its first step, the next `every` steps later, until a
    process ends by itself; print the number of kills. `look` is called after each kill. Call it in a process without
    threads, which forks."""
    for number in count(0, every):
        if (child := os.fork()) == 0:
            _work_until(number, work)
        if (status := os.waitpid(child, 0)[1]) != signal.SIGKILL:
            assert status == 0, status
            print(number // every)
            return
        look(number)


def _work_until(number: int, work: Work) -> None:
    left = count(number, -1)

    def step(*_: object) -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        work(step)
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent would
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_script(script: str, *arguments: object) -> int:
    """Run a script that calls `kill_at_each_step`; return the number of kills."""
    ended = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)
