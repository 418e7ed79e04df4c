"""Consistent copies of a whole database, made while a server uses it, and restored into an empty database."""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from tinker_server.backends.files import write_aside
from tinker_server.errors import StartFailed, start_failure
from tinker_server.store.reading import UNREADABLE

FILES = {"sqlite": "tinker-server.db", "postgresql": "database.dump"}
"""File name of a copy, by kind of database."""
REFERENCES = (
    "SELECT directory FROM checkpoints",
    "SELECT snapshot FROM training_runs WHERE snapshot IS NOT NULL",
    "SELECT directory FROM sampling_sessions"
    " WHERE directory IS NOT NULL AND model_path IS NULL AND weights_deleted_at IS NULL",
)
"""Queries for the directories of weights that rows own, relative to the data directory."""


def kind_of(database_url: str | URL) -> str:
    """Return `sqlite` or `postgresql`. Raises StartFailed for another or none."""
    try:
        kind = make_url(database_url).get_backend_name()
    except ArgumentError:
        kind = "none"  # what was given may hold a password
    if kind not in FILES:
        raise StartFailed(f"the database URL is of {kind}: give one of {' or '.join(FILES)}")
    return kind


async def copy(database_url: str | URL, target: Path) -> set[str]:
    """Write a copy and return the directories that it refers to. Raises StartFailed."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        return await asyncio.to_thread(_copy_sqlite, Path(str(url.database)), target)
    # The dump is of the snapshot of our own transaction, so that both see the same rows.
    async with _connection(url) as connection:
        snapshot = await connection.scalar(text("SELECT pg_export_snapshot()"))
        directories = {str(directory) for query in REFERENCES for directory in await connection.scalars(text(query))}
        await _run("pg_dump", url, "--format=custom", f"--snapshot={snapshot}", f"--file={target}")
    return directories


async def restore(database_url: str | URL, source: Path) -> None:
    """Restore a copy into an empty database. Raises StartFailed."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        await asyncio.to_thread(_place, source, Path(str(url.database)))
        return
    async with _connection(url) as connection:
        tables = await connection.scalar(
            text("SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'")
        )
    if tables:
        raise StartFailed(f"the database {url.database} has tables already: restore into an empty one")
    await _run("pg_restore", url, "--no-owner", "--exit-on-error", "--single-transaction", str(source))


def require_no_file(database_url: str | URL) -> None:
    """Raise StartFailed where SQLite's files, or what a killed server left of them, are there already. PostgreSQL's
    tables are looked for by `restore`."""
    url = make_url(database_url)
    files = [Path(f"{url.database}{end}") for end in ("", "-wal", "-journal")]
    if url.get_backend_name() == "sqlite" and (there := [file for file in files if file.exists()]):
        raise StartFailed(f"{there[0]} is there already: restore into an empty database")


def _place(source: Path, path: Path) -> None:
    """Copy a file, which is there whole or not at all: a server would begin with a part of a database."""
    with write_aside(path) as aside:
        shutil.copy2(source, aside)


def _copy_sqlite(path: Path, target: Path) -> set[str]:
    if not path.is_file():
        raise StartFailed(f"there is no database {path}")
    reading = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    copied = sqlite3.connect(target)
    try:
        reading.backup(copied)
        (found,) = copied.execute("PRAGMA integrity_check").fetchone()
        if found != "ok":
            raise StartFailed(f"the copy of {path} is damaged: {found}")
        return {str(row[0]) for query in REFERENCES for row in copied.execute(query)}
    except sqlite3.Error as error:
        raise StartFailed(f"the database {path} cannot be copied: {error}") from None
    finally:
        reading.close()
        copied.close()


@asynccontextmanager
async def _connection(url: URL) -> AsyncIterator[AsyncConnection]:
    """Connect to a database of PostgreSQL for a transaction. Raises StartFailed."""
    try:
        engine = create_async_engine(url, isolation_level="REPEATABLE READ")
        try:
            async with engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise start_failure(f"the database {url.render_as_string()}: {reason}", error) from None


async def _run(program: str, url: URL, *arguments: str) -> None:
    """Run a program of PostgreSQL. The password is not among its arguments, which other users can read."""
    found = shutil.which(program)
    if found is None:
        raise StartFailed(f"{program} is not installed; it is needed to copy a PostgreSQL database")
    query = {"sslmode" if name == "ssl" else name: value for name, value in url.query.items()}  # libpq's name of it
    address = url.set(drivername="postgresql", password=None, query=query).render_as_string()
    environment = os.environ | ({} if url.password is None else {"PGPASSWORD": str(url.password)})
    process = await asyncio.create_subprocess_exec(
        found, f"--dbname={address}", *arguments, stderr=asyncio.subprocess.PIPE, env=environment
    )
    _, output = await process.communicate()
    if process.returncode != 0:
        raise StartFailed(f"{program} failed: {_last_line(output.decode(errors='replace').splitlines())}")


def _last_line(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")
