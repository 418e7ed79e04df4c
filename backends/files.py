"""Files and directories that are there whole or not at all, and durable once they are there, where that is wanted."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Where to write a file or a directory that gets its name `path` once the block has ended.

    A name that begins with a dot, in the same directory. It is removed where the block raises. What is not `durable`
    is in the memory of this machine at first, and may be lost or half there after a power failure.
    """
    make_directory(path.parent)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield aside
        if durable:
            flush(aside)
        aside.rename(path)
    except BaseException:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
        raise
    if durable:
        _flush_one(path.parent)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory with all above it, durably: what is synced in it later is not found if its own name is lost."""
    new = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for one in new:
        _flush_one(one.parent)


def flush(path: Path) -> None:
    """Make a file durable, or a directory with all that is in it; its name too."""
    for part in (*path.rglob("*"), path, path.parent) if path.is_dir() else (path, path.parent):
        _flush_one(part)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
