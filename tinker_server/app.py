"""The application: its lifespan builds all services in the order of their dependencies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI

from tinker_server.accounts import Records
from tinker_server.auth.key_uses import KeyUses
from tinker_server.auth.keys import Keys
from tinker_server.auth.links import Links
from tinker_server.auth.sign_ins import SignIns
from tinker_server.auth.tokens import Tokens
from tinker_server.backends.configure.torchvision_check import require_torchvision
from tinker_server.backends.processes.preloaded import begin_noted
from tinker_server.backends.protocol import Backend, Loading, OnLoading, OwnLayout, ignore_loading
from tinker_server.chat.answering import Chats
from tinker_server.dashboard import pages
from tinker_server.errors import Superseded
from tinker_server.models.admission import Admission
from tinker_server.models.base_models import BaseModels
from tinker_server.models.crash_isolation import LeftOperations
from tinker_server.models.intake import Intake
from tinker_server.models.model import ModelStores, SnapshotLimits, Snapshots
from tinker_server.models.replay import LogReplay
from tinker_server.models.scheduler import Scheduler
from tinker_server.observability.batch_records import BatchRecords
from tinker_server.observability.gallery import Gallery
from tinker_server.observability.metrics import Metrics
from tinker_server.observability.sample_files import SampleFiles
from tinker_server.observability.tracing.hooks import Tracing, start_tracing
from tinker_server.observability.weight_steps import WeightSteps
from tinker_server.operations.housekeeping import Housekeeper, Periods, SteadyClock, Stores
from tinker_server.operations.recording import Recording
from tinker_server.operations.runner import Runner
from tinker_server.operations.table import decode
from tinker_server.routes import (
    admin,
    chat,
    checkpoints,
    files,
    futures,
    health,
    metrics,
    owners,
    runs,
    sampling,
    service,
    sessions,
    training,
    weights,
)
from tinker_server.routes.machine_loads import record_loads
from tinker_server.settings import Settings
from tinker_server.store.audit import AuditStore
from tinker_server.store.catalog import Catalog
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.client_metrics import ClientMetricStore
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage, hold
from tinker_server.store.disk_account import DiskAccount
from tinker_server.store.futures.observers import Observers
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.holdings import Holdings
from tinker_server.store.machine_history import MachineHistory
from tinker_server.store.own_layout import bases_of_own_layout
from tinker_server.store.run_groups import RunTable
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore, UnnamedLimits
from tinker_server.store.sessions import SessionStore
from tinker_server.store.steps import StepStore
from tinker_server.store.uploads import UploadFolder
from tinker_server.store.usage import UsageStore
from tinker_server.web import openapi, reference_page
from tinker_server.web.body_form import BodyForm
from tinker_server.web.cors import Cors
from tinker_server.web.deps import Services, caller
from tinker_server.web.gate import BodyLimit, Gate, Measured
from tinker_server.web.handlers import install, storable_parameters
from tinker_server.web.ledger import Ledger
from tinker_server.web.prefix import Prefixed
from tinker_server.weights.archives import Archives
from tinker_server.weights.copying import Copying
from tinker_server.weights.lookup import WeightStores
from tinker_server.weights.uploads import Uploads

HOUSEKEEPING_S, DAY_S = 60.0, 24 * 3600.0
REPLAY_S, LONGEST_REPLAY_S = 5.0, 120.0
"""Seconds of a model's work after which a snapshot is taken: early, if all models' cost little, and at the latest. They
bound the time for which its log runs again after a crash."""
INTERRUPTED_S = 20.0
"""Seconds of a log replay after which a snapshot is taken too, which bounds what an interruption loses."""
RECENT_RESULTS_BYTES = 64 << 20
"""Bytes of the newest results cached in memory; the others are read from the database."""
SAMPLES_PER_SLOT, BODIES_IN_FLIGHT = 64, 2
"""Bounds on an owner's samples in flight: sequences per decoding slot, and bytes as a multiple of max_body_bytes."""
MODELS_PER_OWNER = 1000
"""Models of an owner in memory or on disk. A sweep has hundreds, and clients unload those that are done."""
DISK_PART_PER_OWNER = 0.9
"""Largest part that an owner may hold of its own bytes on disk and the free ones together. The database and snapshots
need the rest."""
QUEUED_BODIES = 4
"""Bound on the bytes of an owner's queued training requests, as a multiple of max_body_bytes; beyond it, 429."""


def create_app(
    settings: Settings,
    backend: Backend | None = None,
    clock: Callable[[], float] | None = None,
    on_loading: OnLoading = ignore_loading,
) -> FastAPI:
    """Create the server. Without a `backend`, the one in the settings is built and loaded, and `on_loading` gets its
    progress. `clock` returns Unix seconds; without one, the machine's clock is used, unless it is set ahead.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving(settings, backend, clock, on_loading) as app.state.services:
            yield

    app = FastAPI(
        title="tinker-server",
        lifespan=lifespan,
        dependencies=[Depends(storable_parameters)],
        openapi_url=None,  # FastAPI makes the answer anew for each request: openapi has ours
        docs_url=None,  # FastAPI's pages load scripts from elsewhere: reference_page has ours
        redoc_url=None,
    )
    app.add_middleware(BodyForm)
    app.add_middleware(Prefixed)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Gate, host=settings.host)
    app.add_middleware(Cors, origins=settings.cors_origins)
    app.add_middleware(Measured)  # the last one added runs first
    install(app)
    api = APIRouter(prefix="/api/v1")
    for room in (service, sessions, training, weights, sampling, futures, runs, checkpoints, admin, owners):
        api.include_router(room.router, dependencies=[Depends(caller)])
    for open_to_all in (health, files):
        api.include_router(open_to_all.router)
    app.include_router(api)
    app.include_router(metrics.router)
    app.include_router(health.for_operators)
    chat.install(app)
    pages.install(app)
    openapi.install(app)
    reference_page.install(app)
    return app


@asynccontextmanager
async def serving(
    settings: Settings,
    backend: Backend | None,
    clock: Callable[[], float] | None = None,
    on_loading: OnLoading = ignore_loading,
) -> AsyncIterator[Services]:
    """Run all services, from an open database and loaded models to the end of the last child process.

    Raises StartFailed, BackendFailed.
    """
    async with AsyncExitStack() as stack:
        tracing = start_tracing(settings)
        stack.enter_context(hold(settings.data_dir))
        db = Database(settings.resolve_database_url(), synchronous=settings.synchronous)
        stack.push_async_callback(db.close)
        with report(on_loading, "opens the database"):
            await stack.enter_async_context(db.sole_use())
            await db.migrate()
        if backend is None:
            async with db.read() as session:
                own = await bases_of_own_layout(session)
            with report(on_loading, "imports PyTorch"):
                backend = await asyncio.to_thread(_make_backend, settings, on_loading, own)
        stack.push_async_callback(backend.stop)
        await backend.start()
        services = build_services(settings, db, backend, tracing, clock or SteadyClock())
        stack.callback(services.archives.close)
        stack.callback(services.uploads.close)
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        with report(on_loading, "resumes unfinished operations"):
            await stack.enter_async_context(working(services))
        yield services


@contextlib.contextmanager
def report(on_loading: OnLoading, doing: str) -> Iterator[None]:
    """Report what the server itself does within the block."""
    on_loading("server", Loading(doing))
    try:
        yield
    finally:
        on_loading("server", None)


def _make_backend(settings: Settings, on_loading: OnLoading, own: OwnLayout) -> Backend:
    require_torchvision()
    config = settings.resolve_backend()
    begin_noted(config.scratch_dir)
    from tinker_server.backends.configure.create import LocalBackend  # takes seconds, for it imports torch

    return LocalBackend(config, on_loading, own)


def build_services(
    settings: Settings, db: Database, backend: Backend, tracing: Tracing | None, clock: Callable[[], float]
) -> Services:
    """Build the services on an open database and loaded models; nothing runs yet."""
    storage = Storage(settings.data_dir, db)
    runs, sessions, samplers = RunStore(db), SessionStore(db), SamplerStore(db)
    observers = Observers()
    futures = FutureStore(db, RECENT_RESULTS_BYTES, observers=observers)
    checkpoints = CheckpointStore(db, on_change=futures.changes.note)
    bases, replay = BaseModels(backend.models), LogReplay(futures, checkpoints, storage)
    limits = SnapshotLimits(
        settings.snapshot_every_s, settings.log_bytes, REPLAY_S, LONGEST_REPLAY_S, interrupted_s=INTERRUPTED_S
    )
    snapshots = Snapshots(limits)
    records = Records()
    audit = AuditStore(db, records, on_change=futures.changes.note)
    usage, steps, measured = UsageStore(db, bases.ranks), StepStore(db), Metrics()
    client_metrics, uploads = ClientMetricStore(db), UploadFolder(settings.data_dir)
    sample_files = SampleFiles(settings.data_dir / "samples", settings.samples_disk_bytes)
    counts = [table.held_bytes for table in (futures.rows, uploads, client_metrics, sample_files)]
    holdings = Holdings(db, storage, MODELS_PER_OWNER, DISK_PART_PER_OWNER, counts)
    disk = DiskAccount(holdings, futures, clock)
    keys, weight_steps = Keys(settings.resolve_keys_file()), WeightSteps(checkpoints, steps.last_before)
    gallery = Gallery(settings.samples_shown, on_change=futures.changes.note, step_of=weight_steps.step_of)
    weights = WeightStores(bases, checkpoints, samplers, storage, usage, holdings, keys, audit)
    admission = Admission(
        SAMPLES_PER_SLOT * settings.backend.samples_at_once,
        BODIES_IN_FLIGHT * settings.max_body_bytes,
        QUEUED_BODIES * settings.max_body_bytes,
    )
    left = LeftOperations(futures)
    runner = Runner(weights, futures, left, observers)
    observers.accepted.append(measured.accepted)
    batches = BatchRecords(gallery.put, is_wanted=gallery.per_owner > 0)
    observers.succeeded.extend([Recording(steps).on_success, measured.on_success, usage.on_success])
    observers.succeeded.extend([gallery.on_success, batches.on_success])
    observers.ended.extend([measured.ended, left.release])
    if tracing is not None:
        tracing.observe(observers)
    model_stores = ModelStores(bases, runs, futures, storage, replay, snapshots)
    intake = Intake(futures, runner.run, decode, left, admission, disk, settings.gap_grace_s)
    scheduler = Scheduler(model_stores, intake)
    key_uses = KeyUses(settings.data_dir, keys)
    swept = (sessions, runs, samplers, checkpoints, futures, usage, steps, client_metrics, storage, uploads, key_uses)
    stores = Stores(*swept, lambda: asyncio.to_thread(sample_files.save, gallery.all()), disk)
    return Services(
        settings=settings,
        keys=keys,
        key_uses=key_uses,
        models=bases,
        sessions=sessions,
        runs=runs,
        checkpoints=checkpoints,
        samplers=samplers,
        futures=futures,
        scheduler=scheduler,
        housekeeper=Housekeeper(stores, scheduler, _periods(settings), clock),
        catalog=Catalog(db),
        run_table=RunTable(db),
        usage=usage,
        audit=audit,
        steps=steps,
        client_metrics=client_metrics,
        machine_history=MachineHistory(db),
        metrics=measured,
        gallery=gallery,
        weight_steps=weight_steps,
        batches=batches,
        sample_files=sample_files,
        sign_ins=SignIns(settings.data_dir, keys),
        tokens=Tokens(settings.data_dir, keys),
        backend=backend,
        admission=admission,
        storage=storage,
        holdings=holdings,
        disk=disk,
        snapshots=snapshots,
        chats=Chats(weights, admission, gallery),
        weights=weights,
        copying=Copying(sessions, runs, checkpoints, storage, holdings),
        uploads=Uploads(uploads, sessions, runs, weights),
        archives=Archives(storage, holdings),
        links=Links(settings.data_dir),
        ledger=Ledger(settings.max_body_bytes),
        records=records,
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


async def _save(save: Callable[[], Awaitable[None]]) -> None:
    """Save values from memory, unless another server has taken the database."""
    with contextlib.suppress(Superseded):
        await save()


@asynccontextmanager
async def working(services: Services) -> AsyncIterator[None]:
    """Resume a former server's unfinished operations, run housekeeping, and at the end save the values in memory."""
    async with AsyncExitStack() as stack:
        unfinished = await services.futures.start()
        await services.runs.delete_unanswered({operation.lane for operation in unfinished if operation.seq_id == 0})
        await services.runs.mark_all_suspended()
        await services.storage.delete_half_written()
        counted = (services.sessions.save_heartbeats, services.samplers.save_uses, services.usage.save)
        for save in (*counted, services.key_uses.save, services.housekeeper.save_samples):
            stack.push_async_callback(_save, save)
        services.gallery.restore(await asyncio.to_thread(services.sample_files.load))
        stack.push_async_callback(services.futures.stop)
        stack.push_async_callback(services.batches.stop)
        stack.push_async_callback(services.drain)
        await services.scheduler.resume(unfinished)
        housekeeping = asyncio.create_task(services.housekeeper.run(), name="housekeeping")
        stack.callback(housekeeping.cancel)
        recording = asyncio.create_task(record_loads(services), name="recording the machine's load")
        stack.callback(recording.cancel)
        restoring = asyncio.create_task(services.scheduler.restore_lost(), name="restoring lost models")
        stack.callback(restoring.cancel)
        yield
