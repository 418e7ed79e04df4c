"""Sessions and their sampling sessions. Both are asked for at every request, so rows are kept in memory.

What belongs to another owner is unknown to the one who asks.
"""

import time
import uuid

from sqlalchemy import and_, or_, select, update

from api_schemas.listing import as_texts
from api_schemas.sessions import CreateSessionRequest, FinishSessionRequest
from tinker_server.errors import (
    BadRequest,
    HeartbeatEnded,
    SessionFinished,
    UnknownSampler,
    UnknownSession,
)
from tinker_server.store.database import Database
from tinker_server.store.tables import SamplingSession, Session


class SessionStore:
    """The only way to the sessions table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[str, Session] = {}
        self._heartbeats: dict[str, float] = {}

    async def create(self, request: CreateSessionRequest, idempotency_key: str | None, owner: str) -> str:
        """A new session's id; of a repeated request, the first one's."""
        now = time.time()
        async with self._db.write() as session:
            if idempotency_key is not None:
                idempotency_key = f"{owner}/{idempotency_key}"
                query = select(Session).where(Session.idempotency_key == idempotency_key)
                if (first := (await session.scalars(query)).one_or_none()) is not None:
                    return first.session_id
            row = Session(
                session_id=str(uuid.uuid4()),
                owner=owner,
                idempotency_key=idempotency_key,
                tags=request.tags,
                user_metadata=as_texts(request.user_metadata),  # what is shown can be searched for
                project_id=request.project_id,
                display_name=request.display_name,
                sdk_version=request.sdk_version,
                created_at=now,
                last_heartbeat=now,
            )
            session.add(row)
        self._known[row.session_id] = row
        return row.session_id

    async def heartbeat(self, session_id: str, owner: str) -> None:
        """Note that the client lives. Raises UnknownSession, HeartbeatEnded."""
        row = await self.require(session_id, owner)
        if row.finished_at is not None:
            raise HeartbeatEnded(f"session {session_id} was finished")
        self._heartbeats[session_id] = time.time()

    async def finish(self, session_id: str, request: FinishSessionRequest, owner: str) -> None:
        """End a session; the first reason stays. Raises UnknownSession."""
        row = await self.require(session_id, owner)
        if row.finished_at is not None:
            return
        row.finished_at, row.finish_reason, row.finish_detail = time.time(), request.reason.type, request.detail
        async with self._db.write() as session:
            await session.merge(row)

    async def require(self, session_id: str, owner: str) -> Session:
        """Raises UnknownSession."""
        row = await self.get(session_id)
        if row.owner != owner:
            raise _unknown(session_id)
        return row

    async def assign_project(self, session_id: str, project_id: str, owner: str) -> None:
        """Move a session, and with it its runs, to a project. Raises UnknownSession."""
        row = await self.require(session_id, owner)
        async with self._db.write() as session:
            await session.execute(update(Session).where(Session.session_id == session_id).values(project_id=project_id))
        row.project_id = project_id

    async def require_open(self, session_id: str, owner: str) -> None:
        """Raises UnknownSession, SessionFinished."""
        if (await self.require(session_id, owner)).finished_at is not None:
            raise SessionFinished(f"session {session_id} was finished and takes no new work")

    async def last_heartbeat(self, session_id: str) -> float:
        """Raises UnknownSession."""
        return self._heartbeats.get(session_id) or (await self.get(session_id)).last_heartbeat

    async def save_heartbeats(self) -> None:
        """Write the heartbeats that came since the last time."""
        heartbeats, self._heartbeats = self._heartbeats, {}
        if not heartbeats:
            return
        try:
            async with self._db.write() as session:
                for session_id, at in heartbeats.items():
                    query = update(Session).where(Session.session_id == session_id).values(last_heartbeat=at)
                    await session.execute(query)
        except BaseException:
            self._heartbeats = heartbeats | self._heartbeats
            raise
        for session_id, at in heartbeats.items():
            if (row := self._known.get(session_id)) is not None:
                row.last_heartbeat = at

    async def get(self, session_id: str) -> Session:
        """Whoever owns it. Raises UnknownSession."""
        if (row := self._known.get(session_id)) is None:
            async with self._db.read() as session:
                row = await session.get(Session, session_id)
            if row is None:
                raise _unknown(session_id)
            self._known[session_id] = row
        return row


def _unknown(session_id: str) -> UnknownSession:
    return UnknownSession(f"no session has the id {session_id!r}")


class SamplerStore:
    """The only way to the sampling_sessions table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[str, SamplingSession] = {}
        self._used_at: dict[str, float] = {}

    async def create(self, row: SamplingSession) -> str:
        """Store a sampling session and give its id; repeating it changes nothing.

        Raises BadRequest where the id is in use for other weights.
        """
        async with self._db.write() as session:
            first = await session.get(SamplingSession, row.sampling_session_id)
            if first is None:
                session.add(row)
            elif _weights_of(first) != _weights_of(row):
                raise BadRequest(f"{row.sampling_session_id} was created before, for other weights")
        self._known[row.sampling_session_id] = first or row
        return row.sampling_session_id

    async def repoint(self, folder: str, directory: str) -> set[str]:
        """Sessions whose weights lie in `folder` sample from `directory` instead; the directories they leave."""
        inside = SamplingSession.directory.startswith(folder, autoescape=True) & (
            SamplingSession.directory != directory
        )
        async with self._db.write() as session:
            left = set(await session.scalars(select(SamplingSession.directory).where(inside)))
            await session.execute(update(SamplingSession).where(inside).values(directory=directory))
        for row in self._known.values():
            if row.directory is not None and row.directory.startswith(folder):
                row.directory = directory
        return {one for one in left if one is not None}

    async def require(self, sampling_session_id: str, owner: str) -> SamplingSession:
        """Raises UnknownSampler."""
        row = await self.get(sampling_session_id)
        if row.owner != owner:
            raise UnknownSampler(f"no sampling session has the id {sampling_session_id!r}")
        return row

    async def take_unused(self, before: float, heartbeat: float) -> set[str]:
        """Directories of weights without a name that nobody sampled from since `before`, or whose session is
        finished, or had its last heartbeat before `heartbeat`; their sampling sessions have none from now on."""
        unnamed = and_(
            SamplingSession.directory.is_not(None),
            SamplingSession.model_path.is_(None),
            SamplingSession.weights_deleted_at.is_(None),
        )
        over = or_(Session.finished_at.is_not(None), Session.last_heartbeat < heartbeat)
        old = SamplingSession.created_at < before
        query = select(SamplingSession, over).join(Session).where(unnamed, or_(over, old))
        async with self._db.write() as session:
            candidates = (await session.execute(query)).all()
            unused = {
                row.sampling_session_id: row.directory
                for row, is_over in candidates
                if is_over or self._used_at.get(row.sampling_session_id, 0) < before
            }
            in_use = await session.scalars(
                select(SamplingSession.directory).where(unnamed, SamplingSession.sampling_session_id.not_in(unused))
            )
            # Inflight sampling sessions share their weights.
            shared = set(in_use)
            unused = {name: directory for name, directory in unused.items() if directory not in shared}
            ids = SamplingSession.sampling_session_id.in_(unused)
            await session.execute(update(SamplingSession).where(ids).values(weights_deleted_at=time.time()))
        for name in unused:
            self._used_at.pop(name, None)
            self._known.pop(name, None)
        return {directory for directory in unused.values() if directory is not None}

    def note_use(self, sampling_session_id: str) -> None:
        """Note that it was sampled from."""
        self._used_at[sampling_session_id] = time.time()

    async def get(self, sampling_session_id: str) -> SamplingSession:
        """Whoever owns it. Raises UnknownSampler."""
        if (row := self._known.get(sampling_session_id)) is None:
            async with self._db.read() as session:
                row = await session.get(SamplingSession, sampling_session_id)
            if row is None:
                raise UnknownSampler(f"no sampling session has the id {sampling_session_id!r}")
            self._known[sampling_session_id] = row
        return row


def _weights_of(row: SamplingSession) -> tuple[str, str | None]:
    """Named weights are the same by their name, although they may have been saved again since."""
    return row.base_model, row.model_path or row.directory
