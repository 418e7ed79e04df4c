"""What can be listed: runs, checkpoints and sessions, newest first, a page at a time. Writes nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, union

from api_schemas.sessions import SearchSessionsRequest, StatusQuery
from api_schemas.weights import Kind
from tinker_server.errors import BadRequest, UnknownModel
from tinker_server.store.database import Database
from tinker_server.store.tables import Checkpoint, Future, SamplingSession, Session, TrainingRun

ACTIVE_S = 60.0
"""A session without a heartbeat for so long (the SDK sends one every 10 s) is not known to be running."""
_OF_RUN = TrainingRun.model_id == Checkpoint.run_id
DEFAULT_PROJECT = "default"
"""Of sessions that were created without one."""


@dataclass(frozen=True)
class Scope:
    """Whose things are asked for."""

    owner: str
    accessible: bool = False
    """Also what others have published."""


@dataclass(frozen=True)
class Page:
    """Which part of a list is asked for."""

    scope: Scope
    limit: int
    offset: int
    project_id: str | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run with what is shown of it."""

    run: TrainingRun
    last_request_at: float
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None


@dataclass(frozen=True)
class SessionRecord:
    """A session with the weights that were saved in it."""

    session: Session
    checkpoints_count: int
    size_bytes: int


@dataclass(frozen=True)
class StorageRecord:
    """A project's saved weights."""

    project_id: str
    checkpoints_count: int
    size_bytes: int


class Catalog:
    """Reads across tables."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def runs(self, page: Page, now: float) -> tuple[list[RunRecord], int]:
        """One page, and how many there are."""
        query = select(TrainingRun).where(_shown_run(page.scope, now))
        if page.project_id is not None:
            query = query.join(Session).where(_in_project([page.project_id]))
        newest = query.order_by(TrainingRun.created_at.desc(), TrainingRun.model_id.desc())
        async with self._db.read() as session:
            total = await session.scalar(select(func.count()).select_from(query.subquery()))
            runs = (await session.scalars(newest.limit(page.limit).offset(page.offset))).all()
        return await self._records(runs, page.scope, now), total or 0

    async def run(self, run_id: str, scope: Scope, now: float) -> RunRecord:
        """Raises UnknownModel."""
        query = select(TrainingRun).where(TrainingRun.model_id == run_id, _shown_run(scope, now))
        async with self._db.read() as session:
            run = await session.scalar(query)
        if run is None:
            raise UnknownModel(f"no training run has the id {run_id!r}")
        return (await self._records([run], scope, now))[0]

    async def _records(self, runs: Sequence[TrainingRun], scope: Scope, now: float) -> list[RunRecord]:
        # The highest number is a run's latest request, and the index on (lane, seq_id) finds it at once.
        ids = [run.model_id for run in runs]
        latest = select(Future.lane, func.max(Future.seq_id).label("seq_id")).where(Future.lane.in_(ids))
        latest_of_lane = latest.group_by(Future.lane).subquery()
        requests = select(Future.lane, Future.created_at).join(
            latest_of_lane, and_(Future.lane == latest_of_lane.c.lane, Future.seq_id == latest_of_lane.c.seq_id)
        )
        rank = func.row_number().over(
            partition_by=(Checkpoint.run_id, Checkpoint.kind), order_by=Checkpoint.created_at.desc()
        )
        ranked = select(Checkpoint.tinker_path, rank.label("rank"))
        newest = ranked.where(Checkpoint.run_id.in_(ids), _shown(scope, now)).subquery()
        checkpoints = select(Checkpoint).join(newest, Checkpoint.tinker_path == newest.c.tinker_path)
        async with self._db.read() as session:
            asked_at = {lane: at for lane, at in await session.execute(requests)}
            last = {(row.run_id, row.kind): row for row in await session.scalars(checkpoints.where(newest.c.rank == 1))}
        return [
            RunRecord(
                run,
                asked_at.get(run.model_id, run.created_at),
                last.get((run.model_id, "weights")),
                last.get((run.model_id, "sampler_weights")),
            )
            for run in runs
        ]

    async def checkpoints(
        self, page: Page, kinds: Sequence[Kind], now: float, run_id: str | None = None
    ) -> tuple[list[Checkpoint], int]:
        """One page of a run's checkpoints, or of all, and how many there are."""
        query = select(Checkpoint).where(Checkpoint.kind.in_(kinds), _shown(page.scope, now))
        if run_id is not None:
            query = query.where(Checkpoint.run_id == run_id)
        if page.project_id is not None:
            query = query.join(TrainingRun, _OF_RUN).join(Session).where(_in_project([page.project_id]))
        newest = query.order_by(Checkpoint.created_at.desc(), Checkpoint.tinker_path)
        async with self._db.read() as session:
            total = await session.scalar(select(func.count()).select_from(query.subquery()))
            rows = (await session.scalars(newest.limit(page.limit).offset(page.offset))).all()
        return list(rows), total or 0

    async def sessions(self, page: Page) -> list[str]:
        """Ids of one page of sessions."""
        mine = select(Session.session_id).where(Session.owner == page.scope.owner)
        query = mine.order_by(Session.created_at.desc(), Session.session_id.desc())
        if page.project_id is not None:
            query = query.where(_in_project([page.project_id]))
        async with self._db.read() as session:
            return list(await session.scalars(query.limit(page.limit).offset(page.offset)))

    async def of_session(self, session_id: str) -> tuple[list[str], list[str]]:
        """Ids of a session's runs and of its sampling sessions, oldest first."""
        runs = select(TrainingRun.model_id).where(TrainingRun.session_id == session_id)
        samplers = select(SamplingSession.sampling_session_id).where(SamplingSession.session_id == session_id)
        async with self._db.read() as session:
            return (
                list(await session.scalars(runs.order_by(TrainingRun.created_at))),
                list(await session.scalars(samplers.order_by(SamplingSession.created_at))),
            )

    async def search(self, request: SearchSessionsRequest, owner: str, now: float) -> list[SessionRecord]:
        """The owner's sessions that match, one more than `request.limit` where there are more. Raises BadRequest."""
        query = select(Session).where(Session.owner == owner, *_conditions(request, now))
        if request.cursor is not None:
            # The time of the last session as it is stored: the cursor's is rounded to microseconds.
            stored = select(Session.created_at).where(Session.session_id == request.cursor.last_session_id)
            last_at = func.coalesce(stored.scalar_subquery(), request.cursor.last_created_at.timestamp())
            same_time = and_(Session.created_at == last_at, Session.session_id < request.cursor.last_session_id)
            query = query.where(or_(Session.created_at < last_at, same_time))
        newest = query.order_by(Session.created_at.desc(), Session.session_id.desc()).limit(request.limit + 1)
        async with self._db.read() as session:
            rows = (await session.scalars(newest)).all()
            sums = (
                select(TrainingRun.session_id, func.count(), func.sum(Checkpoint.size_bytes))
                .join(Checkpoint, _OF_RUN)
                .where(_kept(now), TrainingRun.session_id.in_([row.session_id for row in rows]))
                .group_by(TrainingRun.session_id)
            )
            saved = {session_id: (count, int(size)) for session_id, count, size in await session.execute(sums)}
        return [SessionRecord(row, *saved.get(row.session_id, (0, 0))) for row in rows]

    async def storage(self, owner: str, project_id: str | None, now: float) -> list[StorageRecord]:
        """What an owner stores now, by project."""
        query = (
            select(Session.project_id, func.count(), func.sum(Checkpoint.size_bytes))
            .select_from(Checkpoint)
            .join(TrainingRun, _OF_RUN)
            .join(Session)
            .where(Checkpoint.owner == owner, _kept(now))
            .group_by(Session.project_id)
            .order_by(Session.project_id)
        )
        if project_id is not None:
            query = query.where(_in_project([project_id]))
        counts, sizes = Counter[str](), Counter[str]()
        async with self._db.read() as session:
            for name, count, size in await session.execute(query):
                counts[name or DEFAULT_PROJECT] += count
                sizes[name or DEFAULT_PROJECT] += int(size)
        return [StorageRecord(name, count, sizes[name]) for name, count in counts.items()]

    async def operations(self, session_id: str) -> list[tuple[str, str, int, str, float, float | None]]:
        """Kind, lane, number, status, acceptance and end of all that a session had done."""
        lanes = union(
            select(TrainingRun.model_id).where(TrainingRun.session_id == session_id),
            select(SamplingSession.sampling_session_id).where(SamplingSession.session_id == session_id),
        )
        query = select(
            Future.kind, Future.lane, Future.seq_id, Future.status, Future.created_at, Future.finished_at
        ).where(Future.lane.in_(lanes))
        async with self._db.read() as session:
            rows = (await session.execute(query.order_by(Future.created_at))).all()
        return [(kind, lane, seq_id, status, start, end) for kind, lane, seq_id, status, start, end in rows]


def _kept(now: float) -> ColumnElement[bool]:
    return or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > now)


def _shown(scope: Scope, now: float) -> ColumnElement[bool]:
    """Checkpoints within the scope."""
    mine = Checkpoint.owner == scope.owner
    return and_(or_(mine, Checkpoint.public) if scope.accessible else mine, _kept(now))


def _shown_run(scope: Scope, now: float) -> ColumnElement[bool]:
    """Runs within the scope: another's is, where one of its checkpoints is public."""
    mine = TrainingRun.owner == scope.owner
    if not scope.accessible:
        return mine
    return or_(mine, exists().where(_OF_RUN, Checkpoint.public, _kept(now)))


def _in_project(project_ids: Sequence[str]) -> ColumnElement[bool]:
    named = Session.project_id.in_(project_ids)
    return or_(named, Session.project_id.is_(None)) if DEFAULT_PROJECT in project_ids else named


def _conditions(request: SearchSessionsRequest, now: float) -> list[ColumnElement[bool]]:
    for key in request.user_metadata:
        if not key.isprintable() or '"' in key or "\\" in key:  # SQLite's JSON paths have no escape for them
            raise BadRequest(f"user_metadata: the key {key!r} cannot be searched for")
    conditions = [Session.user_metadata[key].as_string() == text for key, text in request.user_metadata.items()]
    either = []
    if request.session_id is not None:
        either.append(Session.session_id == request.session_id)
    if request.display_name is not None:
        name = func.lower(Session.display_name)
        words = [name.contains(word, autoescape=True) for word in request.display_name.lower().split()]
        either.append(and_(Session.display_name.is_not(None), *words))
    if either:
        conditions.append(or_(*either))
    if request.project_ids is not None:
        conditions.append(_in_project(request.project_ids))
    if request.statuses is not None:
        conditions.append(or_(*(_has_status(status, now) for status in request.statuses)))
    return conditions


def _has_status(status: StatusQuery, now: float) -> ColumnElement[bool]:
    match status.type:
        case "active":
            return and_(Session.finished_at.is_(None), Session.last_heartbeat > now - ACTIVE_S)
        case "client_finished":
            finished = Session.finished_at.is_not(None)
            return finished if status.reasons is None else and_(finished, Session.finish_reason.in_(status.reasons))
        case _:  # nothing here cancels a session or fails it as a whole
            return Session.session_id.is_(None)
