"""Saved weights under their names."""

import time
import uuid
from collections.abc import Callable, Iterator, Set

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.api_schemas.checkpoints import TYPES, SearchCheckpointsRequest
from tinker_server.api_schemas.weights import TinkerPath
from tinker_server.errors import BadRequest, UnknownCheckpoint
from tinker_server.store.catalog import OF_RUN, in_project, is_unexpired
from tinker_server.store.database import Database, require_searchable
from tinker_server.store.directories import claim, release
from tinker_server.store.records import Checkpoint, columns, record
from tinker_server.store.tables import AuditEntryRow, CheckpointRow, SessionRow, TrainingRunRow


def parse_path(text: str) -> TinkerPath:
    """Parse a client's tinker:// path. Raises BadRequest."""
    try:
        return TinkerPath.parse(text)
    except ValueError as error:
        raise BadRequest(str(error)) from None


class CheckpointStore:
    """Reads and writes the checkpoints table."""

    def __init__(self, db: Database, on_change: Callable[[str], None] = lambda owner: None) -> None:
        self._db, self._on_change = db, on_change

    async def find(self, path: TinkerPath) -> Checkpoint | None:
        """Return a checkpoint, whoever owns it and even if it has expired; None if there is none."""
        row = await self._db.look(lambda session: session.get(CheckpointRow, str(path)))
        return None if row is None else record(Checkpoint, row)

    async def require_readable(self, path: TinkerPath, readers: Set[str], now: float) -> Checkpoint:
        """Return a checkpoint that is public or owned by a reader.

        Raises UnknownCheckpoint, also for one that has expired by `now`.
        """
        checkpoint = await self.find(path)
        if checkpoint is None or not (checkpoint.public or checkpoint.owner in readers):
            raise _unknown(path)
        if checkpoint.has_expired(now):
            raise UnknownCheckpoint(f"{path} has expired")
        return checkpoint

    async def require(self, path: TinkerPath, owner: str, now: float) -> Checkpoint:
        """Return a checkpoint of the owner. Raises UnknownCheckpoint, also for one that has expired by `now`."""
        checkpoint = await self.require_readable(path, {owner}, now)
        if checkpoint.owner != owner:
            raise _unknown(path)
        return checkpoint

    async def search(self, request: SearchCheckpointsRequest, caller: str, now: float) -> list[Checkpoint]:
        """Return at most `limit + 1` of the caller's or of published checkpoints that match, newest first. Raises
        BadRequest."""
        query = select(CheckpointRow).where(*_conditions(request, caller, now))
        if request.project_ids is not None:
            query = query.join(TrainingRunRow, OF_RUN).join(SessionRow).where(in_project(request.project_ids))
        if request.cursor is not None:
            # The last one's time is read from its row, since the cursor's is rounded to microseconds.
            path = request.cursor.last_checkpoint_uuid
            is_last = and_(CheckpointRow.tinker_path == path, or_(CheckpointRow.owner == caller, CheckpointRow.public))
            stored = select(CheckpointRow.created_at).where(is_last).scalar_subquery()
            last_at = func.coalesce(stored, request.cursor.last_created_at.timestamp())
            same_time = and_(CheckpointRow.created_at == last_at, CheckpointRow.tinker_path > path)
            query = query.where(or_(CheckpointRow.created_at < last_at, same_time))
        newest = query.order_by(CheckpointRow.created_at.desc(), CheckpointRow.tinker_path)
        async with self._db.read_of(caller) as session:
            return [record(Checkpoint, row) for row in await session.scalars(newest.limit(request.limit + 1))]

    async def put(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint. It replaces the checkpoint of the same path, whose directory is released."""

        async def put(session: AsyncSession) -> None:
            first = await session.get(CheckpointRow, checkpoint.tinker_path)
            if first is not None and first.directory != checkpoint.directory:
                await release(session, [first.directory])
            await session.merge(CheckpointRow(**columns(checkpoint)))
            await claim(session, checkpoint.directory)

        await self._db.change(put)

    async def take(self, path: TinkerPath, owner: str) -> str:
        """Delete a checkpoint, expired or not; return its directory, now unreferenced. Raises UnknownCheckpoint."""
        async with self._db.write() as session:
            return await _take(session, path, owner)

    async def delete(self, path: TinkerPath, owner: str, idempotency_key: str | None) -> str | None:
        """Take a checkpoint as its owner asks, and record this in the audit log. None for a repeat, which has the same
        key: the answer to the first request was lost. Raises UnknownCheckpoint."""
        id_ = uuid.uuid4()
        if idempotency_key is not None:
            id_ = uuid.uuid5(uuid.NAMESPACE_URL, f"{owner}/{idempotency_key}/{path}")
        details = {"model_id": path.run_id, "tinker_path": str(path)}
        async with self._db.write() as session:
            if await session.get(AuditEntryRow, id_.hex) is not None:
                return None
            directory = await _take(session, path, owner)
            event, at = "checkpoint_deleted", time.time()
            session.add(AuditEntryRow(entry_id=id_.hex, owner=owner, at=at, event=event, details=details))
        return directory

    async def set_public(self, path: TinkerPath, public: bool, owner: str, now: float) -> None:
        """Publish a checkpoint or withdraw it. Raises UnknownCheckpoint."""
        await self.require(path, owner, now)
        await self._change(path, public=public)

    async def set_expiry(self, path: TinkerPath, expires_at: float | None, owner: str, now: float) -> None:
        """Change when a checkpoint expires; None: never. Raises UnknownCheckpoint."""
        await self.require(path, owner, now)
        await self._change(path, expires_at=expires_at)

    async def _change(self, path: TinkerPath, **values: bool | float | None) -> None:
        async with self._db.write() as session:
            await session.execute(update(CheckpointRow).where(CheckpointRow.tinker_path == str(path)).values(**values))

    async def take_expired(self, now: float) -> list[str]:
        """Delete all expired checkpoints, and notify of it; return their directories, now unreferenced."""
        expired = CheckpointRow.expires_at <= now
        async with self._db.write() as session:
            found = (await session.execute(select(CheckpointRow.directory, CheckpointRow.owner).where(expired))).all()
            directories = [directory for directory, _ in found]
            await session.execute(delete(CheckpointRow).where(expired))
            await release(session, directories)
        for owner in {owner for _, owner in found}:
            self._on_change(owner)
        return directories


def _conditions(request: SearchCheckpointsRequest, caller: str, now: float) -> Iterator[ColumnElement[bool]]:
    row, owner = CheckpointRow, request.owner
    require_searchable(request.user_metadata)
    yield is_unexpired(now)
    yield row.owner == caller if owner.type == "own" else or_(row.owner == caller, row.public)
    if owner.type == "user":
        yield row.owner.in_(owner.owner_urns or [])
    for key, text in request.user_metadata.items():
        yield row.user_metadata[key].as_string() == text
    if request.checkpoint_type is not None:
        yield row.kind == next(kind for kind, name in TYPES.items() if name == request.checkpoint_type)
    if request.base_models is not None:
        yield row.base_model.in_(request.base_models)


async def _take(session: AsyncSession, path: TinkerPath, owner: str) -> str:
    row = await session.get(CheckpointRow, str(path))
    if row is None or row.owner != owner:
        raise _unknown(path)
    await session.delete(row)
    await release(session, [row.directory])
    return row.directory


def _unknown(path: TinkerPath) -> UnknownCheckpoint:
    return UnknownCheckpoint(f"{path}: training run {path.run_id} has no {path.kind} named {path.name!r}")
