"""Sessions: one per client. They are looked up at every request, so the latest are cached in memory.

Another owner's session is treated as unknown.
"""

import time
import uuid
from dataclasses import replace

from sqlalchemy import ColumnElement, Select, select, update

from tinker_server.api_schemas.listing import as_texts
from tinker_server.api_schemas.sessions import CreateSessionRequest, FinishSessionRequest
from tinker_server.backends.lru import LRU
from tinker_server.errors import HeartbeatEnded, SessionFinished, UnknownSession
from tinker_server.store.database import Database
from tinker_server.store.records import Session, held_bytes, record
from tinker_server.store.tables import SessionRow

CACHED_BYTES = 64 << 20
"""Bytes of cached records."""


class SessionStore:
    """Reads and writes the sessions table."""

    def __init__(self, db: Database, cached_bytes: int = CACHED_BYTES) -> None:
        self._db = db
        self._cached: LRU[str, Session] = LRU(cached_bytes, held_bytes)
        self._heartbeats: dict[str, float] = {}

    async def create(self, request: CreateSessionRequest, idempotency_key: str | None, owner: str) -> str:
        """Create a session and return its id; a repeated request gets the id of the first."""
        now = time.time()
        async with self._db.write() as session:
            if idempotency_key is not None:
                idempotency_key = f"{owner}/{idempotency_key}"
                if (first := await session.scalar(_find_id(idempotency_key))) is not None:
                    return first
            row = SessionRow(
                session_id=str(uuid.uuid4()),
                owner=owner,
                idempotency_key=idempotency_key,
                tags=request.tags,
                user_metadata=as_texts(request.user_metadata),  # texts as they are shown, so that a search finds them
                project_id=request.project_id,
                display_name=request.display_name,
                sdk_version=request.sdk_version,
                created_at=now,
                last_heartbeat=now,
            )
            session.add(row)
        self._cached.put(row.session_id, record(Session, row))
        return row.session_id

    async def find_made(self, idempotency_key: str, owner: str) -> str | None:
        """Return the id of the session that `create` made for this key; None if there is none."""
        return await self._db.look(lambda session: session.scalar(_find_id(f"{owner}/{idempotency_key}")))

    async def heartbeat(self, session_id: str, owner: str) -> None:
        """Note that the client is alive. Raises UnknownSession, HeartbeatEnded."""
        if (await self.require(session_id, owner)).finished_at is not None:
            raise HeartbeatEnded(f"session {session_id} was finished")
        self._heartbeats[session_id] = time.time()

    async def finish(self, session_id: str, request: FinishSessionRequest, owner: str) -> None:
        """End a session; the first reason stays. Raises UnknownSession."""
        if (await self.require(session_id, owner)).finished_at is not None:
            return
        reason = {"finish_reason": request.reason.type, "finish_detail": request.detail}
        await self._change(session_id, SessionRow.finished_at.is_(None), finished_at=time.time(), **reason)

    async def require(self, session_id: str, owner: str, *, must_be_open: bool = False) -> Session:
        """Return a session of the owner. Raises UnknownSession, and with `must_be_open` SessionFinished for a session
        that takes no new work."""
        session = self._cached.get(session_id) or await self.get(session_id)
        if session.owner != owner:
            raise _unknown(session_id)
        if must_be_open and session.finished_at is not None:
            why = f" ({session.finish_detail})" if session.finish_detail else ""
            raise SessionFinished(f"session {session_id} was finished{why} and takes no new work")
        return session

    async def assign_project(self, session_id: str, project_id: str, owner: str) -> None:
        """Move a session, and with it its runs, to a project. Raises UnknownSession."""
        await self.require(session_id, owner)
        await self._change(session_id, project_id=project_id)

    async def last_heartbeat(self, session_id: str) -> float:
        """Return the time of the last heartbeat, written or not. Raises UnknownSession."""
        return self._heartbeats.get(session_id) or (await self.get(session_id)).last_heartbeat

    async def save_heartbeats(self) -> None:
        """Write the heartbeats that came since the last call."""
        heartbeats, self._heartbeats = self._heartbeats, {}
        if not heartbeats:
            return
        try:
            async with self._db.write() as session:
                for session_id, at in heartbeats.items():
                    query = update(SessionRow).where(SessionRow.session_id == session_id).values(last_heartbeat=at)
                    await session.execute(query)
        except BaseException:
            self._heartbeats = heartbeats | self._heartbeats
            raise
        for session_id, at in heartbeats.items():
            if (cached := self._cached.get(session_id)) is not None:
                self._cached.put(session_id, replace(cached, last_heartbeat=at))

    def forget_ended(self, for_s: float = 60.0) -> None:
        """Remove sessions from memory that were finished so long ago: nobody reads their older records any more."""
        before = time.time() - for_s
        self._cached.keep(lambda session: session.finished_at is None or session.finished_at > before)

    async def get(self, session_id: str) -> Session:
        """Return a session, whoever owns it. Raises UnknownSession."""
        if (cached := self._cached.get(session_id)) is not None:
            return cached
        async with self._db.read() as session:
            row = await session.get(SessionRow, session_id)
        if row is None:
            raise _unknown(session_id)
        return self._cached.setdefault(session_id, record(Session, row))

    async def _change(self, session_id: str, *conditions: ColumnElement[bool], **values: object) -> None:
        """Change the row, then the cache: the cache must not be ahead of the database."""
        change = update(SessionRow).where(SessionRow.session_id == session_id, *conditions).values(**values)
        async with self._db.write() as session:
            await session.execute(change, execution_options={"synchronize_session": False})
            changed = record(Session, await session.get_one(SessionRow, session_id, populate_existing=True))
        self._cached.put(session_id, changed)


def _find_id(key_of_owner: str) -> Select[str]:
    return select(SessionRow.session_id).where(SessionRow.idempotency_key == key_of_owner)


def _unknown(session_id: str) -> UnknownSession:
    return UnknownSession(f"no session has the id {session_id!r}")
