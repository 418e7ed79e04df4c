"""Runs that a server made before it had API keys. They belong to the owner LOCAL, and a key of this name opens them."""

from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from tinker_server.auth import keys
from tinker_server.settings import Settings

CONNECT_S = 5.0
"""Seconds to wait for the database: the key has been made, and only this advice waits."""


async def advise(settings: Settings) -> str:
    """Return the line that an operator must read if there are runs that no key opens; else an empty text."""
    path = settings.resolve_keys_file()
    if any(key.name == keys.LOCAL for key in keys.read(path).values()):
        return ""
    try:
        count = await _count_runs(settings.resolve_database_url())
    except (SQLAlchemyError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"runs that were made without a key could not be counted: the database cannot be read: {reason}\n"
    if count == 0:
        return ""
    runs, belong = ("1 run", "belongs") if count == 1 else (f"{count} runs", "belong")
    return (
        f"{runs} made without a key {belong} to the owner {keys.LOCAL}: `{keys.adding(path, keys.LOCAL)}` makes a key"
        " that opens them\n"
    )


async def _count_runs(database_url: str | URL) -> int:
    url = _for_reading(make_url(database_url))
    if url is None:
        return 0
    engine = create_async_engine(url, connect_args={"timeout": CONNECT_S})
    try:
        async with engine.connect() as connection:
            query = text("SELECT count(*) FROM training_runs WHERE owner = :owner")
            return int(await connection.scalar(query, {"owner": keys.LOCAL}) or 0)
    finally:
        await engine.dispose()


def _for_reading(url: URL) -> URL | None:
    """Return the URL under which a database is read and nothing is created; None if there is no database yet."""
    if url.get_backend_name() != "sqlite":
        return url
    file = Path(str(url.database)).absolute()
    return url.set(database=file.as_uri(), query={"mode": "ro", "uri": "true"}) if file.is_file() else None
