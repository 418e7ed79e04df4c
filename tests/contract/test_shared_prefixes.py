"""Datums that begin alike on two ranks, whose base is whole or sharded, have the numbers of a rank that computes each
datum whole.

pytest tests/contract/test_shared_prefixes.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.double_precision import in_float64
from tests.factories import VOCAB, cross_entropy, prompt, text
from tests.models import make_tiny_nemotron_h, make_tiny_qwen3_5
from tests.ranks import Stepped, check_two_are_as_one, two_steps
from tests.trainers import LORA, config, trained
from tests.tries import datums_of
from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.rank import TrainerRank


def data() -> list[Datum]:
    texts = datums_of((200, 30), (200, 31), (200, 32), (200,), (150, 40, 9), (150, 40, 8), (150, 7), (60,))
    random = np.random.default_rng(0)
    return [
        Datum(
            model_input=prompt(text(*tokens)),
            loss_fn_inputs={
                "target_tokens": random.integers(0, VOCAB, len(tokens)),
                "weights": random.normal(size=len(tokens)).astype(np.float32),
            },
        )
        for tokens in texts
    ]


def steps(world: World, source: Path, sharded: bool) -> Stepped:
    """On two ranks datums share their beginnings, alone they do not."""
    rank = trained(TrainerRank(config(source, 400, num_ranks=world.size if sharded else 1), world), {"m": LORA})
    assert rank.base.whole_below == 0
    if world.size == 1:
        rank.base.whole_below = None
    found = two_steps(rank, "m", cross_entropy(data()))
    assert (rank.base.whole_below is None) == (world.size == 1), "the check in service finds the same numbers"
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_that_share_beginnings_are_as_a_rank_that_does_not(tiny_text: Path, sharded: bool) -> None:
    check_two_are_as_one(steps, tiny_text, sharded)


def steps_where_one_is_broken(world: World, source: Path, sharded: bool) -> Stepped:
    """On two ranks the second has a wrong attention of beginnings; alone nothing is shared."""
    rank = trained(TrainerRank(config(source, 400, num_ranks=world.size if sharded else 1), world), {"m": LORA})
    if world.size == 1:
        rank.base.whole_below = None
    if world.rank == 1:  # this process has no other test
        attention.prefixes_of = lambda *_: []  # type: ignore[attr-defined,assignment]
    found = two_steps(rank, "m", cross_entropy(data()))
    assert rank.base.whole_below is None
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_if_sharing_gives_other_numbers_on_a_rank_no_rank_shares(tiny_text: Path, sharded: bool) -> None:
    check_two_are_as_one(steps_where_one_is_broken, tiny_text, sharded)


def steps_in_float64(world: World, source: Path) -> Stepped:
    """In float32 a step amplifies rounding to 5e-4 nats: gradients of decays are small sums of large numbers."""
    with in_float64():
        spec = replace(config(source, 400, num_ranks=world.size), dtype="float64")  # type: ignore[arg-type] # for tests
        rank = trained(TrainerRank(spec, world), {"m": LORA})
        assert rank.base.whole_below == 0
        if world.size == 1:
            rank.base.whole_below = None
        found = two_steps(rank, "m", cross_entropy(data()))
        assert (rank.base.whole_below is None) == (world.size == 1), "the check in service finds the same numbers"
        return found


@pytest.mark.parametrize("make", [make_tiny_qwen3_5, make_tiny_nemotron_h])
def test_two_ranks_carry_the_states_of_beginnings_as_a_rank_that_shares_none(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    check_two_are_as_one(steps_in_float64, make(tmp_path / "model"))
