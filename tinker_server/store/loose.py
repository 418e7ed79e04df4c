"""Directories that no other row owns: weights are being written there, or were given up.

A directory is noted here before it is made, and leaves with the row that takes it, in one transaction; it comes back
when that row lets go of it. So whatever a crash interrupts, the next server knows what to delete.
"""

import time
from collections.abc import Iterable

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.store.tables import LooseDirectory

AT_ONCE = 500
"""In one statement: databases limit its parameters."""


async def own(session: AsyncSession, directory: str | None) -> None:
    """Within a transaction: a row owns the directory from now on."""
    await session.execute(delete(LooseDirectory).where(LooseDirectory.directory == directory))


async def let_go(session: AsyncSession, directories: Iterable[str]) -> None:
    """Within a transaction: no row owns the directories any more. Those that are noted already stay so."""
    for batch in _batches(directories):
        noted = select(LooseDirectory.directory).where(LooseDirectory.directory.in_(batch))
        new = set(batch) - set(await session.scalars(noted))
        if new:
            rows = [{"directory": directory, "since": time.time()} for directory in new]
            await session.execute(insert(LooseDirectory), rows)


async def forget(session: AsyncSession, directories: Iterable[str]) -> None:
    """Within a transaction: the directories are deleted from the disk."""
    for batch in _batches(directories):
        await session.execute(delete(LooseDirectory).where(LooseDirectory.directory.in_(batch)))


async def noted(session: AsyncSession, folder: str = "", before: float | None = None) -> list[str]:
    """Those in a folder, or all; those that are loose since before a time, or all."""
    query = select(LooseDirectory.directory).where(LooseDirectory.directory.startswith(folder, autoescape=True))
    if before is not None:
        query = query.where(LooseDirectory.since <= before)
    return list(await session.scalars(query))


def _batches(directories: Iterable[str]) -> list[list[str]]:
    all_ = sorted(set(directories))
    return [all_[start : start + AT_ONCE] for start in range(0, len(all_), AT_ONCE)]
