"""Machines that cannot be used are refused by name, and those that can get as many engines as they have GPUs for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.specs import tiny_spec
from tinker_server.backends.cluster.bases import RemoteBases, gpus_of_engines
from tinker_server.backends.cluster.engines import RemoteEngines, make_engine_spec
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.model_spec import ModelSpec, Placement
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.pool import SamplerPool

GIB = 1 << 30


def offer(*gpu_gib: int, name: str = "a/b", fingerprint: str = "f" * 64) -> Offer:
    return Offer(
        name="machine",
        server="10.0.0.1:8100",
        token_file="/secret",
        data_dir="/data",
        models={name: "/models/b"},
        fingerprints={name: fingerprint},
        gpu_bytes=tuple(size * GIB for size in gpu_gib),
        environment={"OMP_NUM_THREADS": None},
    )


def served(**changes: Any) -> tuple[RemoteEngines, ModelSpec]:
    spec = replace(tiny_spec(Path("/here")), name="a/b", files_fingerprint="f" * 64, **changes)
    return RemoteEngines({"a/b": (spec, SamplerPool(spec, may_grow=True))}, RemoteBases({"a/b": spec})), spec


def test_a_model_that_is_not_the_servers_is_refused() -> None:
    engines, _ = served()
    engines.check(offer())
    with pytest.raises(BackendFailed, match="it serves no model other; it serves a/b"):
        engines.check(offer(name="other"))
    with pytest.raises(BackendFailed, match=r"in /models/b have the fingerprint e{12}, and the server's f{12}"):
        engines.check(offer(fingerprint="e" * 64))


def test_gpus_that_do_not_hold_an_engine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, _ = served(device="cuda", tensor_parallel=2, placement=Placement(engines=((0, 1),)))
    monkeypatch.setattr("tinker_server.backends.cluster.engines.smallest_gpu", lambda gpus: 80 * GIB)
    engines.check(offer(80, 80))
    with pytest.raises(BackendFailed, match="an engine of a/b needs 2 GPUs, and this machine has 1"):
        engines.check(offer(80))
    with pytest.raises(BackendFailed, match=r"a GPU of this machine has 40.0 GiB, and the server's have 80.0 GiB"):
        engines.check(offer(80, 40))


def test_models_whose_engines_do_not_fit_on_a_gpu_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_server.backends.cluster.engines.smallest_gpu", lambda gpus: 80 * GIB)
    pools = {}
    for name in ("a/b", "c", "alias"):
        placement = Placement(engines=((0,),), sampler_fraction=0.6)
        spec = replace(
            tiny_spec(Path("/here")), name=name, files_fingerprint="f" * 64, device="cuda", placement=placement
        )
        pools[name] = (spec, SamplerPool(spec, may_grow=True))
    engines, of_all = RemoteEngines(pools, RemoteBases({})), dict.fromkeys(pools, "f" * 64)
    engines.check(replace(offer(80), models={"a/b": "/models/b", "alias": "/models/b"}, fingerprints=of_all))
    with pytest.raises(BackendFailed, match=r"the engines of a/b, c need 1.20 of each GPU together"):
        both = {"a/b": "/models/b", "c": "/models/c"}
        engines.check(replace(offer(80), models=both, fingerprints={name: "f" * 64 for name in both}))


def test_a_machine_gets_as_many_engines_as_it_has_gpus_for() -> None:
    _, alone = served()
    assert gpus_of_engines(alone, offer(80, 80)) == [()]  # the server computes on the CPU
    _, single = served(device="cuda")
    assert gpus_of_engines(single, offer(80, 80, 80)) == [(0,), (1,), (2,)]
    _, pairs = served(device="cuda", tensor_parallel=2)
    assert gpus_of_engines(pairs, offer(80, 80, 80, 80, 80)) == [(0, 1), (2, 3)]


def test_an_engine_there_knows_its_machines_paths_and_numbers() -> None:
    _, spec = served(device="cuda", compiled_dir=Path("/here/compiled"))
    of_model = RemoteBases({"a/b": spec}).describe("a/b", 0, offer(80, 80))
    assert of_model.placement.engines == ((0,), (1,)) and of_model.base_dir is None
    there = make_engine_spec(of_model, offer(80, 80), (1,), 7)
    assert (there.directory, there.engine, there.placement.engines) == ("/models/b", 7, ((1,),))
    assert there.scratch_dir == Path("/data/engine-7") and there.compiled_dir == Path("/data/compiled")
    assert there.received_dir == Path("/data/received") and spec.received_dir is None


def test_an_offer_survives_the_network() -> None:
    one = offer(80, 40)
    assert Offer.from_json(json.loads(json.dumps(one.as_json()))) == one
