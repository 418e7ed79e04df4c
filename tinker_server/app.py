"""The application: builds everything in its lifespan, in the order it depends on each other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI

from backends.protocol import Backend, LoadingHearer, unheard
from tinker_server.auth.keys import Keys
from tinker_server.auth.links import Links
from tinker_server.auth.sign_ins import SignIns
from tinker_server.chat.answering import Chats
from tinker_server.dashboard import pages
from tinker_server.errors import Superseded
from tinker_server.models.admission import Admission
from tinker_server.models.bringing_back import bring_back_lost
from tinker_server.models.dispatcher import Scheduler
from tinker_server.models.registry import Models
from tinker_server.models.restore import Recovery
from tinker_server.models.snapshots import SnapshotLimits, Snapshots
from tinker_server.observability.metrics import Metrics
from tinker_server.observability.recent_samples import Gallery
from tinker_server.observability.tracing.hooks import Tracing, start_tracing
from tinker_server.operations.housekeeping import Housekeeper, Periods, SteadyClock, Stores
from tinker_server.operations.recording import Recording
from tinker_server.operations.sampling import Sampling
from tinker_server.operations.table import Executors, OperationRunner
from tinker_server.operations.training import ModelOperations
from tinker_server.routes import (
    admin,
    chat,
    checkpoints,
    files,
    futures,
    health,
    metrics,
    runs,
    sampling,
    service,
    sessions,
    training,
    weights,
)
from tinker_server.settings import Settings
from tinker_server.store.audit import AuditStore
from tinker_server.store.catalog import Catalog
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage, hold
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.holdings import Holdings
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore, UnnamedLimits
from tinker_server.store.sessions import SessionStore
from tinker_server.store.steps import StepStore
from tinker_server.store.usage import UsageStore
from tinker_server.web import openapi
from tinker_server.web.deps import Services, caller
from tinker_server.web.gate import BodyLimit, Gate, Measured
from tinker_server.web.handlers import install, storable_parameters
from tinker_server.web.ledger import Ledger
from tinker_server.weights.archives import Archives
from tinker_server.weights.copying import Copying
from tinker_server.weights.saving import Saving

HOUSEKEEPING_S, DAY_S = 60.0, 24 * 3600.0
REPLAY_S = 120.0
"""Of a trainer's work, after which a model's snapshot is taken: so long it takes at most to run its log again."""
RECENT_RESULTS_BYTES = 64 << 20
"""Results kept in memory, the newest; the others are read from the database."""
SAMPLES_PER_SLOT, BODIES_IN_FLIGHT = 64, 2
"""An owner's samples in flight are bound to so many per sequence decoded at once, and so many of the largest bodies."""
MODELS_PER_OWNER = 1000
"""Models of an owner that are in memory or on disk: a sweep has hundreds, and who works on them unloads them."""
DISK_PART_PER_OWNER = 0.9
"""Part of what an owner holds on disk and what is free there, which it may hold: all but a tenth where it is alone, and
of what others leave likewise. So nobody takes the last of it, which the database and snapshots need."""
QUEUED_BODIES = 4
"""An owner's training requests that wait are bound to so many of the largest bodies; beyond it, 429."""


def create_app(
    settings: Settings,
    backend: Backend | None = None,
    clock: Callable[[], float] | None = None,
    hear: LoadingHearer = unheard,
) -> FastAPI:
    """The server; without a `backend`, the one that the settings describe is made and loaded, and `hear` is told how
    far that is.

    `clock` says how old things are, in Unix seconds; without one, the machine's does, where it is not set ahead.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving(settings, backend, clock, hear) as app.state.services:
            yield

    app = FastAPI(title="tinker-server", lifespan=lifespan, dependencies=[Depends(storable_parameters)])
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Gate, host=settings.host)
    app.add_middleware(Measured)  # the last one added is the first one asked
    install(app)
    api = APIRouter(prefix="/api/v1")
    for room in (service, sessions, training, weights, sampling, futures, runs, checkpoints, admin):
        api.include_router(room.router, dependencies=[Depends(caller)])
    for open_to_all in (health, files):
        api.include_router(open_to_all.router)
    app.include_router(api)
    app.include_router(metrics.router)
    chat.install(app)
    pages.install(app)
    openapi.install(app)
    return app


@asynccontextmanager
async def serving(
    settings: Settings,
    backend: Backend | None,
    clock: Callable[[], float] | None = None,
    hear: LoadingHearer = unheard,
) -> AsyncIterator[Services]:
    """All services, from an open database and loaded models to the end of the last child process.

    Raises StartFailed, BackendFailed.
    """
    async with AsyncExitStack() as stack:
        tracing = start_tracing(settings)
        stack.enter_context(hold(settings.data_dir))
        db = Database(settings.resolved_database_url(), synchronous=settings.synchronous)
        stack.push_async_callback(db.close)
        await stack.enter_async_context(db.sole_use())
        await db.migrate()
        backend = backend or _described_backend(settings, hear)
        stack.push_async_callback(backend.stop)
        await backend.start()
        services = build_services(settings, db, backend, tracing, clock or SteadyClock())
        stack.callback(services.archives.close)
        stack.push_async_callback(tracing.close)
        await stack.enter_async_context(working(services))
        yield services


def _described_backend(settings: Settings, hear: LoadingHearer) -> Backend:
    from backends.configure.create import create_backend  # slow to import: brings torch and vLLM

    return create_backend(settings.resolved_backend(), hear)


def build_services(
    settings: Settings, db: Database, backend: Backend, tracing: Tracing, clock: Callable[[], float]
) -> Services:
    """The services on an open database and loaded models; nothing runs yet."""
    storage = Storage(settings.data_dir, db)
    holdings = Holdings(db, storage, MODELS_PER_OWNER, DISK_PART_PER_OWNER)
    runs, checkpoints = RunStore(db), CheckpointStore(db)
    sessions, samplers = SessionStore(db), SamplerStore(db)
    futures = FutureStore(db, RECENT_RESULTS_BYTES, on_stored=tracing.stored)
    models = Models(backend.models, runs, storage, Recovery(futures, checkpoints, storage))
    limits = SnapshotLimits(settings.snapshot_every_s, settings.log_bytes, REPLAY_S)
    snapshots = Snapshots(models, runs, futures, storage, limits)
    usage, audit, steps, measured = UsageStore(db), AuditStore(db), StepStore(db), Metrics()
    keys, gallery = Keys(settings.resolved_keys_file()), Gallery(settings.samples_shown, noted=futures.changes.note)
    executors = Executors(
        ModelOperations(keys, models, runs, checkpoints, storage, usage, holdings),
        Saving(models, checkpoints, samplers, storage, usage, audit, holdings),
        Sampling(models, checkpoints, samplers, storage, usage, gallery),
        snapshots,
        Recording(steps, models, measured),
    )
    admission = Admission(
        SAMPLES_PER_SLOT * settings.backend.max_concurrent_samples,
        BODIES_IN_FLIGHT * settings.max_body_bytes,
        QUEUED_BODIES * settings.max_body_bytes,
    )
    scheduler = Scheduler(futures, OperationRunner(executors), admission, measured, tracing, settings.gap_grace_s)
    stores = Stores(sessions, runs, samplers, checkpoints, futures, usage, steps, storage)
    return Services(
        settings=settings,
        keys=keys,
        models=models,
        sessions=sessions,
        runs=runs,
        checkpoints=checkpoints,
        samplers=samplers,
        futures=futures,
        scheduler=scheduler,
        housekeeper=Housekeeper(stores, models, snapshots, scheduler, _periods(settings), clock),
        catalog=Catalog(db),
        usage=usage,
        audit=audit,
        steps=steps,
        metrics=measured,
        gallery=gallery,
        sign_ins=SignIns(settings.data_dir, keys),
        backend=backend,
        admission=admission,
        storage=storage,
        snapshots=snapshots,
        chats=Chats(models, checkpoints, storage, usage, admission, gallery),
        copying=Copying(sessions, runs, checkpoints, storage, holdings),
        archives=Archives(storage, holdings),
        links=Links(settings.data_dir),
        ledger=Ledger(settings.max_body_bytes),
    )


def _periods(settings: Settings) -> Periods:
    limits = UnnamedLimits(
        kept_s=settings.unnamed_kept_s,
        silent_s=DAY_S,
        per_model=settings.unnamed_per_model,
        bytes_per_owner=settings.unnamed_bytes_per_owner,
    )
    every_s = min(HOUSEKEEPING_S, settings.session_timeout_s / 4, settings.unnamed_kept_s / 4)
    return Periods(every_s, settings.session_timeout_s, settings.results_kept_s, settings.steps_kept_s, limits)


async def _saved(save: Callable[[], Awaitable[None]]) -> None:
    """Write what was counted, unless the database is another server's now."""
    with contextlib.suppress(Superseded):
        await save()


@asynccontextmanager
async def working(services: Services) -> AsyncIterator[None]:
    """Takes up what a former server left unfinished, keeps house meanwhile, and saves at the end what is in memory."""
    async with AsyncExitStack() as stack:
        unfinished = await services.futures.start()
        await services.runs.delete_unanswered({one.lane for one in unfinished if one.seq_id == 0})
        await services.runs.mark_all_suspended()
        await services.storage.delete_half_written()
        for save in (services.sessions.save_heartbeats, services.samplers.save_uses, services.usage.save):
            stack.push_async_callback(_saved, save)
        stack.push_async_callback(services.futures.stop)
        stack.push_async_callback(services.drain)
        await services.scheduler.resume(unfinished)
        housekeeping = asyncio.create_task(services.housekeeper.run(), name="housekeeping")
        stack.callback(housekeeping.cancel)
        bringing_back = asyncio.create_task(bring_back_lost(services.models), name="bringing back")
        stack.callback(bringing_back.cancel)
        yield
