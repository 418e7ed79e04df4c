"""The replay log of a model: the operations since its snapshot, in order. On the snapshot, they give the model again.

The entries are rows of ended operations with a position, which keep their bodies. Positions rise from result to
result, over all models. The transaction that records a snapshot also truncates the log: it removes the entries that
the snapshot holds.
"""

from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.store.futures import images
from tinker_server.store.tables import Future

AT_ONCE = 100
"""Entries on a page."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An ended operation, without its body."""

    position: int
    request_id: str
    operation_kind: str
    seq_id: int
    content_type: str
    loaded_directory: str | None
    """Directory of the checkpoint that a load_weights read."""
    failure_category: str | None
    """`user` or `server` if it failed."""


async def entries(session: AsyncSession, model_id: str, after: int) -> list[Entry]:
    """Return a page of a model's entries, in order, after a position."""
    columns = (
        Future.position,
        Future.request_id,
        Future.kind,
        Future.seq_id,
        Future.request_type,
        Future.loaded_directory,
        Future.failure_category,
    )
    query = select(*columns).where(Future.lane == model_id, Future.position > after)
    rows = await session.execute(query.order_by(Future.position).limit(AT_ONCE))
    return [Entry(*row) for row in rows]  # type: ignore[arg-type]  # the position is there


async def truncate(session: AsyncSession, model_id: str, position: int | None) -> None:
    """Within a transaction, remove the entries up to a position, or all if it is None."""
    mine = (Future.lane == model_id) & Future.position.is_not(None)
    if position is not None:
        mine &= Future.position <= position
    await images.release(session, select(Future.request_id).where(mine))
    change = update(Future).where(mine).values(position=None, request=b"")
    await session.execute(change, execution_options={"synchronize_session": False})


async def clear_tries(session: AsyncSession, model_id: str) -> None:
    """Within a transaction, clear the tries of a model's waiting operations: this server got further with the model
    than those before, so none of them is a suspect."""
    waiting = (Future.lane == model_id) & (Future.status == "queued") & (Future.tries > 0)
    change = update(Future).where(waiting).values(tries=0)
    await session.execute(change, execution_options={"synchronize_session": False})


async def last_position(session: AsyncSession) -> int:
    """Return the largest position that was given; 0 if there is none."""
    return await session.scalar(select(func.max(Future.position))) or 0
