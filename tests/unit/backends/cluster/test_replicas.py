"""Machines that cannot hold a trainer's ranks beside their engines, on GPUs of the same numbers as here."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.specs import tiny_spec
from tinker_server.backends.cluster.bases import RemoteBases
from tinker_server.backends.cluster.engines import RemoteEngines
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.cluster.replicas import RemoteReplicas
from tinker_server.backends.model_spec import Mesh, ModelSpec, Placement
from tinker_server.backends.trainer.client import TrainerClient

GIB = 1 << 30
BESIDE = Placement((0, 1), 0.5, 0.4, engines=((0,), (1,)))
"""Engines on the ranks' GPUs."""
APART = Placement((0, 1), 0.9, 0.9, engines=((2,), (3,)))


def offer(*gpu_gib: int, models: tuple[str, ...] = ("a/b",)) -> Offer:
    names = dict.fromkeys(models, "/models/b")
    sizes = tuple(size * GIB for size in gpu_gib)
    return Offer("machine", "10.0.0.1:8100", "/secret", "/data", names, names, sizes, {})


def obstacle(placement: Placement, given: Offer, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> str | None:
    spec: ModelSpec = replace(tiny_spec(Path("/here")), device=device, placement=placement, mesh=Mesh(shard=2))  # type: ignore[arg-type]
    monkeypatch.setattr("tinker_server.backends.cluster.replicas.smallest_gpu", lambda gpus: 80 * GIB)
    trainers, bases = {name: (spec, TrainerClient(spec)) for name in ("a/b", "c")}, RemoteBases({})
    return RemoteReplicas("10.0.0.1", trainers, bases, RemoteEngines({}, bases)).obstacle(spec, given)


def test_a_machine_holds_the_ranks_if_it_has_their_gpus_and_room_beside_its_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert obstacle(Placement(), offer(), monkeypatch, "cpu") is None
    assert obstacle(BESIDE, offer(80, 80), monkeypatch) is None
    assert obstacle(BESIDE, offer(80), monkeypatch) == "the ranks need GPU 1, and the machine has 1 GPUs"
    found = obstacle(BESIDE, offer(80, 40), monkeypatch)
    assert found == "one of its GPUs has 40.0 GiB, and the server's have 80.0 GiB"
    assert "would take 1.80 of its GPU 0" in (obstacle(APART, offer(80, 80, 80, 80), monkeypatch) or "")
    assert "would take 1.80 of its GPU 0" in (obstacle(BESIDE, offer(80, 80, models=("a/b", "c")), monkeypatch) or "")
