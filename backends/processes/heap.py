"""Main memory: what is free, and freed memory back to the system.

glibc keeps it while anything behind it is still in use, which some always is when a process works on thousands of
requests at once: after 46,000 scored photographs an engine held 7 GB and used 2.1 GB of them.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_main_bytes(group: Path = _CONTROL_GROUP) -> int:
    """Return the bytes of main memory that are free, of the machine's and of what a container's limit leaves (memory
    of the control group, version 2; the files it has cached give way)."""
    free_bytes = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # not in a container, or without a limit ("max")
        limit = int((group / "memory.max").read_text())
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / "memory.current").read_text()) - int(used["inactive_file"])
        return min(free_bytes, max(0, limit - taken))
    return free_bytes


def give_back_memory() -> None:
    """Give back this process's freed memory. Do nothing if the C library has no `malloc_trim`."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
