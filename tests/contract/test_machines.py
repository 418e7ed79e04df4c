"""A trainer's ranks on several machines, all of them this one: they compute what one rank does.

pytest tests/contract/test_machines.py
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.factories import MIXED, cross_entropy, datum, make_renderer
from tests.ranks import on_machines
from tests.trainers import LORA, SMOOTH, assert_same, config, forward_backward, lora_model, perturb, relative_distance
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.model_spec import Dtype, Mesh
from tinker_server.backends.protocol import BackendFailed, EncodedBatch
from tinker_server.backends.trainer.distributed import ALONE, World
from tinker_server.backends.trainer.rank import TrainerRank

BF16_DISTANCE = 0.004
"""2**-8, a bit of bfloat16; 0.0024 was seen, as docs/cluster.md says."""


class Trained(NamedTuple):
    logprobs: list[list[np.ndarray]]
    """Of each batch, on rank 0."""
    norms: list[float]
    restored: list[float]
    """The norms of the last step as it was, and run again from a snapshot with half of its gradient."""


def batches(source: Path) -> list[EncodedBatch]:
    """Mixed, one that leaves a rank without an image, and one that leaves all but one rank without work."""
    renderer = make_renderer(source)
    data = [
        [datum(model_input, renderer, seed) for seed, model_input in enumerate(MIXED.values())],
        [datum(MIXED["text"], renderer, 1), datum(MIXED["one image"], renderer, 2)],
        [datum(MIXED["three images of different sizes"], renderer, 3)],
    ]
    return [cross_entropy(one) for one in data]


def train(world: World, source: Path, directory: Path) -> Trained:
    """Three steps, the last of which is taken twice: again after a snapshot in its middle is loaded."""
    data = batches(source)
    mesh = Mesh(shard=world.machine.size)
    rank = TrainerRank(replace(config(source, max_tokens=20), mesh=mesh), world)
    rank.create_model("m", LORA)
    found: list[list[np.ndarray]] = []
    norms = []

    def compute(batch: EncodedBatch) -> None:
        if (output := forward_backward(rank, "m", batch)) is not None:
            found.append([one["logprobs"] for one in output.loss_fn_outputs])

    def step() -> None:
        norms.append(rank.optim_step("m", SMOOTH).metrics["grad_norm"])

    for batch in data[:2]:
        compute(batch)
        step()
    compute(data[2])
    rank.snapshot("m", directory / "snapshot")
    compute(data[0])
    step()
    rank.save_state("m", directory / "state")
    if world.rank == 0:
        rank.base.snapshots.written(directory / "snapshot").result()
    rank.create_model("m", LORA, directory / "snapshot")
    compute(data[0])
    step()
    rank.save_state("m", directory / "again")
    rank.save_sampler_weights("m", directory / "sampler", for_elsewhere=False)
    return Trained(found, norms[:-1], norms[-2:])


@pytest.fixture(scope="module")
def alone(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    directory = tmp_path_factory.mktemp("alone")
    return train(ALONE, tiny_vl, directory), directory


@pytest.mark.parametrize(("num_machines", "num_ranks"), [(2, 2), (2, 4), (3, 3)])
def test_machines_compute_what_one_rank_does(
    num_machines: int, num_ranks: int, alone: tuple[Trained, Path], tiny_vl: Path, tmp_path: Path
) -> None:
    """With four ranks, each machine's two have the base between them."""
    wanted, wanted_files = alone
    found = on_machines(num_machines, num_ranks, "float32", train, tiny_vl, tmp_path)
    for batch, wanted_batch in zip(found[0].logprobs, wanted.logprobs, strict=True):
        for one, wanted_one in zip(batch, wanted_batch, strict=True):
            np.testing.assert_allclose(one, wanted_one, atol=1e-4)
    assert not any(of_rank.logprobs for of_rank in found[1:])
    for of_rank in found:
        assert of_rank.norms == found[0].norms == pytest.approx(wanted.norms, rel=1e-5)
        assert of_rank.restored == pytest.approx(2 * wanted.restored[:1], rel=1e-5)
    for name in ("state", "again"):
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            got, other = load_file(tmp_path / name / file), load_file(wanted_files / name / file)
            assert_same(got, other, rtol=1e-5)
    assert (tmp_path / "sampler").is_dir()


def summed(world: World, source: Path) -> list[Tensor]:
    """A gradient, summed as before a step."""
    rank = TrainerRank(config(source), world)
    rank.create_model("m", LORA)
    perturb(rank, "m")
    forward_backward(rank, "m", batches(source)[0])
    model = lora_model(rank, "m")
    model.sum_gradient()
    return [present for one in model.parameters if (present := one.grad) is not None]


def test_the_error_of_gradients_that_travel_in_bfloat16_is_that_of_its_rounding(tiny_vl: Path) -> None:
    sums: dict[Dtype, list[list[Tensor]]] = {
        across: on_machines(2, 2, across, summed, tiny_vl) for across in ("float32", "bfloat16")
    }
    for ours, theirs in sums.values():
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    distance = relative_distance(sums["bfloat16"][0], sums["float32"][0])
    assert 1e-4 < distance < BF16_DISTANCE, distance


def drifting(world: World, source: Path) -> bool:
    """A machine that computes one weight of a step otherwise; return whether the weights are as they were."""
    rank = TrainerRank(config(source), world)
    rank.create_model("m", LORA)
    forward_backward(rank, "m", batches(source)[1])
    model = lora_model(rank, "m")
    before, step = [one.detach().clone() for one in model.parameters], torch.optim.AdamW.step

    def inexact(optimizer: torch.optim.AdamW) -> None:
        step(optimizer)
        with torch.no_grad():
            last = optimizer.param_groups[0]["params"][-1]
            last.view(-1)[0] = torch.nextafter(last.view(-1)[0], torch.tensor(torch.inf))

    if world.rank == 1:
        torch.optim.AdamW.step = inexact  # type: ignore[assignment, method-assign]
    with pytest.raises(BackendFailed, match="have computed different weights in one step"):
        rank.optim_step("m", AdamParams(learning_rate=0.1))
    return all(torch.equal(one, other) for one, other in zip(model.parameters, before, strict=True))


def test_a_step_that_a_machine_computes_otherwise_is_not_taken(tiny_vl: Path) -> None:
    assert on_machines(2, 2, "float32", drifting, tiny_vl) == [True, True]
