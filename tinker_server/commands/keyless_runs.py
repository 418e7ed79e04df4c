"""Runs that a server made before it had API keys. They belong to the owner LOCAL, and a key of this name opens them."""

from sqlalchemy import text
from sqlalchemy.engine import URL

from tinker_server.auth import keys
from tinker_server.settings import Settings
from tinker_server.store.reading import UNREADABLE, open_for_reading


async def advise(settings: Settings) -> str:
    """Return the line that an operator must read if there are runs that no key opens; else an empty text."""
    path = settings.resolve_keys_file()
    if any(key.name == keys.LOCAL for key in keys.read(path).values()):
        return ""
    try:
        count = await _count_runs(settings.resolve_database_url())
    except UNREADABLE as error:
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
    async with open_for_reading(database_url) as session:
        if session is None:
            return 0
        query = text("SELECT count(*) FROM training_runs WHERE owner = :owner")
        return int(await session.scalar(query, {"owner": keys.LOCAL}) or 0)
