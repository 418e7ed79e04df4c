"""Keep a copy of this process as it is now, and make the processes that it starts later copies of that.

A copy that is made later would have the threads' locks but not the threads: an OpenMP region in it waits forever for
threads that exist here alone.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import cloudpickle
from setproctitle import setproctitle

T = TypeVar("T")
_FIRST = 3
"""Behind the standard descriptors."""
_TITLE = "forks of what was imported"


class Copies(ForkServerContext):
    """Starts processes that are copies of the kept process, with the variables of this process."""

    def Process(  # type: ignore[override]
        self, *, target: Callable[..., object], kwargs: Mapping[str, object], name: str
    ) -> BaseProcess:
        args = dict(os.environ), target
        return super().Process(target=run_with, args=args, kwargs=kwargs, name=name)

    def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns in a process of its own. Raises what it raises there, and EOFError if the
        process dies."""
        receiving, sending = self.Pipe(duplex=False)
        with receiving:
            with sending:
                pickled = cloudpickle.dumps(function)
                process = self.Process(target=send_result, kwargs={"of": pickled, "to": sending}, name="call")
                process.start()
            try:
                result, error = receiving.recv()
            finally:
                process.join()
        if error is not None:
            raise error
        returned: T = result
        return returned


def keep_copy() -> Copies:
    """Keep a copy of this process, which must have no threads yet."""
    resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload([])
    start_interpreter = util.spawnv_passfds
    util.spawnv_passfds = partial(_copy, start_interpreter)
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start_interpreter
    return Copies()


def _copy(
    start_interpreter: Callable[..., int],
    path: bytes,  # noqa: ARG001 - as `spawnv_passfds`
    args: Sequence[Any],
    passfds: Sequence[int],
) -> int:
    """Run multiprocessing's server of forks in a copy of this process, in place of a new interpreter. What the copies
    themselves spawn has an interpreter of its own."""
    if pid := os.fork():
        return pid
    util.spawnv_passfds = start_interpreter
    try:
        last = _FIRST
        for fd in (*sorted(passfds), os.sysconf("SC_OPEN_MAX")):
            os.closerange(last, fd)
            last = fd + 1
        setproctitle(_TITLE)
        forkserver._forkserver.__init__()  # type: ignore[misc]
        exec(args[-1], {})
    except Exception:  # noqa: BLE001 - multiprocessing then starts an interpreter in place of the copy
        traceback.print_exc()
    finally:
        os._exit(0)


def send_result(of: bytes, to: Connection) -> None:
    """Send what a pickled function returns, and the error that it raises or None."""
    try:
        result, error = cloudpickle.loads(of)(), None
    except Exception as raised:  # noqa: BLE001 - it is raised where the function was called
        result, error = None, raised
    to.send((result, error))


def run_with(env: Mapping[str, str], target: Callable[..., object], /, **named: object) -> None:
    """Run a function in a process that has exactly these variables."""
    os.environ.clear()
    os.environ.update(env)
    target(**named)
