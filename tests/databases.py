"""A fresh database per test: SQLite in a file, and PostgreSQL where TEST_DATABASE_URL names a server."""

import asyncio
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

KINDS = ["sqlite", "postgresql"]
VARIABLE = "TEST_DATABASE_URL"
"""URL of any database of the server, with a user who may create others: postgresql+asyncpg://user@host/postgres."""


@contextmanager
def fresh_database(kind: str, directory: Path) -> Iterator[str]:
    """The URL of an empty database of its own, dropped afterwards. Skips where there is no PostgreSQL."""
    if kind == "sqlite":
        yield f"sqlite+aiosqlite:///{directory / 'test.db'}"
        return
    if not (given := os.environ.get(VARIABLE)):
        pytest.skip(f"PostgreSQL is not tested: {VARIABLE} is not set (.ci/postgres.sh starts one)")
    server, name = make_url(given), f"test_{uuid.uuid4().hex}"
    asyncio.run(_execute(server, f"CREATE DATABASE {name}"))
    try:
        yield server.set(database=name).render_as_string(hide_password=False)
    finally:
        asyncio.run(_execute(server, f"DROP DATABASE {name}"))  # fails where a test has left a connection open


async def _execute(server: URL, statement: str) -> None:
    engine = create_async_engine(server, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(statement))
    await engine.dispose()
