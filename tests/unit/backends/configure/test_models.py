"""A served model, as the rest of the server sees it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.specs import tiny_spec
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.configure.create import LocalModel
from tinker_server.backends.processes.launcher import Seat
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.replicas import Replica


async def nowhere(seat: Seat) -> list[Child]:
    return []


def test_its_numbers_depend_on_the_machines_that_train() -> None:
    spec = replace(tiny_spec(Path()), numerics={"device": "cpu"}, across_dtype="bfloat16")
    trainer = TrainerClient(spec)
    model = LocalModel(spec, BaseWeights(spec), trainer, SamplerPool(spec), *[Any] * 2)  # type: ignore[arg-type]
    assert model.info.numerics == {"device": "cpu", "ranks": "1"}
    trainer._replicas.used = (Replica("a", spec, nowhere, ""),)
    assert model.info.numerics == {"device": "cpu", "ranks": "2 on 2 machines, bfloat16 between them"}
    assert model.info == replace(spec, numerics=model.info.numerics)
