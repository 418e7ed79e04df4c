"""What route handlers may ask for, as named types."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tinker_server.auth.keys import Keys
from tinker_server.auth.links import Links
from tinker_server.models import Models
from tinker_server.scheduling.scheduler import Scheduler
from tinker_server.settings import Settings
from tinker_server.store.catalog import Catalog
from tinker_server.store.directories import Storage
from tinker_server.store.futures import FutureStore
from tinker_server.store.runs import CheckpointStore, RunStore
from tinker_server.store.sessions import SamplerStore, SessionStore
from tinker_server.store.usage import AuditStore, UsageStore
from tinker_server.weights.copying import Copying


@dataclass(frozen=True)
class Services:
    """Everything that lives as long as the server; built in `app.py`."""

    settings: Settings
    keys: Keys
    models: Models
    sessions: SessionStore
    runs: RunStore
    checkpoints: CheckpointStore
    samplers: SamplerStore
    futures: FutureStore
    scheduler: Scheduler
    catalog: Catalog
    usage: UsageStore
    audit: AuditStore
    storage: Storage
    copying: Copying
    links: Links

    async def drain(self) -> None:
        """Let running work end for a while, then answer all held polls."""
        await self.scheduler.drain(self.settings.drain_s)
        self.futures.release()


# Coroutines, although nothing is awaited: FastAPI would run plain functions in threads.
async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Server = Annotated[Services, Depends(_services)]


async def _settings(server: Server) -> Settings:
    return server.settings


async def _models(server: Server) -> Models:
    return server.models


async def _sessions(server: Server) -> SessionStore:
    return server.sessions


async def _runs(server: Server) -> RunStore:
    return server.runs


async def _checkpoints(server: Server) -> CheckpointStore:
    return server.checkpoints


async def _samplers(server: Server) -> SamplerStore:
    return server.samplers


async def _futures(server: Server) -> FutureStore:
    return server.futures


async def _scheduler(server: Server) -> Scheduler:
    return server.scheduler


async def _catalog(server: Server) -> Catalog:
    return server.catalog


async def _usage(server: Server) -> UsageStore:
    return server.usage


async def _audit(server: Server) -> AuditStore:
    return server.audit


async def _storage(server: Server) -> Storage:
    return server.storage


async def _links(server: Server) -> Links:
    return server.links


async def _copying(server: Server) -> Copying:
    return server.copying


async def _server_url(http: Request) -> str:
    prefix = http.headers.get("x-forwarded-prefix", "").rstrip("/")
    return f"{str(http.base_url).rstrip('/')}{prefix}/api/v1"


AppSettings = Annotated[Settings, Depends(_settings)]
ServedModels = Annotated[Models, Depends(_models)]
Sessions = Annotated[SessionStore, Depends(_sessions)]
Runs = Annotated[RunStore, Depends(_runs)]
Checkpoints = Annotated[CheckpointStore, Depends(_checkpoints)]
Samplers = Annotated[SamplerStore, Depends(_samplers)]
Futures = Annotated[FutureStore, Depends(_futures)]
Work = Annotated[Scheduler, Depends(_scheduler)]
Listed = Annotated[Catalog, Depends(_catalog)]
Used = Annotated[UsageStore, Depends(_usage)]
Audit = Annotated[AuditStore, Depends(_audit)]
Stored = Annotated[Storage, Depends(_storage)]
SignedLinks = Annotated[Links, Depends(_links)]
Copies = Annotated[Copying, Depends(_copying)]
ServerUrl = Annotated[str, Depends(_server_url)]
"""Where the client reaches `/api/v1`: as it addressed us, behind whatever prefix a proxy has taken off."""
