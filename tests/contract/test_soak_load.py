"""The tenants of benchmarks/soak.py, on a server of fakes: it takes what they send, and keeps nothing of it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak_load import Tenants
from tests.fake_server import Running
from tests.fakes import FakeBackend, FakeBaseModel
from tests.servers import MODEL
from tinker_server.auth import keys

OWNERS = ("alice", "bob", "carol", "dan")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Running, list[str]]]:
    """A server whose base model has the name that the tenants ask for, and its owners' keys."""
    made = [keys.add(tmp_path / "keys", name) for name in OWNERS]
    backend = FakeBackend()
    backend.tiny = FakeBaseModel(MODEL)
    backend.models = {MODEL: backend.tiny}
    server = Running(tmp_path / "data", backend=backend, keys_file=tmp_path / "keys")
    yield server, made
    server.stop()


def test_every_tenant_does_its_turns_and_leaves_no_checkpoint(running: tuple[Running, list[str]]) -> None:
    server, owners_keys = running
    with Tenants(server.url, owners_keys) as tenants:
        while (
            tenants.may_go_on() and min(tenants.num_turns[name] for name in tenants.num_turns if name != "sleeper") < 2
        ):
            time.sleep(0.05)
    tenants.raise_errors()
    assert tenants.num_operations > 40
    assert server.backend.tiny.sampler.chats, "the chatter's pictures reach the sampler"
    for key in owners_keys:
        listed = server.http.get("/checkpoints", headers={"x-api-key": key}).json()["checkpoints"]
        assert listed == []


def test_a_tenant_that_meets_an_error_ends_all_of_them(running: tuple[Running, list[str]]) -> None:
    server, owners_keys = running
    with Tenants(server.url, [*owners_keys[:3], "tml-unknown"]) as tenants:
        while tenants.may_go_on():
            time.sleep(0.05)
    with pytest.raises(Exception, match=r"401|/login"):
        tenants.raise_errors()
