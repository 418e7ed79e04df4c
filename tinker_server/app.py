"""The application: builds everything in its lifespan, in the order it depends on each other."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI

from backends.protocol import Backend
from tinker_server.auth.keys import Keys
from tinker_server.auth.links import Links
from tinker_server.models import Models
from tinker_server.routes import (
    admin,
    checkpoints,
    files,
    futures,
    health,
    runs,
    sampling,
    service,
    sessions,
    training,
    weights,
)
from tinker_server.scheduling.admission import Admission
from tinker_server.scheduling.housekeeping import Reaper
from tinker_server.scheduling.model_operations import ModelOperations
from tinker_server.scheduling.operations import Executors, OperationRunner
from tinker_server.scheduling.sampling import Sampling
from tinker_server.scheduling.scheduler import Scheduler
from tinker_server.settings import Settings
from tinker_server.store.catalog import Catalog
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage, hold
from tinker_server.store.futures import FutureStore
from tinker_server.store.runs import CheckpointStore, RunStore
from tinker_server.store.sessions import SamplerStore, SessionStore
from tinker_server.store.usage import AuditStore, UsageStore
from tinker_server.web import openapi
from tinker_server.web.callers import caller
from tinker_server.web.deps import Services
from tinker_server.web.gate import Gate
from tinker_server.web.handlers import install, storable_parameters
from tinker_server.web.limits import BodyLimit
from tinker_server.weights.archives import Archives
from tinker_server.weights.copying import Copying
from tinker_server.weights.saving import Saving

log = logging.getLogger(__name__)
HOUSEKEEPING_S = 60.0
RECENT_RESULTS_BYTES = 64 << 20
"""Results kept in memory, the newest; the others are read from the database."""
SAMPLES_PER_SLOT, BODIES_IN_FLIGHT = 64, 2
"""An owner's samples in flight are bound to so many per sequence decoded at once, and so many of the largest bodies."""
QUEUED_BODIES = 4
"""An owner\'s training requests that wait are bound to so many of the largest bodies; beyond it, 429."""


def create_app(settings: Settings, backend: Backend | None = None) -> FastAPI:
    """The server; without a `backend`, the one that the settings describe is made and loaded."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving(settings, backend) as app.state.services:
            yield

    app = FastAPI(title="tinker-server", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Gate, host=settings.host)  # the last one added is the first one asked
    install(app)
    api = APIRouter(prefix="/api/v1", dependencies=[Depends(storable_parameters)])
    for room in (service, sessions, training, weights, sampling, futures, runs, checkpoints, admin):
        api.include_router(room.router, dependencies=[Depends(caller)])
    for open_to_all in (health, files):
        api.include_router(open_to_all.router)
    app.include_router(api)
    openapi.install(app)
    return app


@asynccontextmanager
async def serving(settings: Settings, backend: Backend | None) -> AsyncIterator[Services]:
    """All services, from an open database and loaded models to the end of the last child process.

    Raises StartFailed, BackendFailed.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(hold(settings.data_dir))
        db = Database(settings.resolved_database_url())
        stack.push_async_callback(db.close)
        await db.migrate()
        backend = backend or _described_backend(settings)
        stack.push_async_callback(backend.stop)
        await backend.start()
        services = build_services(settings, db, backend)
        stack.callback(services.archives.close)
        await stack.enter_async_context(working(services))
        yield services


def _described_backend(settings: Settings) -> Backend:
    from backends.create import create_backend  # slow to import: brings torch and vLLM

    return create_backend(settings.resolved_backend())


def build_services(settings: Settings, db: Database, backend: Backend) -> Services:
    """The services on an open database and loaded models; nothing runs yet."""
    storage = Storage(settings.data_dir)
    runs, checkpoints = RunStore(db), CheckpointStore(db)
    sessions, samplers = SessionStore(db), SamplerStore(db)
    models = Models(backend.models, runs, storage)
    usage, audit = UsageStore(db), AuditStore(db)
    keys = Keys(settings.resolved_keys_file())
    executors = Executors(
        ModelOperations(keys, models, runs, checkpoints, storage, usage),
        Saving(models, checkpoints, samplers, storage, usage, audit),
        Sampling(models, checkpoints, samplers, storage, usage),
    )
    futures = FutureStore(db, RECENT_RESULTS_BYTES)
    admission = Admission(
        SAMPLES_PER_SLOT * settings.backend.max_concurrent_samples,
        BODIES_IN_FLIGHT * settings.max_body_bytes,
        QUEUED_BODIES * settings.max_body_bytes,
    )
    return Services(
        settings=settings,
        keys=keys,
        models=models,
        sessions=sessions,
        runs=runs,
        checkpoints=checkpoints,
        samplers=samplers,
        futures=futures,
        scheduler=Scheduler(futures, OperationRunner(executors), admission, settings.gap_grace_s),
        catalog=Catalog(db),
        usage=usage,
        audit=audit,
        storage=storage,
        copying=Copying(sessions, runs, checkpoints, storage),
        archives=Archives(storage),
        links=Links(settings.data_dir),
    )


@asynccontextmanager
async def working(services: Services) -> AsyncIterator[None]:
    """Takes up what a former server left unfinished, keeps house meanwhile, and saves at the end what is in memory."""
    async with AsyncExitStack() as stack:
        unfinished = await services.futures.start()
        await services.runs.forget_unanswered({one.lane for one in unfinished if one.seq_id == 0})
        await services.runs.mark_all_lost()
        stack.push_async_callback(services.sessions.save_heartbeats)
        stack.push_async_callback(services.usage.save)
        stack.push_async_callback(services.futures.stop)
        stack.push_async_callback(services.drain)
        await services.scheduler.resume(unfinished)
        reaper = Reaper(
            services.sessions,
            services.runs,
            services.samplers,
            services.models,
            services.scheduler,
            services.storage,
            services.settings.session_timeout_s,
        )
        housekeeping = asyncio.create_task(keep_house(services, reaper), name="housekeeping")
        stack.callback(housekeeping.cancel)
        yield


async def keep_house(services: Services, reaper: Reaper) -> None:
    """What is done from time to time: heartbeats written, what is expired or left behind deleted."""
    while True:
        await asyncio.sleep(min(HOUSEKEEPING_S, services.settings.session_timeout_s / 4))
        try:
            now = time.time()
            await reaper.sweep(now)
            await services.usage.save()
            await services.futures.expire(now - services.settings.results_kept_s)
            for directory in await services.checkpoints.take_expired(now):
                await services.storage.delete(directory)
        except Exception:  # the server must not stop for it
            log.exception("housekeeping failed, and will be tried again")
