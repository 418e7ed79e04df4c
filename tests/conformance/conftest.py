"""Fixtures of the conformance tests: a server of fakes with a record of its requests, and clients of either server."""

import gc
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import tinker

from tests.conformance.reference import LORA, Trained
from tests.conformance.wire import Wire
from tests.fake_server import Running
from tests.reference import Reference
from tests.servers import Server
from tinker_server.backends.inputs.rendering import Renderer


@pytest.fixture(scope="module")
def wire() -> Wire:
    """Records the requests that `fake` gets."""
    return Wire()


@pytest.fixture(scope="module")
def fake_database_url() -> str:
    """SQLite in the server's data directory; files about what is stored take `module_database_url` in its place."""
    return ""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, wire: Wire, fake_database_url: str) -> Iterator[Running]:
    """A server that computes next to nothing."""
    running = Running(tmp_path_factory.mktemp("fake"), database_url=fake_database_url, around=wire.around)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(fake: Running) -> Iterator[tinker.ServiceClient]:
    """A client of `fake`, in a session of its own that is open already."""
    client = tinker.ServiceClient(
        base_url=fake.url, api_key="tml-test", user_metadata={"team": "red"}, project_id="first"
    )
    with client:
        client.holder.get_session_id()
        yield client
    gc.collect()


@pytest.fixture(scope="module")
def rest(fake: Running) -> tinker.RestClient:
    # The SDK keeps closed clients by address and key for a while, and a port may be another server's again.
    return tinker.RestClient(base_url=fake.url, api_key=f"tml-{uuid4()}")


@pytest.fixture
def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    """A model of `fake`."""
    return client.create_lora_training_client("tiny", rank=8, user_metadata={"renderer_name": "plain"}).result()


@pytest.fixture
def service(server: Server) -> tinker.ServiceClient:
    """A client of the real server, in a session of its own."""
    return server.client()


@pytest.fixture(scope="session")
def reference(tiny_vl: Path, renderer: Renderer) -> Reference:
    return Reference(tiny_vl, renderer, LORA)


@pytest.fixture
def trained(server: Server, service: tinker.ServiceClient, renderer: Renderer) -> Trained:
    """A model of the real server that is not at its start any more."""
    return Trained(server, service, renderer)
