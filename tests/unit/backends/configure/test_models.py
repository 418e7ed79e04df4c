"""A served model, as the rest of the server sees it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.base_weights.client import BaseWeights
from backends.configure.create import LocalModel
from backends.processes.launcher import Seat
from backends.processes.rpc import Child
from backends.sampler.pool import SamplerPool
from backends.trainer.client import TrainerClient
from backends.trainer.replicas import Replica
from tests.specs import tiny_spec


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
