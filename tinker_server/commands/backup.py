"""`tinker-server backup` and `restore`: the database at a moment, and all weights that it refers to.

A server may run meanwhile. Weights are written once and never changed. Present weights are hard-linked first, then the
database is copied, then further weights that it refers to are linked. If the server deleted some in between, the copy
is made again.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sqlalchemy import URL

from tinker_server.backends import tasks
from tinker_server.backends.files import flush, write_aside
from tinker_server.commands import databases
from tinker_server.errors import StartFailed
from tinker_server.settings import Settings
from tinker_server.store.directories import hold, link
from tinker_server.store.last_backup import note_backup

ABOUT = "backup.json"
FORMAT = 1
TRIES = 5
KEPT_FILES = ("keys", "link-secret", "proof-secret", "token-secret")
"""Further files of the data directory that are copied."""
_NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
_ASIDE = re.compile(r"\..+\.[0-9a-f]{32}")
"""Name that `write_aside` gives a directory until it is complete."""


def _contents(directory: Path, about: Mapping[str, object]) -> str:
    """Return what a backup has, in words."""
    keys = ", keys" if (directory / "keys").is_file() else ""
    return f"{_NAMES[str(about['database'])]} database, {about['directories']} weight directories{keys}"


async def back_up(settings: Settings, target: Path) -> str:
    """Write a backup, which appears whole or not at all, and describe it in words. Raises StartFailed."""
    data_dir, url = settings.data_dir.resolve(), settings.resolve_database_url()
    _require_places(data_dir, target)
    kind = databases.kind_of(url)
    try:
        await asyncio.to_thread(_remove_left, target.parent)
        with contextlib.ExitStack() as locked, write_aside(target) as aside:
            locked.enter_context(_begin(aside))  # until it has its name
            directories = await _consistent(data_dir, url, aside, databases.FILES[kind])
            for name in KEPT_FILES:
                if (data_dir / name).is_file():
                    shutil.copy2(data_dir / name, aside / name)
            about = {"format": FORMAT, "database": kind, "made_at": time.time(), "directories": len(directories)}
            (aside / ABOUT).write_text(json.dumps(about))
    except OSError as error:
        raise StartFailed(f"the backup cannot be written: {error}") from None
    said = _contents(target, about)
    try:
        note_backup(data_dir)
    except OSError as error:
        return f"{said}; its time cannot be noted in {data_dir}, so the metric of its age is wrong: {error.strerror}"
    return said


@contextlib.contextmanager
def _begin(aside: Path) -> Iterator[None]:
    """Create the directory and lock it while it is written. An unlocked directory was left by a killed backup."""
    aside.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _open_directory(aside) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        (aside / ABOUT).write_text("{}")
        yield


def _remove_left(parent: Path) -> None:
    """Remove incomplete directories that killed backups left beside it."""
    for left in parent.glob(".*") if parent.is_dir() else ():
        if _ASIDE.fullmatch(left.name) is None or left.is_symlink() or not (left / ABOUT).is_file():
            continue
        with contextlib.suppress(OSError), _open_directory(left) as handle:  # a live writer holds the lock
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)


@contextlib.contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _require_places(data_dir: Path, target: Path) -> None:
    if not data_dir.is_dir():
        raise StartFailed(f"there is no data directory {data_dir}")
    if target.exists():
        raise StartFailed(f"{target} exists already: name a new directory")


async def _consistent(data_dir: Path, url: str | URL, aside: Path, name: str) -> set[str]:
    for _ in range(TRIES):
        await _link_all(data_dir, aside, _present(data_dir))
        (aside / name).unlink(missing_ok=True)
        directories = await databases.copy(url, aside / name)
        await _link_all(data_dir, aside, directories)
        if not (missing := {directory for directory in directories if not (aside / directory).is_dir()}):
            for extra in set(_present(aside)) - directories:
                shutil.rmtree(aside / extra)
            return directories
    raise StartFailed(
        f"{len(missing)} weight directories that the database names are missing, such as {min(missing)}:"
        " they are deleted while they are copied, or were lost; stop the server and try again"
    )


def _present(root: Path) -> list[str]:
    """List the directories of complete weights."""
    found = root.glob("checkpoints/*/*/*")
    return [str(path.relative_to(root)) for path in found if path.is_dir() and not path.name.startswith(".")]


async def _link_all(source: Path, target: Path, directories: Iterable[str]) -> None:
    for directory in directories:
        # An interruption does not end a thread, and the target is removed then.
        await tasks.to_the_end(asyncio.to_thread(_link_directory, source / directory, target / directory))


def _link_directory(source: Path, target: Path) -> None:
    """Hard-link a directory, unless the target is there or it is deleted meanwhile."""
    if target.exists():
        return
    try:
        with write_aside(target) as aside:
            shutil.copytree(source, aside, copy_function=_link)
    except (FileNotFoundError, shutil.Error):
        return


def _link(source: str, target: str) -> None:
    """Link or copy a file. Raises StartFailed where that is not possible, which `copytree` would collect and go on, and
    FileNotFoundError where it was deleted."""
    try:
        link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StartFailed(f"{source} cannot be copied: {error.strerror}") from None


async def restore(settings: Settings, source: Path) -> str:
    """Copy a backup into an empty data directory and an empty database. Raises StartFailed."""
    about = _about(source)
    data_dir, url = settings.data_dir.resolve(), settings.resolve_database_url()
    kind = databases.kind_of(url)
    if about["database"] != kind:
        raise StartFailed(f"the backup is of a {about['database']} database, and this one is {kind}")
    with hold(data_dir):
        present = [name for name in ("tinker-server.db", "checkpoints", *KEPT_FILES) if (data_dir / name).exists()]
        if present:
            raise StartFailed(f"{data_dir} has {', '.join(present)} already: restore into an empty data directory")
        databases.require_no_file(url)
        try:
            await _link_all(source, data_dir, _present(source))
            found, had = len(_present(data_dir)), about["directories"]
            if found != had:
                raise StartFailed(f"{source} is damaged: {found} of {had} weight directories are there")
            for name in KEPT_FILES:
                if (source / name).is_file():
                    shutil.copy2(source / name, data_dir / name)
            await databases.restore(url, source / databases.FILES[kind])
            await asyncio.to_thread(flush, data_dir)
        except BaseException as error:
            shutil.rmtree(data_dir / "checkpoints", ignore_errors=True)  # so that it can be tried again
            for name in KEPT_FILES:
                (data_dir / name).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StartFailed(f"the backup cannot be restored: {error}") from None
            raise
    return _contents(source, about)


def _about(source: Path) -> dict[str, object]:
    try:
        about: dict[str, object] = json.loads((source / ABOUT).read_text())
    except (OSError, ValueError):
        raise StartFailed(f"{source} is not a backup: it has no readable {ABOUT}") from None
    if about.get("format") != FORMAT:
        raise StartFailed(f"{source} has the format {about.get('format')}; this version reads {FORMAT}")
    return about
