"""Reads a database that a server may have open, or that an older server left, and creates and changes nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

CONNECT_S = 5.0
"""Seconds to wait for a database: an operator waits for the answer of a command."""
UNREADABLE = (SQLAlchemyError, OSError, ImportError)
"""Errors of a URL, of a database, and of a driver that is not installed."""


@asynccontextmanager
async def open_for_reading(database_url: str | URL) -> AsyncIterator[AsyncSession | None]:
    """Open a database in a block; None if there is none yet. Raises an error of UNREADABLE."""
    url = _for_reading(make_url(database_url))
    if url is None:
        yield None
        return
    engine = create_async_engine(url, connect_args={"timeout": CONNECT_S})
    try:
        async with AsyncSession(engine) as session:
            yield session
    finally:
        await engine.dispose()


def _for_reading(url: URL) -> URL | None:
    if url.get_backend_name() != "sqlite":
        return url
    file = Path(str(url.database)).absolute()
    return url.set(database=file.as_uri(), query={"mode": "ro", "uri": "true"}) if file.is_file() else None
