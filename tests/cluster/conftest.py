"""Each test, or file, has a directory for temporary files of its own, by which its Rays are known from all others."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def _temporary() -> Iterator[str]:
    """Its path is short, since Ray's sockets are beneath it."""
    directory = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def temporary() -> Iterator[str]:
    with _temporary() as directory:
        yield directory


@pytest.fixture(scope="module")
def temporary_of_file() -> Iterator[str]:
    with _temporary() as directory:
        yield directory
