"""Processes that are copies of what another was before it had threads."""

import os
import subprocess
import sys


def test_a_copy_from_before_the_first_threads_of_openmp_has_threads_of_its_own_and_spawns() -> None:
    """A fork of the present would wait for threads that it lacks. An engine's ranks on a CPU are spawned by a copy."""
    command = [sys.executable, "-m", "tests.copied_before_threads"]
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    process, call, *failed = done.stdout.splitlines()
    assert process == f"{float(1 << 21)} yes 2 True 0 0"
    assert call == str((float(1 << 21), "yes", True))
    assert (failed, done.stderr) == (["EOFError", "KeyError"], "")
