"""A process returns freed memory to the system, and knows what is free."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from tinker_server.backends.processes.heap import free_main_bytes, give_back_memory

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


def test_a_containers_limit_bounds_the_free_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert free_main_bytes(tmp_path) == 1000  # no control group
    for name, text in {"max": "max\n", "current": "500\n", "stat": "anon 400\ninactive_file 100\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_main_bytes(tmp_path) == 1000  # no limit
    for limit, free in (("900", 500), ("9000", 1000), ("300", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert free_main_bytes(tmp_path) == free
