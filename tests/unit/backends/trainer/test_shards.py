"""Shards of tensors on three ranks, and a LoRA model that is smaller than they are many.

pytest tests/unit/backends/trainer/test_shards.py
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import on_ranks
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer import shards
from tinker_server.backends.trainer.distributed import ALONE, World
from tinker_server.backends.trainer.lora.model import Group, LoraModel, StackedAdapter
from tinker_server.backends.trainer.optimizer import MOMENTS

NUM_RANKS = 3
SHAPES = [(1,), (2, 1, 1), (3, 5), (7,), (4, 2, 9), (100,)]
"""Fewer numbers than ranks, multiples of the ranks, and what needs padding."""
ADAM = AdamParams(learning_rate=0.1, eps=1.0, weight_decay=0.3, grad_clip_norm=0.5)
Found = dict[str, list[Tensor]]


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def own(whole: Tensor, world: World) -> Tensor:
    """A rank's shard, cut here from the definition."""
    size = -(-whole.numel() // world.size)
    padded = torch.zeros(size * world.size, dtype=whole.dtype)
    padded[: whole.numel()] = whole.flatten()
    return padded[world.rank * size : (world.rank + 1) * size].clone()


def transfers(world: World, buffer_bytes: int) -> Found:
    """What each transfer gives on one rank."""
    shards._BUFFER_BYTES = buffer_bytes
    cut = [own(one, world) for one in numbers(0)]
    found: Found = {}

    of_rank: list[Tensor | None] = [*numbers(1 + world.rank)]
    if world.rank == 1:
        of_rank[2] = of_rank[5] = None
    found["sum"] = [torch.full_like(one, torch.nan) for one in cut]
    shards.reduce_scatter(of_rank, found["sum"], world)

    found["rounded"] = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for shape in SHAPES]
    shards.prepare_all_gather(cut, found["rounded"], world)()

    found["gathered"] = [
        shards.gather_to_rank_zero(one, torch.Size(shape), world) for one, shape in zip(cut, SHAPES, strict=True)
    ]
    wholes: list[Tensor | None] = [*numbers(0)] if world.rank == 0 else [None] * len(SHAPES)
    found["scattered"] = [
        shards.scatter_from_rank_zero(one, like, world) for one, like in zip(wholes, cut, strict=True)
    ]
    found["copied"] = [torch.zeros_like(one) for one in cut]
    for whole, shard in zip(numbers(0), found["copied"], strict=True):
        for begin in range(0, whole.numel(), 4):
            shards.copy_own(shard, begin, whole.flatten()[begin : begin + 4], world)
    return found


BUFFERS = [8, 100, shards._BUFFER_BYTES]
"""Bytes of buffers; the smallest have a single column."""


@pytest.fixture(scope="module")
def everything() -> list[tuple[dict[int, Found], "Steps"]]:
    """By rank, transfers by size of buffers, and steps."""
    return on_ranks(NUM_RANKS, on_rank)


@pytest.mark.parametrize("buffer_bytes", BUFFERS)
def test_transfers_cut_and_join_tensors_by_the_definition(
    everything: list[tuple[dict[int, Found], "Steps"]], buffer_bytes: int
) -> None:
    found = [of_rank[buffer_bytes] for of_rank, _ in everything]
    sums = [sum(parts[1:], parts[0]) for parts in zip(*(numbers(1 + rank) for rank in range(NUM_RANKS)), strict=True)]
    for index in (2, 5):
        sums[index] = numbers(1)[index] + numbers(3)[index]
    for rank, of_rank in enumerate(found):
        world = World(rank, NUM_RANKS, torch.device("cpu"))
        cut = [own(one, world) for one in numbers(0)]
        torch.testing.assert_close(of_rank["sum"], [own(one, world) for one in sums], rtol=1e-6, atol=1e-6)
        for name, wanted in (
            ("rounded", numbers(0, torch.bfloat16)),
            ("gathered", numbers(0) if rank == 0 else [torch.empty(0)] * len(SHAPES)),
            ("scattered", cut),
            ("copied", cut),
        ):
            for got, one in zip(of_rank[name], wanted, strict=True):
                assert got.dtype == one.dtype and torch.equal(got, one), name


def small_model(world: World, dtype: torch.dtype = torch.float32) -> LoraModel:
    """A of one number, and B of two."""
    halves = [nn.Parameter(torch.zeros(1, 1, width, dtype=dtype)) for width in (1, 2)]
    for half in halves:
        half.grad_dtype = torch.float32
    group = Group("train_mlp", ("linear",), (), (), (0,))
    model = LoraModel(Trainable(rank=1, seed=0), [StackedAdapter(group, *halves)], world, fused=False)
    model.initialise_a(lambda shape: torch.full(shape, 0.3))
    return model


Steps = tuple[list[Tensor], dict[str, Tensor], list[float]]


def on_rank(world: World) -> tuple[dict[int, Found], Steps]:
    return {size: transfers(world, size) for size in BUFFERS}, steps_of_a_small_model(world)


def steps_of_a_small_model(world: World) -> Steps:
    """Its working copy, what rank 0 would save, and the norms of five steps, of which the first and the fourth fail on
    the last rank."""
    model, norms = small_model(world, torch.bfloat16), []
    for step in range(5):
        for weight in model._weights:
            weight.grad = torch.full(weight.shape, float(world.rank + 1 + step))
        norms.append(model.sum_gradient().item())
        with pytest.MonkeyPatch.context() as patch:
            if step in (0, 3):
                if world.rank == world.size - 1:
                    patch.setattr(torch.optim.AdamW, "step", broken(torch.optim.AdamW.step))
                with pytest.raises(BackendFailed, match="out of memory"):
                    model.prepare_step(ADAM, torch.tensor(norms[-1]))
                assert bool(model.optimizer.state) == (step > 0), "no rank has moments that another lacks"
            else:
                model.prepare_step(ADAM, torch.tensor(norms[-1]))()
        model.clear_gradient()
    saved = {**model.masters(), **model.optimizer_state()}
    return [one.data for one in model._weights], saved, norms


def broken(step: Callable[[torch.optim.AdamW], object]) -> Callable[[torch.optim.AdamW], None]:
    def fail(optimizer: torch.optim.AdamW) -> None:
        step(optimizer)
        raise MemoryError

    return fail


def test_a_model_of_fewer_numbers_than_ranks_steps_as_torch_does(
    everything: list[tuple[dict[int, Found], Steps]],
) -> None:
    found = [steps for _, steps in everything]
    parameters = [nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.AdamW(
        parameters, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )
    for step in (1, 2, 4):
        summed = sum(rank + 1 + step for rank in range(NUM_RANKS))
        for one in parameters:
            one.grad = torch.full(one.shape, float(summed))
        norm = torch.nn.utils.clip_grad_norm_(parameters, ADAM.grad_clip_norm).item()
        assert [norms[step] for _, _, norms in found] == pytest.approx([norm] * NUM_RANKS)
        optimizer.step()
    name = "base_model.model.linear.lora_{}.weight"
    a, b = parameters
    for working, saved, _ in found:
        torch.testing.assert_close(working[0].flatten(), a.detach().bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(working[1].flatten(), b.detach().bfloat16(), rtol=0, atol=0)
        if saved:
            torch.testing.assert_close(saved[name.format("A")].flatten(), a.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(saved[name.format("B")].flatten(), b.detach(), rtol=1e-6, atol=0)
            for key in MOMENTS:
                moment = saved[f"{name.format('B')}:{key}"].flatten()
                torch.testing.assert_close(moment, optimizer.state[b][key], rtol=1e-6, atol=0)
            assert saved[f"{name.format('A')}:step"].item() == 3
    assert [bool(saved) for _, saved, _ in found] == [True] + [False] * (NUM_RANKS - 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_bytes_are_those_of_the_tensors_on_each_rank(num_ranks: int) -> None:
    for rank in range(num_ranks):
        world = World(rank, num_ranks, torch.device("cpu"))
        model = small_model(world, torch.float32 if num_ranks == 1 else torch.bfloat16)
        held = {one.data_ptr(): one.nbytes for one in (*model._weights, *model.parameters)}
        sizes = [-(-numbers // num_ranks) for numbers in (1, 2)]
        assert sum(held.values()) == (3 * 4 if num_ranks == 1 else 3 * 2 + sum(sizes) * 4)
        assert model.size_bytes == 3 * 4
        training_bytes = sum(held.values()) + 3 * 4 + 2 * 4 * sum(sizes)
        assert model.training_bytes == training_bytes
        assert model.missing_bytes == 3 * 4 + 2 * 4 * sum(sizes) + 2 * 4
        for one in model._weights:
            one.grad = torch.ones(one.shape)
        assert model.missing_bytes == 2 * 4 * sum(sizes) + 2 * 4
        for one in model.parameters:
            one.grad = torch.ones(one.shape)
        model.optimizer.step()
        state = [tensor for of_one in model.optimizer.state.values() for tensor in of_one.values()]
        assert sum(tensor.nbytes for tensor in state) == 2 * 4 * sum(sizes) + 2 * 4
        assert model.missing_bytes == 0 and model.training_bytes == training_bytes


def test_one_rank_has_no_second_copy() -> None:
    model = small_model(ALONE)
    assert all(one is other for one, other in zip(model.parameters, model._weights, strict=True))
    [(a_LrI, _)] = model.halves(torch.float32)
    assert a_LrI.data_ptr() == model.parameters[0].data_ptr() == next(iter(model.masters().values())).data_ptr()
