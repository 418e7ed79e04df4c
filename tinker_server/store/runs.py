"""Training runs and the weights saved from them. Runs are asked for at every operation and kept in memory."""

from collections.abc import Set

from sqlalchemy import delete, or_, select, update

from api_schemas.weights import TinkerPath
from tinker_server.errors import BadRequest, ModelIdTaken, UnknownCheckpoint, UnknownModel
from tinker_server.store.database import Database
from tinker_server.store.tables import Checkpoint, Session, TrainingRun


def parse_path(text: str) -> TinkerPath:
    """A client's tinker:// path. Raises BadRequest."""
    try:
        return TinkerPath.parse(text)
    except ValueError as error:
        raise BadRequest(str(error)) from None


class RunStore:
    """The only way to the training_runs table."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[str, TrainingRun] = {}

    async def add(self, run: TrainingRun, checkpoint: Checkpoint | None = None) -> None:
        """Store a run, with the weights that were copied to it if it is a copy's, which is never in memory.

        Raises ModelIdTaken.
        """
        async with self._db.write() as session:
            if await session.get(TrainingRun, run.model_id) is not None:
                raise ModelIdTaken(
                    f"{run.model_id} is in use, for a model or for a copy of weights; take another model_seq_id"
                )
            session.add(run)
            if checkpoint is not None:
                session.add(checkpoint)
        self._known[run.model_id] = run

    async def require(self, model_id: str, owner: str) -> TrainingRun:
        """Raises UnknownModel, also for another owner's."""
        run = await self.get(model_id)
        if run.owner != owner:
            raise UnknownModel(f"no model has the id {model_id!r}")
        return run

    async def get(self, model_id: str) -> TrainingRun:
        """Whoever owns it. Raises UnknownModel."""
        if (run := self._known.get(model_id)) is None:
            async with self._db.read() as session:
                run = await session.get(TrainingRun, model_id)
            if run is None:
                raise UnknownModel(f"no model has the id {model_id!r}")
            self._known[model_id] = run
        return run

    async def find(self, model_id: str) -> TrainingRun | None:
        try:
            return await self.get(model_id)
        except UnknownModel:
            return None

    async def forget_unanswered(self, model_ids: Set[str]) -> None:
        """Models whose creation nobody was told of, when the server that made them ended: they will be made again."""
        async with self._db.write() as session:
            for model_id in model_ids:
                unanswered = (TrainingRun.model_id == model_id) & (TrainingRun.status == "active")
                await session.execute(delete(TrainingRun).where(unanswered))
        self._known.clear()

    async def mark_all_lost(self) -> None:
        """Record that no model is in memory: a server has just started."""
        async with self._db.write() as session:
            await session.execute(update(TrainingRun).where(TrainingRun.status == "active").values(status="lost"))
        self._known.clear()

    async def mark_lost(self, model_id: str) -> None:
        """Record that a model is no longer in memory, and not on disk either."""
        await self._set_status(model_id, "lost", None)

    async def mark_suspended(self, model_id: str, snapshot: str) -> None:
        """Record that a model is on disk, in the directory `snapshot`."""
        await self._set_status(model_id, "suspended", snapshot)

    async def mark_active(self, model_id: str) -> None:
        """Record that a suspended model is in memory again."""
        await self._set_status(model_id, "active", None)

    async def _set_status(self, model_id: str, status: str, snapshot: str | None) -> None:
        change = update(TrainingRun).where(TrainingRun.model_id == model_id)
        async with self._db.write() as session:
            await session.execute(change.values(status=status, snapshot=snapshot))
        run = await self.get(model_id)
        run.status, run.snapshot = status, snapshot

    def in_memory(self) -> list[TrainingRun]:
        """The models that are not lost or suspended: all were asked for since the start, so all are known."""
        return [run for run in self._known.values() if run.status == "active"]

    async def suspended_since_before(self, heartbeat: float) -> list[TrainingRun]:
        """The models on disk whose session is finished, or had its last heartbeat before that."""
        over = or_(Session.finished_at.is_not(None), Session.last_heartbeat < heartbeat)
        query = select(TrainingRun).join(Session).where(TrainingRun.status == "suspended", over)
        async with self._db.read() as session:
            return list(await session.scalars(query))


class CheckpointStore:
    """The only way to the checkpoints table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def find(self, path: TinkerPath) -> Checkpoint | None:
        async with self._db.read() as session:
            return await session.get(Checkpoint, str(path))

    async def require_readable(self, path: TinkerPath, readers: Set[str], now: float) -> Checkpoint:
        """One that is public or one of the readers' own.

        Raises UnknownCheckpoint, also for one that has expired by `now`.
        """
        checkpoint = await self.find(path)
        if checkpoint is None or not (checkpoint.public or checkpoint.owner in readers):
            raise _unknown(path)
        if checkpoint.expires_at is not None and checkpoint.expires_at <= now:
            raise UnknownCheckpoint(f"{path} has expired")
        return checkpoint

    async def require(self, path: TinkerPath, owner: str, now: float) -> Checkpoint:
        """One of the owner's own. Raises UnknownCheckpoint, also for one that has expired by `now`."""
        checkpoint = await self.require_readable(path, {owner}, now)
        if checkpoint.owner != owner:
            raise _unknown(path)
        return checkpoint

    async def put(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint in place of the one of its path, if there is one."""
        async with self._db.write() as session:
            await session.merge(checkpoint)

    async def take(self, path: TinkerPath, owner: str) -> str:
        """Forget a checkpoint, also an expired one; its directory, for deletion. Raises UnknownCheckpoint."""
        async with self._db.write() as session:
            checkpoint = await session.get(Checkpoint, str(path))
            if checkpoint is None or checkpoint.owner != owner:
                raise _unknown(path)
            await session.delete(checkpoint)
        return checkpoint.directory

    async def set_public(self, path: TinkerPath, public: bool, owner: str, now: float) -> None:
        """Raises UnknownCheckpoint."""
        await self.require(path, owner, now)
        await self._change(path, public=public)

    async def set_expiry(self, path: TinkerPath, expires_at: float | None, owner: str, now: float) -> None:
        """Raises UnknownCheckpoint."""
        await self.require(path, owner, now)
        await self._change(path, expires_at=expires_at)

    async def _change(self, path: TinkerPath, **values: bool | float | None) -> None:
        async with self._db.write() as session:
            await session.execute(update(Checkpoint).where(Checkpoint.tinker_path == str(path)).values(**values))

    async def take_expired(self, now: float) -> list[str]:
        """Forget all that have expired; their directories, for deletion."""
        expired = Checkpoint.expires_at <= now
        async with self._db.write() as session:
            directories = list(await session.scalars(select(Checkpoint.directory).where(expired)))
            await session.execute(delete(Checkpoint).where(expired))
        return directories


def _unknown(path: TinkerPath) -> UnknownCheckpoint:
    return UnknownCheckpoint(f"{path}: training run {path.run_id} has no {path.kind} named {path.name!r}")
