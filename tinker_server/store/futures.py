"""The futures: accepted operations and their results.

Every write goes through one task that commits whatever arrived meanwhile in a single transaction, so
that hundreds of operations at once cost a few commits. Waiters are woken by events; nothing polls.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sqlalchemy import CursorResult, Table, bindparam, delete, func, select, update

from backends.lru import LRU
from tinker_server.errors import BadRequest, ResultExpired, SequenceConflict, UnknownFuture
from tinker_server.store.completions import CLIENT_SPAN, Completion, Completions, Target
from tinker_server.store.database import Database
from tinker_server.store.results import Result
from tinker_server.store.tables import Future

log = logging.getLogger(__name__)
FUTURES = cast(Table, Future.__table__)
IDS_AT_ONCE = 500
"""In one statement: databases limit its parameters."""
TOMBSTONES_KEPT_S = 7 * 24 * 3600
RETRY_S = 1.0
"""Pause after the database refused to store results, before they are offered again."""


@dataclass(frozen=True, slots=True)
class Work:
    """One accepted operation, as it is stored."""

    kind: str
    """Name of the operation, such as `optim_step`."""
    lane: str
    seq_id: int
    body: bytes
    content_type: str
    owner: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation that is accepted and has no result yet."""

    kind: str
    lane: str
    seq_id: int
    owner: str
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, work: Work) -> "Unfinished":
        return cls(work.kind, work.lane, work.seq_id, work.owner)


class FutureStore:
    """The only way to the futures table."""

    def __init__(self, db: Database, recent_bytes: int) -> None:
        self._db = db
        self._recent: LRU[str, Result] = LRU(recent_bytes, lambda result: len(result.body))
        self._unfinished: dict[str, Unfinished] = {}
        self._completions = Completions(self._load_completions)
        self._last_finished_us = 0
        self._retrieved: dict[str, str] = {}
        """Lanes by request_id: results to delete, for their client has them."""
        self._announced: set[str] = set()
        self._accepted: list[tuple[Work, asyncio.Future[str]]] = []
        self._results: dict[str, Result] = {}
        self._being_written: dict[str, Result] = {}
        self._wake = asyncio.Event()
        self._all_written = asyncio.Event()
        self._stopping = False
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> list[Work]:
        """Start writing; the operations that an earlier server left unfinished."""
        query = select(Future).where(Future.status == "queued").order_by(Future.created_at)
        async with self._db.read() as session:
            left = [
                Work(row.kind, row.lane, row.seq_id, row.request, row.request_type, row.owner, row.request_id)
                for row in await session.scalars(query)
            ]
        self._unfinished.update((work.request_id, Unfinished.of(work)) for work in left)
        self._all_written.set()
        self._writer = asyncio.create_task(self._write(), name="futures writer")
        return left

    async def stop(self) -> None:
        """Write what is pending, then end."""
        self._stopping = True
        self._wake.set()
        if self._writer is not None:
            await self._writer

    async def enqueue(self, work: Work) -> str:
        """Store an operation, durably when this returns, and give its request_id.

        The same lane and seq_id again gives the first request_id. Raises SequenceConflict where the first
        one was another kind of operation.
        """
        if not 0 <= work.seq_id < 2**63:
            raise BadRequest(f"seq_id {work.seq_id} is not between 0 and 2^63 - 1")
        accepted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._unfinished[work.request_id] = Unfinished.of(work)
        self._accepted.append((work, accepted))
        self._wake.set()
        first = ""
        try:
            first = await accepted
        finally:
            if first != work.request_id:
                del self._unfinished[work.request_id]
        return first

    def complete(self, request_id: str, result: Result) -> None:
        """Wake those who wait for the result, and store it with the next transaction.

        The waiter need not wait for the database: a result that a crash keeps from it is one that the
        crash could as well have kept from being computed. The first result of an operation stays.
        """
        if (work := self._unfinished.pop(request_id, None)) is None:
            return
        self._last_finished_us = max(round(result.finished_at * 1e6), self._last_finished_us + 1)
        result = replace(
            result,
            finished_at=self._last_finished_us / 1e6,
            kind=work.kind,
            lane=work.lane,
            seq_id=work.seq_id,
            owner=work.owner,
        )
        self._results[request_id] = result
        self._all_written.clear()
        self._wake.set()
        work.finished.set()
        self._completions.note(result.completion[0], _completion(request_id, result))

    async def wait(self, request_id: str, owner: str, hold_s: float) -> Result | None:
        """The result; None where it is not there within `hold_s`. Raises UnknownFuture, ResultExpired."""
        if (work := self._unfinished.get(request_id)) is not None:
            if work.owner != owner:
                raise _unknown(request_id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_s):
                    await work.finished.wait()
            if request_id in self._unfinished:
                return None
        result = self._unwritten(request_id) or self._recent.get(request_id) or await self._load(request_id, owner)
        if result is not None and result.owner != owner:
            raise _unknown(request_id)
        return result

    def _unwritten(self, request_id: str) -> Result | None:
        return self._results.get(request_id) or self._being_written.get(request_id)

    async def completed(self, target: Target, cursor: int, hold_s: float) -> list[Completion]:
        """Samples of one client that finished after `cursor`; held until there is one, at most `hold_s`."""
        return await self._completions.after(target, cursor, hold_s)

    def first_time_large(self, request_id: str) -> bool:
        """Whether this is the first call for this result: its size may be told once instead of it."""
        is_first = request_id not in self._announced
        self._announced.add(request_id)
        return is_first

    async def require_finished_sample(self, request_id: str, owner: str) -> None:
        """Raises UnknownFuture, or BadRequest for an operation that cannot be cancelled."""
        if (work := self._unfinished.get(request_id)) is not None and work.owner == owner:
            raise BadRequest(f"{request_id} is {work.kind}; only samples can be cancelled")
        if (result := self._unwritten(request_id)) is not None and result.owner == owner:
            return
        async with self._db.read() as session:
            row = await session.get(Future, request_id)
        if row is None or row.owner != owner:
            raise _unknown(request_id)

    def acknowledge(self, lane: str, request_ids: list[str]) -> None:
        """The client has these results of its lane: they may go. Those that are not finished stay."""
        self._retrieved.update((request_id, lane) for request_id in request_ids)
        if request_ids:
            self._wake.set()

    def release(self) -> None:
        """Let all waiters go empty-handed, for the server stops."""
        for work in self._unfinished.values():
            work.finished.set()
        self._completions.release()

    async def expire(self, before: float) -> None:
        """Delete results that are older; a tombstone stays of each for a while, so that polls are told why."""
        await self._all_written.wait()
        self._recent.keep(lambda result: result.finished_at >= before)
        self._completions.drop_idle()
        self._announced.clear()
        async with self._db.write() as session:
            await session.execute(
                update(Future)
                .where(Future.status.in_(("done", "failed")), Future.finished_at < before)
                .values(status="expired", result=None)
            )
            forgotten = (Future.status == "expired") & (Future.finished_at < before - TOMBSTONES_KEPT_S)
            await session.execute(delete(Future).where(forgotten))
        await self._db.shrink()

    async def _load(self, request_id: str, owner: str) -> Result | None:
        async with self._db.read() as session:
            row = await session.get(Future, request_id)
        if row is None or row.owner != owner:
            raise _unknown(request_id)
        if row.status == "expired":
            raise ResultExpired(f"the result of {request_id} was fetched, or kept for its time, and is gone")
        if row.result is None or row.result_type is None or row.finished_at is None:
            return None
        failed = row.status == "failed"
        result = Result(row.result, row.result_type, failed, row.finished_at, row.kind, row.lane, row.seq_id, owner)
        self._recent.put(request_id, result)
        return result

    async def _load_completions(self, target: Target) -> list[Completion]:
        unwritten = [
            _completion(request_id, result)
            for request_id, result in [*self._being_written.items(), *self._results.items()]
            if result.completion[0] == target
        ]
        columns = (Future.request_id, Future.status, func.length(Future.result), Future.finished_at)
        query = select(*columns).where(
            Future.lane == target.lane,
            Future.seq_id >= target.client * CLIENT_SPAN,
            Future.seq_id < (target.client + 1) * CLIENT_SPAN,
            Future.status.in_(("done", "failed")),
        )
        async with self._db.read() as session:
            rows = (await session.execute(query)).all()
        written = [
            Completion(round(finished_at * 1e6), request_id, status == "failed", size_bytes)
            for request_id, status, size_bytes, finished_at in rows
            if finished_at is not None
        ]
        return written + unwritten

    async def _write(self) -> None:
        while not self._stopping or self._accepted or self._results or self._retrieved:
            await self._wake.wait()
            self._wake.clear()
            accepted, self._accepted = self._accepted, []
            self._being_written = results = self._results
            self._results = {}
            retrieved, self._retrieved = self._retrieved, {}
            if not accepted and not results and not retrieved:
                continue
            try:
                first_ids = await self._commit([work for work, _ in accepted], results, retrieved)
            except Exception as error:  # one bad moment of the database must not end the server
                log.exception("the database did not take %d operations, %d results", len(accepted), len(results))
                _answer(accepted, [error] * len(accepted))
                if not self._stopping:
                    self._results = results | self._results
                    self._retrieved = retrieved | self._retrieved
                    self._wake.set()
                    await asyncio.sleep(RETRY_S)
                continue
            _answer(accepted, first_ids)
            for request_id, result in results.items():
                if request_id not in retrieved:
                    self._recent.put(request_id, result)
            for request_id, lane in retrieved.items():
                if (recent := self._recent.get(request_id)) is not None and recent.lane == lane:
                    self._recent.pop(request_id)
            self._being_written = {}
            if not self._results:
                self._all_written.set()

    async def _commit(
        self, works: list[Work], results: dict[str, Result], retrieved: dict[str, str]
    ) -> list[str | Exception]:
        async with self._db.write() as session:
            connection = await session.connection()
            if results:
                await connection.execute(
                    update(FUTURES).where(FUTURES.c.request_id == bindparam("id")),
                    [_finished_columns(request_id, result) for request_id, result in results.items()],
                )
            for lane in set(retrieved.values()):
                # One lane's client cannot delete another's results.
                ids = [request_id for request_id, of_lane in retrieved.items() if of_lane == lane]
                for start in range(0, len(ids), IDS_AT_ONCE):
                    mine = (FUTURES.c.lane == lane) & FUTURES.c.request_id.in_(ids[start : start + IDS_AT_ONCE])
                    finished = FUTURES.c.status.in_(("done", "failed"))
                    done = update(FUTURES).where(mine & finished).values(status="expired", result=None)
                    await connection.execute(done)
            if not works:
                return []
            insert = self._db.insert(FUTURES).on_conflict_do_nothing(index_elements=["lane", "seq_id"])
            outcome: CursorResult[Any] = await connection.execute(insert, [_new_columns(work) for work in works])
            if outcome.rowcount == len(works):
                return [work.request_id for work in works]
            first_ids: list[str | Exception] = []
            for work in works:
                query = select(FUTURES.c.request_id, FUTURES.c.kind).where(
                    FUTURES.c.lane == work.lane, FUTURES.c.seq_id == work.seq_id
                )
                request_id, kind = (await connection.execute(query)).one()
                conflict = f"seq_id {work.seq_id} of {work.lane} was {kind} before, and is {work.kind} now"
                first_ids.append(request_id if kind == work.kind else SequenceConflict(conflict))
            return first_ids


def _unknown(request_id: str) -> UnknownFuture:
    return UnknownFuture(f"no operation has the request_id {request_id!r}")


def _answer(accepted: list[tuple[Work, asyncio.Future[str]]], outcomes: list[Any]) -> None:
    for (_, answer), outcome in zip(accepted, outcomes, strict=True):
        if answer.done():
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


def _completion(request_id: str, result: Result) -> Completion:
    return Completion(result.completion[1], request_id, result.failed, len(result.body))


def _new_columns(work: Work) -> dict[str, Any]:
    return {
        "request_id": work.request_id,
        "kind": work.kind,
        "lane": work.lane,
        "seq_id": work.seq_id,
        "request": work.body,
        "request_type": work.content_type,
        "owner": work.owner,
        "status": "queued",
        "created_at": time.time(),
    }


def _finished_columns(request_id: str, result: Result) -> dict[str, Any]:
    return {
        "id": request_id,
        "request": b"",
        "status": "failed" if result.failed else "done",
        "result": result.body,
        "result_type": result.content_type,
        "finished_at": result.finished_at,
    }
