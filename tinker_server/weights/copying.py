"""Copies of saved weights under a tinker:// path of their own, in a project or as a free number of a session."""

import time
from collections.abc import Set
from dataclasses import replace

from tinker_server.api_schemas import ids
from tinker_server.api_schemas.checkpoints import CopyWeightsRequest
from tinker_server.api_schemas.sessions import CreateSessionRequest, FinishReason, FinishSessionRequest
from tinker_server.api_schemas.training import OptimizerConfig, Trainable
from tinker_server.api_schemas.weights import TinkerPath
from tinker_server.errors import BadRequest, DiskFull, UnknownCheckpoint
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.store.records import Checkpoint, TrainingRun
from tinker_server.store.runs import RunStore
from tinker_server.store.sessions import SessionStore
from tinker_server.weights.saving import check_ttl

COPY = "copy_weights"


async def make_finished_session(
    sessions: SessionStore, made_by: str, project_id: str | None, key: str | None, owner: str
) -> str:
    """Make a session for weights that no model of it saved, and finish it: nobody works in it. The same key gives the
    same session."""
    session = CreateSessionRequest(tags=[made_by], project_id=project_id)
    session_id = await sessions.create(session, None if key is None else f"{made_by}:{key}", owner)
    done = FinishSessionRequest(reason=FinishReason(type="success"), detail=f"made by {made_by}")
    await sessions.finish(session_id, done, owner)
    return session_id


def run_of_weights(
    owner: str, place: tuple[str, int], base: tuple[str, str | None], trainable: Trainable, created_at: float
) -> TrainingRun:
    """Return the record of the run that such weights belong to, which was never in memory. `place`: its session and its
    number there; `base`: name and fingerprint."""
    session_id, number = place
    return TrainingRun(
        model_id=ids.model_id(session_id, number),
        owner=owner,
        session_id=session_id,
        model_seq_id=number,
        base_model=base[0],
        base_fingerprint=base[1],
        trainable=trainable,
        optimizer_config=OptimizerConfig().model_dump(),
        status="lost",
        created_at=created_at,
    )


class Copying:
    """Copies weights, a single copy of an owner at a time. A copy has a training run of its own, which was never in
    memory."""

    def __init__(
        self,
        sessions: SessionStore,
        runs: RunStore,
        checkpoints: CheckpointStore,
        storage: Storage,
        holdings: Holdings,
    ) -> None:
        self._sessions = sessions
        self._runs = runs
        self._checkpoints = checkpoints
        self._storage = storage
        self._holdings = holdings

    async def copy(
        self, request: CopyWeightsRequest, idempotency_key: str | None, owner: str, readers: Set[str]
    ) -> TinkerPath:
        """Copy weights and return the copy's path; a repeat, which has the same key, gets the path of the first.

        The copy is the owner's; its source is public or owned by a reader.

        Raises BadRequest, LimitReached, ModelIdTaken, UnknownCheckpoint, UnknownSession, SessionFinished, DiskFull.
        """
        check_ttl(request.ttl_seconds)
        source = parse_path(request.source_path)
        now = time.time()
        async with self._holdings.asking[owner]:
            if (first := await self._find_first(request, source, idempotency_key, owner)) is not None:
                return first
            checkpoint = await self._checkpoints.require_readable(source, readers, now)
            session_id, number = await self._place(request, idempotency_key, owner)
            path = TinkerPath(ids.model_id(session_id, number), source.kind, source.name)
            if await self._runs.find(path.run_id) is not None:
                raise BadRequest(f"{path.run_id} is in use, and not for a copy of {source}")
            await self._holdings.require_room(owner, checkpoint.size_bytes)
            base = checkpoint.base_model, checkpoint.base_fingerprint
            run = run_of_weights(owner, (session_id, number), base, checkpoint.trainable, now)
            run = replace(run, user_metadata=checkpoint.user_metadata)
            expires_at = None if request.ttl_seconds is None else now + request.ttl_seconds
            await self._write(checkpoint, path, run, expires_at)
        return path

    async def _find_first(
        self, request: CopyWeightsRequest, source: TinkerPath, idempotency_key: str | None, owner: str
    ) -> TinkerPath | None:
        """Return the path of the copy that an earlier try of this request made. The source may be gone since."""
        session_id, number = request.session_id, request.model_seq_id
        if request.destination_project_id is not None and idempotency_key is not None:
            session_id, number = await self._sessions.find_made(f"{COPY}:{idempotency_key}", owner), 0
        if session_id is None or number is None:
            return None
        path = TinkerPath(ids.model_id(session_id, number), source.kind, source.name)
        first = await self._checkpoints.find(path)
        return path if first is not None and (first.owner, first.copied_from) == (owner, str(source)) else None

    async def _place(self, request: CopyWeightsRequest, idempotency_key: str | None, owner: str) -> tuple[str, int]:
        match request.destination_project_id, request.session_id, request.model_seq_id:
            case str(project_id), None, None:
                return await make_finished_session(self._sessions, COPY, project_id, idempotency_key, owner), 0
            case None, str(session_id), int(number):
                await self._sessions.require(session_id, owner, must_be_open=True)
                return session_id, number
        raise BadRequest("copy_weights takes either destination_project_id, or session_id and model_seq_id")

    async def _write(self, source: Checkpoint, path: TinkerPath, run: TrainingRun, expires_at: float | None) -> None:
        """Copy the files, then record the copy and the run that it belongs to."""
        async with self._storage.writing(*path) as directory:
            failure = None
            try:
                await self._storage.copy(source.directory, directory)
            except OSError as error:
                failure = error
            # A row goes before its files: while they are deleted, some are there to be copied.
            found = await self._checkpoints.find(parse_path(source.tinker_path))
            if found is None or found.directory != source.directory:
                raise UnknownCheckpoint(f"{source.tinker_path} was deleted, or saved anew, while it was copied")
            if failure is not None:
                raise DiskFull(f"the copy cannot be written: {failure.strerror or 'the disk is full'}") from failure
            copy = replace(
                source,
                tinker_path=str(path),
                owner=run.owner,
                run_id=path.run_id,
                directory=directory,
                created_at=run.created_at,
                expires_at=expires_at,
                public=False,
                saved_as=None,
                copied_from=source.tinker_path,
            )
            await self._runs.add(run, copy)
