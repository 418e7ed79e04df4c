"""Ranks that share masters and moments are as one rank, in memory and in files.

pytest tests/contract/test_sharded_adapters.py
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.factories import MIXED, cross_entropy, datum, make_renderer, prompt, words
from tests.models import make_tiny_vl
from tests.ranks import on_ranks
from tests.trainers import assert_same, config, forward_backward, lora_model, perturb, relative_distance
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Mesh
from tinker_server.backends.protocol import ADAPTER_FILE, EncodedBatch
from tinker_server.backends.trainer.distributed import ALONE, World
from tinker_server.backends.trainer.model.recompute import Memory
from tinker_server.backends.trainer.rank import TrainerRank

LORAS = {"m": Trainable(rank=8, seed=1, train_vision=True, layout="service"), "n": Trainable(rank=3, seed=2)}
ADAM = AdamParams(learning_rate=0.1, eps=1.0, weight_decay=0.1, grad_clip_norm=5.0)
"""A large eps makes a step nearly the gradient itself, and rounding stays small. The norm is cut in every step."""
Kind = Literal["replicate", "shard"]


def rank_of(world: World, source: Path, kind: Kind, dtype: Literal["float32", "bfloat16"] = "float32") -> TrainerRank:
    mesh = Mesh(replicate=world.size) if kind == "replicate" else Mesh(shard=world.size)
    spec = replace(config(source, 60), mesh=mesh, dtype=dtype, trains_vision=(dtype == "float32"))
    return TrainerRank(spec, world)


def mixed(renderer: Renderer, seed: int) -> EncodedBatch:
    """Five samples with and without images: four ranks have one or two each."""
    inputs = [*MIXED.values(), prompt(words(30, 1))]
    return cross_entropy([datum(one, renderer, seed + index) for index, one in enumerate(inputs)])


def train(rank: TrainerRank, name: str, batch: EncodedBatch, adam: AdamParams = ADAM) -> float:
    """Take a step; return the norm."""
    forward_backward(rank, name, batch)
    response = rank.optim_step(name, adam)
    assert response.metrics is not None
    return response.metrics["grad_norm"]


def saved(rank: TrainerRank, name: str) -> dict[str, Tensor]:
    """Masters and moments, on rank 0."""
    model = lora_model(rank, name)
    return {key: one.detach().clone() for key, one in {**model.masters(), **model.optimizer_state()}.items()}


@dataclass(frozen=True)
class Run:
    """What one rank found."""

    norms: list[float]
    logprobs: list[np.ndarray]
    states: dict[str, dict[str, Tensor]]
    """Masters and moments of each model, on rank 0."""
    working: dict[str, dict[str, Tensor]]
    """What microbatches load."""
    bytes_of: dict[str, tuple[int, int, int]]
    """For each model what it said to miss at first, and what its gradient and moments then took."""
    held_bytes: int
    """Bytes of all models' weights and moments."""


def trained(world: World, source: Path, kind: Kind, written: Path, own: Path) -> Run:
    """Three steps of two models; one of them goes on from files of one rank (`written`) and leaves its own."""
    rank, renderer = rank_of(world, source, kind), make_renderer(source)
    norms, logprobs, bytes_of = [], [], {}
    for name, lora in LORAS.items():
        rank.create_model(name, lora)
        perturb(rank, name)
        missing = lora_model(rank, name).missing_bytes
        for step in range(3):
            output = forward_backward(rank, name, mixed(renderer, 10 * step))
            if output is not None:
                logprobs += [one["logprobs"] for one in output.loss_fn_outputs]
            gradient_bytes = sum(one.grad.nbytes for one in lora_model(rank, name)._weights if one.grad is not None)
            if step == 1:  # ranks go on with their gradients after it
                snapshot(rank, name, own / f"{name} in passing")
            response = rank.optim_step(name, ADAM)
            assert response.metrics is not None
            norms.append(response.metrics["grad_norm"])
        bytes_of[name] = (missing, gradient_bytes, moments_bytes(rank, name))
    states = {name: saved(rank, name) for name in LORAS}
    working = {name: dict(lora_model(rank, name).tensors) for name in LORAS}
    held = {one.data_ptr(): one.nbytes for name in LORAS for one in weights_of(rank, name)}
    held_bytes = sum(held.values()) + sum(moments_bytes(rank, name) for name in LORAS)
    if written != own:
        go_on_from(rank, renderer, written, own)
    return Run(norms, logprobs, states, working, bytes_of, held_bytes)


def weights_of(rank: TrainerRank, name: str) -> list[Tensor]:
    model = lora_model(rank, name)
    return [one.data for one in (*model._weights, *model.parameters)]


def moments_bytes(rank: TrainerRank, name: str) -> int:
    states = lora_model(rank, name).optimizer.state.values()
    return sum(tensor.nbytes for state in states for tensor in state.values())


def write_all(rank: TrainerRank, name: str, directory: Path) -> None:
    """Every kind of file. The gradient of one microbatch is in the snapshot."""
    rank.save_state(name, directory / "state")
    rank.save_sampler_weights(name, directory / "engine", for_elsewhere=False)
    rank.save_sampler_weights(name, directory / "elsewhere", for_elsewhere=True)
    snapshot(rank, name, directory / "snapshot")


def snapshot(rank: TrainerRank, name: str, directory: Path) -> None:
    """Write a snapshot to the end."""
    rank.snapshot(name, directory)
    if rank._world.rank == 0:
        rank.base.snapshots.written(directory).result(60)
    if rank._world.size > 1:
        torch.distributed.barrier()


def go_on_from(rank: TrainerRank, renderer: Renderer, written: Path, own: Path) -> None:
    """Write what one rank wrote again, then a step from its state and one from its snapshot."""
    rank.create_model("copied", LORAS["m"], written / "snapshot")
    write_all(rank, "copied", own / "again")
    rank.optim_step("copied", ADAM)
    rank.save_state("copied", own / "stepped from the snapshot")
    rank.create_model("loaded", LORAS["m"].model_copy(update={"seed": 9}))
    rank.load_state("loaded", written / "state", True)
    train(rank, "loaded", mixed(renderer, 70))
    rank.save_state("loaded", own / "stepped from the state")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts, a head and a tower, all of which models train."""
    return make_tiny_vl(tmp_path_factory.mktemp("experts") / "model", moe=True)


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one rank, and its uninterrupted next step."""
    directory = tmp_path_factory.mktemp("written")
    rank, renderer = rank_of(ALONE, source, "shard"), make_renderer(source)
    rank.create_model("m", LORAS["m"])
    perturb(rank, "m")
    for step in range(2):
        train(rank, "m", mixed(renderer, 50 + step))
    forward_backward(rank, "m", mixed(renderer, 70))
    write_all(rank, "m", directory)
    rank.optim_step("m", ADAM)
    rank.save_state("m", directory / "stepped")
    return directory


@pytest.fixture(scope="module")
def alone(source: Path, written: Path) -> Run:
    return trained(ALONE, source, "shard", written, written)


@dataclass(frozen=True)
class Several:
    """A world, its ranks' runs and files."""

    runs: list[Run]
    own: Path


@pytest.fixture(
    scope="module",
    params=[
        (2, "replicate"),
        pytest.param((2, "shard"), marks=pytest.mark.slow),
        pytest.param((4, "shard"), marks=pytest.mark.slow),
    ],
    ids=lambda world: f"{world[0]} ranks, {world[1]}",
)
def several(
    request: pytest.FixtureRequest, source: Path, written: Path, tmp_path_factory: pytest.TempPathFactory
) -> Several:
    num_ranks, kind = request.param
    own = tmp_path_factory.mktemp("own")
    return Several(on_ranks(num_ranks, trained, source, kind, written, own), own)


def test_several_ranks_train_as_one(alone: Run, several: Several) -> None:
    first = several.runs[0]
    assert first.norms == pytest.approx(alone.norms, rel=1e-5)
    assert min(first.norms) > ADAM.grad_clip_norm
    for got, wanted in zip(first.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    for name in LORAS:
        kinds = {part: any(part in key for key in alone.states[name]) for part in ("experts", "lm_head", "visual")}
        assert kinds == {"experts": True, "lm_head": True, "visual": name == "m"}
        assert_same(first.states[name], alone.states[name])


def test_all_ranks_compute_with_the_masters(several: Several) -> None:
    for name in LORAS:
        for run in several.runs:
            assert run.norms == several.runs[0].norms
            for key, tensor in run.working[name].items():
                assert torch.equal(tensor, several.runs[0].states[name][key]), key


def test_a_rank_has_its_part_of_masters_and_moments_and_misses_what_it_says(alone: Run, several: Several) -> None:
    num_ranks = len(several.runs)
    weight_bytes = sum(one.nbytes for state in alone.working.values() for one in state.values())
    num_tensors = len([one for name in LORAS for one in alone.states[name] if one.endswith(":step")])
    assert weight_bytes * 3 < alone.held_bytes < weight_bytes * 3 + 4 * num_tensors
    for run in several.runs:
        padding = 3 * 4 * num_ranks * num_tensors
        shared = 3 * weight_bytes / num_ranks
        assert weight_bytes + shared < run.held_bytes < weight_bytes + shared + padding
    for run in (alone, *several.runs):
        for name, (missing, gradient_bytes, in_moments) in run.bytes_of.items():
            whole = sum(one.nbytes for one in alone.working[name].values())
            assert missing == whole + in_moments
            assert gradient_bytes in {whole, 0}  # one of four ranks has no datum of the last batch
    for run in (alone, several.runs[0]):
        assert all(gradient_bytes for _, gradient_bytes, _ in run.bytes_of.values())


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(one.relative_to(directory)): one.read_bytes() for one in sorted(directory.rglob("*")) if one.is_file()}


def test_files_of_equal_state_are_equal_to_the_byte(written: Path, several: Several) -> None:
    for kind in ("state", "engine", "elsewhere", "snapshot"):
        wanted, got = files_of(written / kind), files_of(several.own / "again" / kind)
        assert got.keys() == wanted.keys() and len(wanted) >= 2
        for name, content in wanted.items():
            if kind in {"engine", "elsewhere"} and name == ADAPTER_FILE:  # the scores of the load check are in it too
                assert_same(load_file(several.own / "again" / kind / name), load_file(written / kind / name), rtol=0)
            else:
                assert got[name] == content, (kind, name)


def test_training_goes_on_from_files_as_if_never_interrupted(written: Path, several: Several, source: Path) -> None:
    for name in ("stepped from the state", "stepped from the snapshot"):
        for file in (ADAPTER_FILE, "optimizer.safetensors"):
            assert_same(load_file(several.own / name / file), load_file(written / "stepped" / file))


def test_one_rank_reads_what_several_wrote(several: Several, source: Path, tmp_path: Path) -> None:
    rank = rank_of(ALONE, source, "shard")
    rank.create_model("m", LORAS["m"], several.own / "again" / "snapshot")
    write_all(rank, "m", tmp_path)
    for kind in ("state", "snapshot"):
        assert files_of(tmp_path / kind) == files_of(several.own / "again" / kind)
    rank.load_state("m", several.own / "stepped from the state", True)
    rank.save_state("m", tmp_path / "stepped")
    assert files_of(tmp_path / "stepped") == files_of(several.own / "stepped from the state")


def test_memory_is_reserved_for_models_in_training_alone(source: Path) -> None:
    rank, batch = rank_of(ALONE, source, "shard"), mixed(make_renderer(source), 0)
    for name, lora in LORAS.items():
        rank.create_model(name, lora)
    models = {name: lora_model(rank, name) for name in LORAS}
    fresh = {name: one.missing_bytes for name, one in models.items()}

    def reserved(name: str) -> int:
        memory = SimpleNamespace(models_bytes=0, graphs_bytes=0, fitting_tokens=lambda freed_bytes: 1)
        rank.base.memory = cast(Memory, memory)
        rank._reserve_and_count(models[name])
        rank.base.memory = None
        return int(memory.models_bytes)

    forward_backward(rank, "n", batch, False)
    assert reserved("m") == fresh["m"] > 0
    forward_backward(rank, "m", batch)
    assert reserved("n") == fresh["n"] + fresh["m"] - models["m"].size_bytes
    rank.optim_step("m", ADAM)
    assert reserved("n") == fresh["n"]
    assert reserved("m") == models["m"].size_bytes


def in_bfloat16(world: World, source: Path, directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Masters and working copy after steps that bfloat16 cannot hold."""
    rank, renderer = rank_of(world, source, "replicate", "bfloat16"), make_renderer(source)
    batch = cross_entropy([datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 23)])
    rank.create_model("m", LORAS["n"])
    perturb(rank, "m")
    before = {name: one.clone() for name, one in lora_model(rank, "m").masters().items()}
    for _ in range(3):
        train(rank, "m", batch, AdamParams(learning_rate=1e-6, eps=1e-8))
    model = lora_model(rank, "m")
    masters = {name: one.clone() for name, one in model.masters().items()}
    rank.save_sampler_weights("m", directory / "elsewhere", for_elsewhere=True)
    rank.save_sampler_weights("m", directory / "engine", for_elsewhere=False)
    moved = sum((masters[name] - one).abs().sum().item() for name, one in before.items())
    return masters, dict(model.tensors), moved


def test_steps_too_small_for_the_working_copy_are_not_lost(source: Path, tmp_path: Path) -> None:
    alone_masters, _, alone_moved = in_bfloat16(ALONE, source, tmp_path / "alone")
    found = on_ranks(2, in_bfloat16, source, tmp_path / "two")
    masters, _, moved = found[0]
    assert moved == pytest.approx(alone_moved, rel=0.05) and moved > 0
    assert relative_distance(masters.values(), alone_masters.values()) < 1e-5
    for _, working, _ in found:
        for name, one in working.items():
            assert one.dtype == torch.bfloat16 and torch.equal(one, masters[name].bfloat16()), name
    elsewhere = load_file(tmp_path / "two" / "elsewhere" / ADAPTER_FILE)
    assert_same(elsewhere, masters, rtol=0)
    engine = load_file(tmp_path / "two" / "engine" / ADAPTER_FILE)
    assert engine and all(one.dtype == torch.bfloat16 for one in engine.values())
