"""The dependencies of route handlers, as named types."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from tinker_server.accounts import Records
from tinker_server.auth.key import Key
from tinker_server.auth.key_uses import KeyUses
from tinker_server.auth.keys import Keys
from tinker_server.auth.links import Links
from tinker_server.auth.sign_ins import SignIns
from tinker_server.auth.tokens import Tokens
from tinker_server.backends.protocol import Backend
from tinker_server.chat.answering import Chats
from tinker_server.errors import AdministratorsOnly
from tinker_server.models.admission import Admission
from tinker_server.models.base_models import BaseModels
from tinker_server.models.model import Snapshots
from tinker_server.models.scheduler import Scheduler
from tinker_server.observability.batch_records import BatchRecords
from tinker_server.observability.gallery import Gallery
from tinker_server.observability.metrics import Metrics
from tinker_server.observability.sample_files import SampleFiles
from tinker_server.observability.weight_steps import WeightSteps
from tinker_server.operations.housekeeping import Housekeeper
from tinker_server.settings import Settings
from tinker_server.store.audit import AuditStore
from tinker_server.store.catalog import Catalog
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.client_metrics import ClientMetricStore
from tinker_server.store.directories import Storage
from tinker_server.store.disk_account import DiskAccount
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.holdings import Holdings
from tinker_server.store.machine_history import MachineHistory
from tinker_server.store.run_groups import RunTable
from tinker_server.store.runs import RunStore
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.sessions import SessionStore
from tinker_server.store.steps import StepStore
from tinker_server.store.usage import UsageStore
from tinker_server.web.ledger import Ledger
from tinker_server.web.prefix import prefix_of
from tinker_server.weights.archives import Archives
from tinker_server.weights.copying import Copying
from tinker_server.weights.lookup import WeightStores
from tinker_server.weights.uploads import Uploads

T = TypeVar("T")
_KEY = APIKeyHeader(
    name="X-API-Key",
    auto_error=False,
    description="Made by `tinker-server keys add NAME`. A server without keys takes whatever begins with `tml-`.",
)


@dataclass(frozen=True)
class Services:
    """The objects that live as long as the server; built in `app.py`."""

    settings: Settings
    keys: Keys
    key_uses: KeyUses
    models: BaseModels
    sessions: SessionStore
    runs: RunStore
    checkpoints: CheckpointStore
    samplers: SamplerStore
    futures: FutureStore
    scheduler: Scheduler
    housekeeper: Housekeeper
    catalog: Catalog
    run_table: RunTable
    usage: UsageStore
    audit: AuditStore
    steps: StepStore
    client_metrics: ClientMetricStore
    machine_history: MachineHistory
    metrics: Metrics
    gallery: Gallery
    weight_steps: WeightSteps
    batches: BatchRecords
    sample_files: SampleFiles
    sign_ins: SignIns
    tokens: Tokens
    backend: Backend
    admission: Admission
    storage: Storage
    holdings: Holdings
    disk: DiskAccount
    snapshots: Snapshots
    chats: Chats
    weights: WeightStores
    copying: Copying
    uploads: Uploads
    archives: Archives
    links: Links
    ledger: Ledger
    records: Records

    async def drain(self) -> None:
        """Wait a while for running work, answer all held polls, and move idle models to disk."""
        drain_s = 0 if self.storage.lease.is_lost else self.settings.drain_s  # results could not be stored
        await self.scheduler.stop(drain_s)


async def api_key(key: Annotated[str | None, Security(_KEY)]) -> str:
    """Return the key as it was sent."""
    assert key is not None, "the gate lets nobody in without a key"
    return key


ApiKey = Annotated[str, Depends(api_key)]


async def find_key(request: Request, _: ApiKey) -> Key:
    """Return the request's key, as the gate found it."""
    key: Key = request.state.key
    return key


KnownKey = Annotated[Key, Depends(find_key)]


async def caller(request: Request, _: ApiKey) -> str:
    """Return the owner of the request's key, as the gate found it."""
    owner: str = request.state.owner
    return owner


Caller = Annotated[str, Depends(caller)]


async def administrator(key: KnownKey) -> str:
    """Return the administrator's own name. Raises AdministratorsOnly for any other key."""
    if not key.is_admin:
        raise AdministratorsOnly(
            f"the API key {key.id} of {key.name} is no administrator's: `tinker-server keys add NAME --admin` makes one"
        )
    return key.name


Administrator = Annotated[str, Depends(administrator)]


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Server = Annotated[Services, Depends(_services)]
"""All services at once."""


def _part(of: Callable[[Services], T]) -> object:
    """Return a dependency on a service."""

    async def part(server: Server) -> T:  # no plain function: FastAPI would run it in a thread
        return of(server)

    return Depends(part)


async def _server_url(http: Request) -> str:
    return f"{str(http.base_url).rstrip('/')}{prefix_of(http.headers)}/api/v1"


AppSettings = Annotated[Settings, _part(lambda server: server.settings)]
ServedModels = Annotated[BaseModels, _part(lambda server: server.models)]
Sessions = Annotated[SessionStore, _part(lambda server: server.sessions)]
Runs = Annotated[RunStore, _part(lambda server: server.runs)]
Checkpoints = Annotated[CheckpointStore, _part(lambda server: server.checkpoints)]
Samplers = Annotated[SamplerStore, _part(lambda server: server.samplers)]
Futures = Annotated[FutureStore, _part(lambda server: server.futures)]
SchedulerDep = Annotated[Scheduler, _part(lambda server: server.scheduler)]
CatalogDep = Annotated[Catalog, _part(lambda server: server.catalog)]
Audit = Annotated[AuditStore, _part(lambda server: server.audit)]
StorageDep = Annotated[Storage, _part(lambda server: server.storage)]
ArchivesDep = Annotated[Archives, _part(lambda server: server.archives)]
UploadsDep = Annotated[Uploads, _part(lambda server: server.uploads)]
SignedLinks = Annotated[Links, _part(lambda server: server.links)]
ServerUrl = Annotated[str, Depends(_server_url)]
"""URL of `/api/v1` as the client addressed it, with the prefix that a proxy has removed."""
