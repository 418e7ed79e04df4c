"""Microbatches of several requests: what waits joins the first as far as there is room."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tinker_server.backends.trainer.model.shared_prefixes import Prefixes
from tinker_server.backends.trainer.step.batch_request import choose_microbatches


@dataclass(eq=False)
class OfRank:
    """In the place of a `LoraModel`, and of its configuration."""

    rank: int = 8

    @property
    def config(self) -> "OfRank":
        return self


@dataclass(eq=False)
class Waiting:
    """In the place of a `BatchRequest`."""

    lengths: Sequence[int]
    next_parts: list[list[int]] = field(default_factory=list)
    prefixes: Prefixes | None = None
    model: OfRank = field(default_factory=OfRank)
    exclusive: bool = False
    backward: bool = True
    asked: list[int] = field(default_factory=list)

    @property
    def left(self) -> list[int]:
        return list(range(len(self.lengths)))

    def num_tokens(self, indices: Sequence[int]) -> int:
        self.asked.append(len(indices))
        return self.prefixes.num_tokens(indices) if self.prefixes else sum(self.lengths[index] for index in indices)


def chosen(first: Waiting, *others: Waiting, max_tokens: int) -> list[list[list[int]]]:
    """By rank, the datums of each request."""
    found: Any = choose_microbatches([first, *others], max_tokens, 64)  # type: ignore[list-item]
    return [[members.get(one, []) for one in (first, *others)] for members in found]


@pytest.mark.parametrize(
    ("own", "lengths", "joined"),
    [
        ([100], [100, 100], [[0, 1]]),
        ([900], [50, 60, 10], [[0]]),  # in their order: the third waits behind the second
        ([950], [60], [[]]),
        ([0, 0], [100] * 6, [[0, 1, 2], [3, 4, 5]]),
        ([500, 0], [100] * 6, [[5], [0, 1, 2, 3, 4]]),
        ([700, 0], [100] * 6, [[], [0, 1, 2, 3, 4, 5]]),
        ([0, 0], [800, 600], [[0], [1]]),  # less than the first is no even part
        ([900, 900], [300], [[], []]),
        ([0, 0, 990], [400, 10, 400, 10], [[0, 1], [2, 3], []]),
    ],
)
def test_datums_that_wait_fill_the_emptiest_ranks_evenly(own: list[int], lengths: list[int], joined: list) -> None:
    first = Waiting(own, [[rank] for rank in range(len(own))])
    assert [parts[1] for parts in chosen(first, Waiting(lengths), max_tokens=1000)] == joined


def test_models_whose_ranks_would_sum_to_too_much_stay_apart() -> None:
    first = Waiting([10], [[0]], model=OfRank(56))
    large, small = Waiting([10], model=OfRank(16)), Waiting([10])
    assert chosen(first, large, small, max_tokens=1000) == [[[0], [], [0]]]


def test_requests_of_a_model_of_any_rank_come_together() -> None:
    """Its ranks are there once."""
    first = Waiting([10], [[0]], model=OfRank(64))
    assert chosen(first, Waiting([10], model=first.model), max_tokens=1000) == [[[0], [0]]]


def test_thousands_of_datums_that_begin_alike_are_chosen_by_few_tries() -> None:
    """One by one they took a minute, while nobody's datums were computed."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(10, 200, 50)
    data = [np.concatenate([beginning, rng.integers(10, 200, 5)]) for _ in range(4096)]
    other = Waiting([55] * 4096, prefixes=Prefixes(data))
    [[_, joined]] = chosen(Waiting([20], [[0]]), other, max_tokens=8192)
    assert joined == list(range(len(joined))) and 8100 < other.num_tokens(joined) <= 8172
    assert len(other.asked) < 40
