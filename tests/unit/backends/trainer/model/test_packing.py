"""Microbatches: the plan of datums, and packing."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.factories import image, prompt, words
from tinker_server.backends.families.text import Text
from tinker_server.backends.inputs.rendering import Rendered, Renderer
from tinker_server.backends.trainer.model.packing import pack, plan_steps

CPU = torch.device("cpu")


def test_every_datum_is_planned_once_and_microbatches_keep_the_budget():
    lengths = [5, 90, 30, 30, 40, 7, 100, 200, 1]
    for world_size in (1, 2, 3):
        plan = plan_steps(lengths, world_size, 100)
        rows = list(itertools.chain.from_iterable(plan))
        assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= 100 or len(row) == 1 for row in rows)


def test_all_ranks_run_equally_many_steps():
    plan = plan_steps([10] * 7, 4, 10)
    assert [len(rows) for rows in plan] == [4, 4]
    assert sum(not row for rows in plan for row in rows) == 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_microbatches_are_as_even_as_possible_in_no_more_steps_than_full_ones_take(world_size: int) -> None:
    assert [[len(row) for row in rows] for rows in plan_steps([240] * 32, 2, 16384)] == [[16, 16]]
    random = np.random.default_rng(0)
    for _ in range(20):
        lengths = random.integers(50, 900, 90).tolist()
        plan = plan_steps(lengths, world_size, 4096)
        assert len(plan) == math.ceil(math.ceil(sum(lengths) / 4096) / world_size)
        sizes = [sum(lengths[index] for index in row) for rows in plan for row in rows]
        assert max(sizes) <= 1.03 * sum(sizes) / len(sizes) and max(sizes) <= 4096


def test_a_datum_longer_than_the_budget_runs_alone():
    assert plan_steps([500, 10, 10], 1, 100) == [[[0]], [[1, 2]]]


def test_a_packed_microbatch_holds_whole_samples_one_after_the_other(renderer: Renderer) -> None:
    first = renderer.render(prompt(words(3, 1), image(64, 64, 1), words(2, 2)), "datum")
    second = renderer.render(prompt(words(4, 3)), "datum")
    lengths = [len(first.token_ids_T), 4]
    batch = pack([(first, np.arange(lengths[0])), (second, np.arange(8).reshape(4, 2))], renderer.family, CPU)

    assert batch.max_seqlen == lengths[0]
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens.tolist() == [0, lengths[0], lengths[0] + 4]
    assert batch.model_inputs["input_ids"].tolist() == [[*first.token_ids_T, *second.token_ids_T]]
    assert batch.images == first.images
    wanted = [
        renderer.family.position_ids(length, one.spans) for length, one in zip(lengths, (first, second), strict=True)
    ]
    np.testing.assert_array_equal(batch.model_inputs["position_ids"], np.concatenate(wanted, -1))
    assert batch.model_inputs["position_ids"][..., -4:].tolist() == [[[0, 1, 2, 3]]] * 4, "positions begin again"


def test_targets_are_as_wide_as_the_widest_samples(renderer: Renderer) -> None:
    one, other = (renderer.render(prompt(words(count)), "datum") for count in (2, 3))
    batch = pack([(one, np.array([7, 8])), (other, np.array([[1, 2], [3, 4], [5, 6]]))], renderer.family, CPU)
    assert batch.targets_TK.tolist() == [[7, 0], [8, 0], [1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("lengths", [[], [1], [1, 1]])
def test_a_microbatch_without_a_sample_of_two_tokens_gets_one_of_padding(
    renderer: Renderer, lengths: list[int]
) -> None:
    samples = [(Rendered(np.ones(length, np.int64), [], []), np.ones(length, np.int64)) for length in lengths]
    batch = pack(samples, renderer.family, CPU)
    assert batch.max_seqlen == 2
    assert batch.cu_seqlens.tolist() == [*range(len(lengths) + 1), len(lengths) + 2]
    assert batch.model_inputs["input_ids"].tolist() == [[1] * len(lengths) + [0, 0]]
    assert batch.targets_TK.ravel().tolist() == [1] * len(lengths) + [0, 0] and batch.images == []


def test_samples_have_one_kind_of_positions_if_the_model_takes_no_images() -> None:
    texts = [(Rendered(np.arange(length), [], []), np.arange(length)) for length in (2, 3)]
    assert pack(texts, Text(), CPU).model_inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
