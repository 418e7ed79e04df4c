"""All SQL on the futures table, apart from the log's and the lists'."""

from typing import NamedTuple, cast

from sqlalchemy import Table, bindparam, delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from tinker_server.errors import SequenceConflict
from tinker_server.store import steps
from tinker_server.store.database import Database
from tinker_server.store.futures import images, replay_log
from tinker_server.store.futures.notifications import CLIENT_SPAN, Completion, Target
from tinker_server.store.futures.records import Operation, PastOperation, Result
from tinker_server.store.tables import Future

FUTURES = cast(Table, Future.__table__)
FINISHED = ("done", "failed")
PAST_AT_ONCE = 1000
"""Operations on a page."""


class First(NamedTuple):
    """The first operation that was accepted under a number."""

    request_id: str
    is_queued: bool


class Outcome(NamedTuple):
    """What is stored of an operation beside its body; see `tables.Future`."""

    status: str
    result: bytes | None
    result_type: str | None
    failure_category: str | None
    finished_at: float | None
    kind: str
    lane: str
    seq_id: int


class FutureRows:
    """Reads and writes futures. Every method that writes is a transaction."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def read_queue(self) -> list[Operation]:
        """Return the operations without a result, in order of arrival, without their bodies."""
        size = images.stored_bytes().label("size_bytes")
        columns = (
            Future.kind,
            Future.lane,
            Future.seq_id,
            Future.request_type,
            Future.owner,
            Future.digest,
            size,
            Future.request_id,
            Future.created_at,
            Future.tries,
        )
        query = select(*columns).where(Future.status == "queued").order_by(Future.created_at)
        async with self._db.read() as session:
            return [
                Operation(
                    row.kind,
                    row.lane,
                    row.seq_id,
                    None,
                    row.request_type,
                    row.owner,
                    row.digest or "",
                    row.size_bytes,
                    request_id=row.request_id,
                    accepted_at=row.created_at,
                    tries=row.tries,
                )
                for row in await session.execute(query)
            ]

    async def note_try(self, request_id: str, number: int) -> None:
        """Record, durably on return, that an unfinished operation is about to be begun for the `number`th time."""
        change = update(Future).where(Future.request_id == request_id).values(tries=number)
        await self._db.change(lambda session: session.execute(change))

    async def clear_tries(self) -> None:
        """Clear the tries of all unfinished operations: the server stops on request, so none of them is a culprit."""
        change = update(Future).where(Future.status == "queued", Future.tries > 0).values(tries=0)
        await self._db.change(lambda session: session.execute(change))

    async def body(self, request_id: str) -> bytes:
        """Return the body as it was received; empty once it is neither unfinished nor in a log."""
        query = select(Future.request).where(Future.request_id == request_id)

        async def whole(session: AsyncSession) -> bytes:
            return await images.whole(session, request_id, await session.scalar(query) or b"")

        return await self._db.look(whole)

    async def past(self, lane: str, before: int | None) -> list[PastOperation]:
        """Return a page of a lane's ended operations, the largest number first, below `before` if given."""
        columns = (Future.seq_id, Future.kind, Future.status, Future.failure_category)
        query = select(*columns).where(Future.lane == lane, Future.status != "queued")
        if before is not None:
            query = query.where(Future.seq_id < before)
        async with self._db.read() as session:
            rows = await session.execute(query.order_by(Future.seq_id.desc()).limit(PAST_AT_ONCE))
            return [
                PastOperation(seq_id, kind, status == "failed" or category is not None, category)
                for seq_id, kind, status, category in rows
            ]

    async def identity(self, request_id: str) -> tuple[str | None, str | None]:
        """Return the kind and the owner of an operation; None for an unknown operation."""
        query = select(Future.kind, Future.owner).where(Future.request_id == request_id)
        async with self._db.read() as session:
            row = (await session.execute(query)).one_or_none()
        return (None, None) if row is None else (row.kind, row.owner)

    async def outcome(self, request_id: str, owner: str) -> Outcome | None:
        """Return how an owner's operation ended, without its body, which may be a thousand times as large."""
        columns = (
            Future.status,
            Future.result,
            Future.result_type,
            Future.failure_category,
            Future.finished_at,
            Future.kind,
            Future.lane,
            Future.seq_id,
        )
        query = select(*columns).where(Future.request_id == request_id, Future.owner == owner)
        async with self._db.read() as session:
            row = (await session.execute(query)).one_or_none()
        return None if row is None else Outcome(*row)

    async def result_bytes(self, request_id: str, owner: str) -> int:
        """Return the size of an owner's result; 0 where there is none."""
        query = select(func.length(Future.result)).where(Future.request_id == request_id, Future.owner == owner)
        async with self._db.read() as session:
            return int(await session.scalar(query) or 0)

    async def held_bytes(self, owner: str) -> int:
        """Return the bytes of an owner's bodies, with their images, and results."""
        held = select(func.sum(Future.held_bytes)).where(Future.owner == owner, text("held_bytes > 0"))
        async with self._db.read() as session:
            return int(await session.scalar(held) or 0) + int(await session.scalar(images.held_bytes(owner)) or 0)

    async def knows(self, lane: str, seq_id: int) -> bool:
        """Return whether an operation was accepted under this number."""
        async with self._db.read() as session:
            query = select(Future.request_id).where(Future.lane == lane, Future.seq_id == seq_id)
            return await session.scalar(query) is not None

    async def insert(self, operations: list[Operation], now: float) -> list[First | SequenceConflict]:
        """Add what is new; return for each operation the first under its number, or the conflict with it."""
        async with self._db.write_rows() as connection:
            insert = self._db.insert(FUTURES).on_conflict_do_nothing(index_elements=["lane", "seq_id"])
            rows = [_new_columns(operation, now) for operation in operations]
            outcome = await connection.execute(insert, rows)
            added = {operation.request_id for operation in operations}
            if outcome.rowcount != len(operations):  # a repeat is there already, or PostgreSQL's driver did not count
                there = select(FUTURES.c.request_id).where(FUTURES.c.request_id.in_(added))
                added = set(await connection.scalars(there))
            firsts = [
                First(operation.request_id, is_queued=True)
                if operation.request_id in added
                else await _first(connection, operation)
                for operation in operations
            ]
            stored = {first.request_id for first in firsts if isinstance(first, First)}
            await images.add(
                connection, self._db, [operation for operation in operations if operation.request_id in stored]
            )
            return firsts

    async def finish(self, results: list[tuple[str, Result]]) -> None:
        """Store results by request_id, unless there is a result already."""
        change = update(FUTURES).where(FUTURES.c.request_id == bindparam("id"), FUTURES.c.status == "queued")
        kept = [_make_result_columns(*result) for result in results if _may_run_again(result[1])]
        done = [_make_result_columns(*result) | {"request": b""} for result in results if not _may_run_again(result[1])]
        async with self._db.write_rows() as connection:
            for rows in filter(None, (kept, done)):
                await connection.execute(change, rows)
            ended = [
                id_
                for id_, operation in results
                if operation.operation_kind in images.KINDS and not _may_run_again(operation)
            ]
            if ended:
                await images.release(connection, ended)
            await steps.insert(connection, self._db, [result.step for _, result in results if result.step is not None])

    async def delete_results(self, of_lanes: list[tuple[str, list[str]]]) -> None:
        """Delete the finished operations among these of each lane; a lane's client cannot delete another's
        results."""
        async with self._db.write_rows() as connection:
            for lane, request_ids in of_lanes:
                mine = (FUTURES.c.lane == lane) & FUTURES.c.request_id.in_(request_ids)
                done = update(FUTURES).where(mine & FUTURES.c.status.in_(FINISHED))
                await connection.execute(done.values(status="expired", result=None))

    async def completions(self, target: Target) -> list[Completion]:
        """Return the finished samples of a client of a sampling session."""
        columns = (Future.request_id, Future.status, func.length(Future.result), Future.finished_at)
        query = select(*columns).where(
            Future.lane == target.lane,
            Future.seq_id >= target.client * CLIENT_SPAN,
            Future.seq_id < (target.client + 1) * CLIENT_SPAN,
            Future.status.in_(FINISHED),
        )
        async with self._db.read() as session:
            rows = (await session.execute(query)).all()
        return [
            Completion(round(finished_at * 1e6), request_id, status == "failed", size_bytes)
            for request_id, status, size_bytes, finished_at in rows
            if finished_at is not None
        ]

    async def last_position(self) -> int:
        """Return the largest position in a log that was given; 0 if there is none."""
        return await self._db.look(replay_log.last_position)

    async def read_log(self, model_id: str, after: int) -> list[replay_log.Entry]:
        """Return a page of a model's log, in order, after a position."""
        return await self._db.look(lambda session: replay_log.entries(session, model_id, after))

    async def last_finished_at(self) -> float:
        """Return the time at which the newest result was finished, also of those that are stored no longer; 0 if there
        is none."""
        query = select(func.max(Future.finished_at)).where(Future.status.in_((*FINISHED, "expired")))
        async with self._db.read() as session:
            return await session.scalar(query) or 0.0

    async def expire(self, before: float, tombstones_before: float) -> None:
        """Delete the results that finished before, and the tombstones that are older than `tombstones_before`."""
        async with self._db.write() as session:
            await session.execute(
                update(Future)
                .where(Future.status.in_(FINISHED), Future.finished_at < before)
                .values(status="expired", result=None)
            )
            old = (Future.status == "expired") & (Future.finished_at < tombstones_before)
            await session.execute(delete(Future).where(old, Future.position.is_(None)))
        await self._db.shrink()


async def _first(connection: AsyncConnection, operation: Operation) -> First | SequenceConflict:
    columns = (FUTURES.c.request_id, FUTURES.c.kind, FUTURES.c.digest, FUTURES.c.status)
    query = select(*columns).where(FUTURES.c.lane == operation.lane, FUTURES.c.seq_id == operation.seq_id)
    request_id, kind, digest, status = (await connection.execute(query)).one()
    place = f"seq_id {operation.seq_id} of {operation.lane}"
    if kind != operation.operation_kind:
        return SequenceConflict(f"{place} was {kind} before, and is {operation.operation_kind} now")
    if digest not in (None, operation.digest):
        return SequenceConflict(f"{place} was {kind} with another body before; a repeat must be equal")
    return First(request_id, status == "queued")


def _new_columns(operation: Operation, now: float) -> dict[str, object]:
    return {
        "request_id": operation.request_id,
        "kind": operation.operation_kind,
        "lane": operation.lane,
        "seq_id": operation.seq_id,
        "request": images.rest_of(operation),
        "digest": operation.digest,
        "request_type": operation.content_type,
        "owner": operation.owner,
        "status": "queued",
        "created_at": now,
    }


def _may_run_again(result: Result) -> bool:
    """Return whether the operation's body is needed in the log of its model."""
    return result.position is not None and result.failure_category is None


def _make_result_columns(request_id: str, result: Result) -> dict[str, object]:
    return {
        "id": request_id,
        "position": result.position,
        "loaded_directory": result.loaded_directory,
        "status": "failed" if result.failed else "done",
        "result": result.body,
        "result_type": result.content_type,
        "failure_category": result.failure_category,
        "finished_at": result.finished_at,
    }
