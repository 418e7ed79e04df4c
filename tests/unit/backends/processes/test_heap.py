"""A process returns freed memory to the system."""

import numpy as np
import psutil

from backends.processes.heap import give_back_memory

MIB = 1 << 20


def test_memory_freed_before_what_is_still_used_is_given_back():
    process = psutil.Process()
    # Each small enough for glibc's heap, and the last of them keeps that from shrinking by itself.
    arrays = [np.ones(MIB // 16, np.uint8) for _ in range(3200)]
    last = arrays[-1]
    arrays.clear()
    held = process.memory_info().rss
    give_back_memory()
    assert held - process.memory_info().rss > 100 * MIB
    assert last.all()
