"""Each test has a directory for temporary files of its own, by which its Rays are known from all others."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its path is short, since Ray's sockets are beneath it."""
    directory = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", directory)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
