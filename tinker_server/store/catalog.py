"""Lists of runs, checkpoints and sessions, newest first, a page at a time. Writes nothing."""

from collections import Counter
from collections.abc import AsyncIterator, Container, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlalchemy import ColumnElement, Subquery, and_, case, exists, func, literal, or_, select

from tinker_server.api_schemas.futures import FutureFailed
from tinker_server.api_schemas.sessions import SearchSessionsRequest, StatusQuery
from tinker_server.api_schemas.weights import Kind
from tinker_server.errors import UnknownModel
from tinker_server.store import notes
from tinker_server.store.database import Database, require_searchable
from tinker_server.store.records import Checkpoint, Session, TrainingRun, record
from tinker_server.store.run_metrics import Order, latest
from tinker_server.store.run_search import NOTED, RunSearch, has_words, words_of
from tinker_server.store.tables import CheckpointRow, Future, SamplingSessionRow, SessionRow, StepRow, TrainingRunRow

ACTIVE_S = 60.0
"""A session without a heartbeat for so long (the SDK sends it every 10 s) is not known to be running."""
OF_RUN = TrainingRunRow.model_id == CheckpointRow.run_id
LONGEST_SHOWN_ERROR = 10_000
"""Bytes of a failed result; the error in a larger result is not shown."""
DEFAULT_PROJECT = "default"
"""Project of sessions that were created without a project."""


@dataclass(frozen=True)
class Scope:
    """The owner whose entries are listed."""

    owner: str
    accessible: bool = False
    """List also what others have published."""


@dataclass(frozen=True)
class Page:
    """The part of a list that is asked for."""

    scope: Scope
    limit: int
    offset: int
    project_id: str | None = None


def title_of(run: TrainingRun, session: Session) -> str:
    """Return a run's name for people: the name given on the dashboard, else the client's; empty if there is none."""
    return run.name or str((run.user_metadata or {}).get("name") or "") or session.display_name or ""


@dataclass(frozen=True)
class RunRecord:
    """A run as it is shown."""

    run: TrainingRun
    session: Session
    last_request_at: float
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None

    @property
    def title(self) -> str:
        """Name for people; empty if there is none."""
        return title_of(self.run, self.session)

    @property
    def tags(self) -> list[str]:
        """Tags given on the dashboard and by the client."""
        return list(dict.fromkeys([*(self.run.tags or []), *self.session.tags]))

    @property
    def metadata(self) -> dict[str, object]:
        """Metadata of the run and of its session, which the run's override."""
        return self.session.user_metadata | (self.run.user_metadata or {})


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


class OperationRecord(NamedTuple):
    """An operation of a session."""

    kind: str
    lane: str
    seq_id: int
    status: str
    created_at: float
    finished_at: float | None


@dataclass(frozen=True)
class RunOperation:
    """An operation of a run, as it is shown."""

    kind: str
    seq_id: int
    status: str
    created_at: float
    finished_at: float | None
    failure_category: str | None
    error: str
    """The error, if it failed and its result is still stored."""
    waited_s: float | None
    run_s: float | None
    """Seconds it ran; for an operation without a row in `steps`, from its acceptance to its result."""

    def state(self, running: Container[int]) -> str:
        """Return its state as a word; `running`: the numbers that run now."""
        if self.status == "queued":
            return "running" if self.seq_id in running else "queued"
        return "failed" if self.failure_category is not None else "done"


class Catalog:
    """Reads lists across tables."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def runs(
        self, page: Page, now: float, search: RunSearch | None = None, order: Order | None = None
    ) -> tuple[list[RunRecord], int]:
        """Return a page and the total; with `search`, of the runs that have all of its words. The newest are first,
        unless they are sorted by a metric."""
        shown = (_is_run_visible(page.scope, now), *(has_words(search) if search else ()))
        query = select(TrainingRunRow).join(SessionRow).where(*shown)
        if page.project_id is not None:
            query = query.where(in_project([page.project_id]))
        value = None if order is None else latest(order.metric)
        is_descending = order is not None and order.is_descending
        newest = query.order_by(
            *([] if value is None else [(value.desc() if is_descending else value.asc()).nulls_last()]),
            TrainingRunRow.created_at.desc(),
            TrainingRunRow.model_id.desc(),
        )
        noted = sum((notes.length(column) for column in NOTED), start=literal(0))
        sizes = newest.with_only_columns(TrainingRunRow.model_id, noted).limit(page.limit).offset(page.offset)
        async with self._db.read_of(page.scope.owner) as session:
            total = await session.scalar(select(func.count()).select_from(query.subquery()))
            sized = await notes.sizes(session, sizes)
            last = _last_checkpoints(list(sized), page.scope, now)
            for run_id, size in await session.execute(select(last.c.run_id, last.c.noted).where(last.c.rank == 1)):
                sized[run_id] += size
            whole = notes.find_shown(sized)
            runs = await notes.rows(session, TrainingRunRow, sized, whole)
        return await self._records(list(runs.values()), page.scope, now, whole), total or 0

    async def run(self, run_id: str, scope: Scope, now: float) -> RunRecord:
        """Return a run. Raises UnknownModel."""
        query = select(TrainingRunRow).where(TrainingRunRow.model_id == run_id, _is_run_visible(scope, now))
        async with self._db.read_of(scope.owner) as session:
            row = await session.scalar(query)
        if row is None:
            raise UnknownModel(f"no training run has the id {run_id!r}")
        return (await self._records([row], scope, now, {run_id}))[0]

    async def _records(
        self, runs: Sequence[TrainingRunRow], scope: Scope, now: float, whole: Set[str]
    ) -> list[RunRecord]:
        """Return the records of runs; what is noted of their sessions and checkpoints is read only for `whole` runs."""
        # The highest number is a run's latest request, and the index on (lane, seq_id) finds it at once.
        ids = [run.model_id for run in runs]
        latest = select(Future.lane, func.max(Future.seq_id).label("seq_id")).where(Future.lane.in_(ids))
        latest_of_lane = latest.group_by(Future.lane).subquery()
        requests = select(Future.lane, Future.created_at).join(
            latest_of_lane, and_(Future.lane == latest_of_lane.c.lane, Future.seq_id == latest_of_lane.c.seq_id)
        )
        newest = _last_checkpoints(ids, scope, now)
        places = select(newest.c.tinker_path, newest.c.run_id, newest.c.kind).where(newest.c.rank == 1)
        noted_sessions = {run.session_id for run in runs if run.model_id in whole}
        async with self._db.read_of(scope.owner) as session:
            asked_at = {lane: at for lane, at in await session.execute(requests)}
            of_runs = {path: (run_id, kind) for path, run_id, kind in await session.execute(places)}
            noted_paths = {path for path, (run_id, _) in of_runs.items() if run_id in whole}
            rows = await notes.rows(session, CheckpointRow, of_runs, noted_paths)
            last = {of_runs[path]: record(Checkpoint, row) for path, row in rows.items()}
            found = await notes.rows(session, SessionRow, {run.session_id for run in runs}, noted_sessions)
            sessions = {session_id: record(Session, row) for session_id, row in found.items()}
        return [
            RunRecord(
                record(TrainingRun, run),
                sessions[run.session_id],
                asked_at.get(run.model_id, run.created_at),
                last.get((run.model_id, "weights")),
                last.get((run.model_id, "sampler_weights")),
            )
            for run in runs
        ]

    async def checkpoints(
        self, page: Page, kinds: Sequence[Kind], now: float, run_id: str | None = None
    ) -> tuple[list[Checkpoint], int]:
        """Return a page of a run's checkpoints, or of all, and the total."""
        query = select(CheckpointRow).where(CheckpointRow.kind.in_(kinds), _is_visible(page.scope, now))
        if run_id is not None:
            query = query.where(CheckpointRow.run_id == run_id)
        if page.project_id is not None:
            query = query.join(TrainingRunRow, OF_RUN).join(SessionRow).where(in_project([page.project_id]))
        newest = query.order_by(CheckpointRow.created_at.desc(), CheckpointRow.tinker_path)
        path, noted = CheckpointRow.tinker_path, notes.length(CheckpointRow.user_metadata)
        sizes = newest.with_only_columns(path, noted).limit(page.limit).offset(page.offset)
        async with self._db.read_of(page.scope.owner) as session:
            total = await session.scalar(select(func.count()).select_from(query.subquery()))
            sized = await notes.sizes(session, sizes)
            rows = await notes.rows(session, CheckpointRow, sized, notes.find_shown(sized))
        return [record(Checkpoint, row) for row in rows.values()], total or 0

    async def sessions(self, page: Page) -> list[str]:
        """Return the ids of a page of sessions."""
        mine = select(SessionRow.session_id).where(SessionRow.owner == page.scope.owner)
        query = mine.order_by(SessionRow.created_at.desc(), SessionRow.session_id.desc())
        if page.project_id is not None:
            query = query.where(in_project([page.project_id]))
        async with self._db.read_of(page.scope.owner) as session:
            return list(await session.scalars(query.limit(page.limit).offset(page.offset)))

    async def of_session(self, session_id: str) -> tuple[list[str], list[str]]:
        """Return the ids of a session's runs and of its sampling sessions, oldest first."""
        runs = select(TrainingRunRow.model_id).where(TrainingRunRow.session_id == session_id)
        samplers = select(SamplingSessionRow.sampling_session_id).where(SamplingSessionRow.session_id == session_id)
        async with self._db.read() as session:
            return (
                list(await session.scalars(runs.order_by(TrainingRunRow.created_at))),
                list(await session.scalars(samplers.order_by(SamplingSessionRow.created_at))),
            )

    async def search(self, request: SearchSessionsRequest, owner: str, now: float) -> tuple[list[SessionRecord], bool]:
        """Return a page of the owner's sessions that match, and whether there are more. Raises BadRequest."""
        query = select(SessionRow).where(SessionRow.owner == owner, *_conditions(request, now))
        if request.cursor is not None:
            # The last session's time is read from its row, since the cursor's is rounded to microseconds.
            last = SessionRow.session_id == request.cursor.last_session_id
            stored = select(SessionRow.created_at).where(last, SessionRow.owner == owner)
            last_at = func.coalesce(stored.scalar_subquery(), request.cursor.last_created_at.timestamp())
            same_time = and_(SessionRow.created_at == last_at, SessionRow.session_id < request.cursor.last_session_id)
            query = query.where(or_(SessionRow.created_at < last_at, same_time))
        newest = query.order_by(SessionRow.created_at.desc(), SessionRow.session_id.desc())
        texts = (SessionRow.user_metadata, SessionRow.display_name, SessionRow.finish_detail)
        noted = sum((notes.length(column) for column in texts), start=literal(0))
        sizes = newest.with_only_columns(SessionRow.session_id, noted).limit(request.limit + 1)
        async with self._db.read_of(owner) as session:
            sized = await notes.sizes(session, sizes)
            shown = notes.first(sized)[: request.limit]
            rows = (await session.scalars(newest.where(SessionRow.session_id.in_(shown)))).all()
            sums = (
                select(TrainingRunRow.session_id, func.count(), func.sum(CheckpointRow.size_bytes))
                .join(CheckpointRow, OF_RUN)
                .where(is_unexpired(now), TrainingRunRow.session_id.in_([row.session_id for row in rows]))
                .group_by(TrainingRunRow.session_id)
            )
            saved = {session_id: (count, int(size)) for session_id, count, size in await session.execute(sums)}
        records = [SessionRecord(record(Session, row), *saved.get(row.session_id, (0, 0))) for row in rows]
        return records, len(sized) > len(shown)

    async def storage(self, owner: str, project_id: str | None, now: float) -> list[StorageRecord]:
        """Return the number and bytes of an owner's saved weights by project."""
        query = (
            select(SessionRow.project_id, func.count(), func.sum(CheckpointRow.size_bytes))
            .select_from(CheckpointRow)
            .join(TrainingRunRow, OF_RUN)
            .join(SessionRow)
            .where(CheckpointRow.owner == owner, is_unexpired(now))
            .group_by(SessionRow.project_id)
            .order_by(SessionRow.project_id)
        )
        if project_id is not None:
            query = query.where(in_project([project_id]))
        counts, sizes = Counter[str](), Counter[str]()
        async with self._db.read_of(owner) as session:
            for name, count, size in await session.execute(query):
                counts[name or DEFAULT_PROJECT] += count
                sizes[name or DEFAULT_PROJECT] += int(size)
        return [StorageRecord(name, count, sizes[name]) for name, count in counts.items()]

    async def operations_of_run(self, run_id: str, count: int) -> list[RunOperation]:
        """Return the last operations of a run, the latest first."""
        short = (Future.status == "failed") & (func.length(Future.result) <= LONGEST_SHOWN_ERROR)
        columns = (
            Future.kind,
            Future.seq_id,
            Future.status,
            Future.created_at,
            Future.finished_at,
            Future.failure_category,
            case((short, Future.result)).label("error"),
            StepRow.waited_s,
            StepRow.run_s,
        )
        of_step = and_(StepRow.model_id == Future.lane, StepRow.seq_id == Future.seq_id)
        query = select(*columns).outerjoin(StepRow, of_step).where(Future.lane == run_id)
        async with self._db.read() as session:
            rows = (await session.execute(query.order_by(Future.seq_id.desc()).limit(count))).all()
        return [_run_operation(RunOperation(*row)) for row in rows]

    async def operations(self, session_id: str, at_once: int) -> AsyncIterator[list[OperationRecord]]:
        """Yield all operations of a session in pages of `at_once`, lane by lane and in order of numbers."""
        run_ids, sampler_ids = await self.of_session(session_id)
        columns = (Future.kind, Future.lane, Future.seq_id, Future.status, Future.created_at, Future.finished_at)
        for lane in (*run_ids, *sampler_ids):
            last = -1
            while True:
                query = select(*columns).where(Future.lane == lane, Future.seq_id > last)
                async with self._db.read() as session:
                    rows = (await session.execute(query.order_by(Future.seq_id).limit(at_once))).all()
                if not rows:
                    break
                last = rows[-1].seq_id
                yield [OperationRecord(*row) for row in rows]


def _last_checkpoints(run_ids: Sequence[str], scope: Scope, now: float) -> Subquery:
    """Return a query for checkpoints, in which `rank` is 1 for the last checkpoint of each run and kind."""
    row = CheckpointRow
    rank = func.row_number().over(partition_by=(row.run_id, row.kind), order_by=row.created_at.desc())
    noted = notes.length(row.user_metadata).label("noted")
    ranked = select(row.run_id, row.kind, row.tinker_path, noted, rank.label("rank"))
    return ranked.where(row.run_id.in_(run_ids), _is_visible(scope, now)).subquery()


def _run_operation(row: RunOperation) -> RunOperation:
    error = FutureFailed.model_validate_json(row.error).error if row.error else ""
    if row.run_s is not None or row.finished_at is None:
        return replace(row, error=error)
    return replace(row, error=error, run_s=row.finished_at - row.created_at)


def is_unexpired(now: float) -> ColumnElement[bool]:
    """Return the condition that a checkpoint has not expired."""
    return or_(CheckpointRow.expires_at.is_(None), CheckpointRow.expires_at > now)


def _is_visible(scope: Scope, now: float) -> ColumnElement[bool]:
    """Return the condition for checkpoints within the scope."""
    mine = CheckpointRow.owner == scope.owner
    return and_(or_(mine, CheckpointRow.public) if scope.accessible else mine, is_unexpired(now))


def _is_run_visible(scope: Scope, now: float) -> ColumnElement[bool]:
    """Return the condition for runs within the scope: another's run is, if any of its checkpoints is public."""
    mine = TrainingRunRow.owner == scope.owner
    if not scope.accessible:
        return mine
    return or_(mine, exists().where(OF_RUN, CheckpointRow.public, is_unexpired(now)))


def in_project(project_ids: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a session is of these projects."""
    named = SessionRow.project_id.in_(project_ids)
    return or_(named, SessionRow.project_id.is_(None)) if DEFAULT_PROJECT in project_ids else named


def _conditions(request: SearchSessionsRequest, now: float) -> list[ColumnElement[bool]]:
    require_searchable(request.user_metadata)
    conditions = [SessionRow.user_metadata[key].as_string() == text for key, text in request.user_metadata.items()]
    either = []
    if request.session_id is not None:
        either.append(SessionRow.session_id == request.session_id)
    if request.display_name is not None:
        name = func.lower(SessionRow.display_name)
        words = words_of("display_name", request.display_name.lower())
        has_all = [name.contains(word, autoescape=True) for word in words]
        either.append(and_(SessionRow.display_name.is_not(None), *has_all))
    if either:
        conditions.append(or_(*either))
    if request.project_ids is not None:
        conditions.append(in_project(request.project_ids))
    if request.statuses is not None:
        conditions.append(or_(*(_has_status(status, now) for status in request.statuses)))
    return conditions


def _has_status(status: StatusQuery, now: float) -> ColumnElement[bool]:
    match status.type:
        case "active":
            return and_(SessionRow.finished_at.is_(None), SessionRow.last_heartbeat > now - ACTIVE_S)
        case "client_finished":
            finished = SessionRow.finished_at.is_not(None)
            return finished if status.reasons is None else and_(finished, SessionRow.finish_reason.in_(status.reasons))
        case _:  # nothing here cancels a session or fails it as a whole
            return SessionRow.session_id.is_(None)
