"""What clients noted of the entries of a list: so much of it is read for a page, and the rest left out."""

from collections.abc import Collection, Container, Mapping
from typing import TypeVar

from sqlalchemy import ColumnElement, Select, Text, cast, func, inspect, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, defer
from sqlalchemy.orm.attributes import set_committed_value

from tinker_server.store.tables import CheckpointRow, SessionRow, Table, TrainingRunRow

R = TypeVar("R", TrainingRunRow, SessionRow, CheckpointRow)
LIST_BYTES = 1 << 20
"""Clients' notes on a page of a list."""
LEFT_OUT: Mapping[str, str] = {
    "tinker-server": "left out: the list has more than 1 MiB of notes here; ask for fewer entries, or for this one"
}
"""Metadata of an entry whose notes would exceed LIST_BYTES. The entry itself is listed: the SDK's command line takes a
short page for the last one."""
Notes = Mapping[InstrumentedAttribute[object], object]
NOTES: Mapping[type[Table], Notes] = {
    TrainingRunRow: {
        TrainingRunRow.user_metadata: LEFT_OUT,
        TrainingRunRow.name: None,
        TrainingRunRow.notes: None,
        TrainingRunRow.tags: None,
    },
    SessionRow: {SessionRow.user_metadata: {}, SessionRow.display_name: None, SessionRow.tags: []},
    CheckpointRow: {CheckpointRow.user_metadata: LEFT_OUT},
}
"""Columns that clients noted, with what an entry has instead of what is left out."""


def length(column: InstrumentedAttribute[object]) -> ColumnElement[int]:
    """Return the length of a text or JSON column, computed by the database."""
    return func.coalesce(func.length(cast(column, Text)), 0)


async def sizes(session: AsyncSession, query: Select[str, int]) -> dict[str, int]:
    """Return the size of the client's notes by an entry's id, in the order of the list."""
    return {name: size for name, size in await session.execute(query)}


def first(sized: Mapping[str, int]) -> list[str]:
    """Return the first entries that have LIST_BYTES together, or the first, so that a list can be paged through."""
    names: list[str] = []
    left = LIST_BYTES
    for name, size in sized.items():
        if names and size > left:
            break
        names.append(name)
        left -= size
    return names


def find_shown(sized: Mapping[str, int]) -> set[str]:
    """Return the entries whose notes are shown, by the sizes of their notes in the list's order: the first, then each
    that fits into the rest of LIST_BYTES."""
    whole: set[str] = set()
    left = LIST_BYTES
    for name, size in sized.items():
        if not whole or size <= left:
            whole.add(name)
            left -= size
    return whole


async def rows(session: AsyncSession, kind: type[R], names: Collection[str], whole: Container[str]) -> dict[str, R]:
    """Return rows by their key, in the order of `names`; the notes of those that are not `whole` are not read."""
    (key,) = inspect(kind).primary_key
    found: dict[str, R] = {}
    for is_whole, left_out in ((True, {}), (False, NOTES[kind])):
        wanted = [name for name in names if (name in whole) == is_whole]
        query = select(kind).where(key.in_(wanted)).options(*map(defer, left_out))
        for row in await session.scalars(query):
            for column, value in left_out.items():
                set_committed_value(row, column.key, value)
            found[getattr(row, key.name)] = row
    return {name: found[name] for name in names if name in found}
