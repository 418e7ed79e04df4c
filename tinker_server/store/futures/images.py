"""Images of bodies that may be needed, each stored once: an epoch sends the same images again.

They are written to the database in the transaction of the body that has them. So they are as safe as it, and none is
ever left over. Every function runs within a transaction of its caller.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import ColumnElement, Select, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from tinker_server.store.database import Database
from tinker_server.store.futures.records import Operation
from tinker_server.store.tables import Future, Image, ImagePlaceRow

KINDS = ("forward_backward",)
"""Operations whose images are stored like this: logs keep them. The others' bodies are deleted when they end."""
AT_ONCE = 500
"""Images in a statement: databases limit its parameters."""
_PLAIN = {"synchronize_session": False}


def rest_of(operation: Operation) -> bytes:
    """Return the body without its images."""
    body, parts, at = operation.body or b"", [], 0
    for place in operation.images:
        parts.append(body[at : place.start])
        at = place.start + place.size_bytes
    return b"".join([*parts, body[at:]]) if parts else body


async def whole(session: AsyncSession, request_id: str, rest: bytes) -> bytes:
    """Return the whole body of a request: `rest` with the images inserted."""
    places = select(ImagePlaceRow.start, Image.data).join(Image, Image.digest == ImagePlaceRow.digest)
    query = places.where(ImagePlaceRow.request_id == request_id).order_by(ImagePlaceRow.start)
    parts, taken, length = [], 0, 0
    for start, data in await session.execute(query):
        parts += [rest[taken : taken + start - length], data]
        taken += start - length
        length = start + len(data)
    return b"".join([*parts, rest[taken:]]) if parts else rest


def stored_bytes() -> ColumnElement[int]:
    """Return a column: the bytes of a future's body, with its images."""
    apart = select(func.sum(ImagePlaceRow.size_bytes)).where(ImagePlaceRow.request_id == Future.request_id)
    return func.length(Future.request) + func.coalesce(apart.scalar_subquery(), 0)


def held_bytes(owner: str) -> Select[tuple[int]]:
    """Return a query: the bytes of the images of an owner's bodies, each once."""
    once = select(func.max(ImagePlaceRow.size_bytes).label("size_bytes")).where(ImagePlaceRow.owner == owner)
    each = once.group_by(ImagePlaceRow.digest).subquery()
    return select(func.coalesce(func.sum(each.c.size_bytes), 0))


async def add(connection: AsyncConnection, db: Database, operations: Iterable[Operation]) -> None:
    """Store the positions of new operations' images, and those images that are not there yet."""
    found = [(operation, place) for operation in operations for place in operation.images]
    if not found:
        return
    data = {place.digest: (operation.body or b"", place) for operation, place in found}
    for digests in _batches(data):
        there = set(await connection.scalars(select(Image.digest).where(Image.digest.in_(digests))))
        for digest in set(digests) - there:
            body, place = data[digest]
            row = {"digest": digest, "data": body[place.start : place.start + place.size_bytes]}
            await connection.execute(db.insert(Image).values(row))
    rows = [
        {"request_id": operation.request_id, "owner": operation.owner, **place._asdict()} for operation, place in found
    ]
    await connection.execute(db.insert(ImagePlaceRow).on_conflict_do_nothing(), rows)


async def release(session: AsyncSession | AsyncConnection, request_ids: Select[object] | Collection[str]) -> None:
    """Delete the image positions of requests that are not needed any more, and the images that only they have."""
    mine = ImagePlaceRow.request_id.in_(request_ids)
    digests = set(await session.scalars(select(ImagePlaceRow.digest).where(mine).distinct()))
    if not digests:
        return
    await session.execute(delete(ImagePlaceRow).where(mine), execution_options=_PLAIN)
    in_use = select(ImagePlaceRow.digest).where(ImagePlaceRow.digest == Image.digest).exists()
    for batch in _batches(digests):
        await session.execute(delete(Image).where(Image.digest.in_(batch), ~in_use), execution_options=_PLAIN)


def _batches(digests: Iterable[str]) -> list[list[str]]:
    all_ = sorted(digests)
    return [all_[start : start + AT_ONCE] for start in range(0, len(all_), AT_ONCE)]
