"""Write files and directories so that they are there whole or not at all, and durable if that is wanted."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_aside(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a path at which to write a file or a directory; it is renamed to `path` once the block has ended.

    It is in the same directory and begins with a dot. It is removed if the block raises. A file that is not `durable`
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


def write_private(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write or replace a file that only its user may read. Raises OSError."""
    with (
        write_aside(path, durable=durable) as aside,
        os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
    ):
        file.write(content)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory with all above it, durably: files synced in it later are lost if its own name is."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for folder in new:
        _flush_one(folder.parent)


def make_private_directory(path: Path) -> None:
    """Make a directory that is for its user alone, or let nobody else into it any more. Raises OSError."""
    make_directory(path, 0o700)
    path.chmod(0o700)


def flush(path: Path) -> None:
    """Make a file durable, or a directory with all that is in it; their names too."""
    for part in (*path.rglob("*"), path, path.parent) if path.is_dir() else (path, path.parent):
        _flush_one(part)


def _flush_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
