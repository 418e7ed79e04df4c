"""Tokens that are drawn at prompt positions: by the distribution, and however the prompt is divided into steps."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

V = 50
NEVER = [3, 49]


def start(num_rows: int, num_draws: int, temperature: float = 0.7) -> Any:
    from vllm.sampling_params import SamplingParams

    from tinker_server.backends.sampler.engine.vllm_patches.prompt_scores import ScoredTokens, extra_args

    asked = extra_args(np.empty((num_rows, 0), np.int64), num_draws, temperature, 5, NEVER)
    return ScoredTokens.from_params(SamplingParams(extra_args=asked), num_rows, torch.device("cpu"))  # type: ignore[arg-type]


def draw(logits_PV: Tensor, num_draws: int, rows_at_once: int, temperature: float = 0.7) -> Tensor:
    """[P, D], with the logits themselves for hidden states."""
    scored = start(len(logits_PV), num_draws, temperature)
    for first in range(0, len(logits_PV), rows_at_once):
        scored.fill(first, logits_PV[first : first + rows_at_once], lambda hidden: hidden)
    assert scored.logprobs_PC.equal(logits_PV.log_softmax(-1).gather(1, scored.ids_PC))
    tokens: Tensor = scored.ids_PC
    return tokens


@pytest.mark.parametrize("num_draws", [1, 5])
def test_draws_do_not_depend_on_how_a_prompt_is_divided(num_draws: int) -> None:
    logits_PV = torch.randn(40, V, generator=torch.Generator().manual_seed(0))
    whole = draw(logits_PV, num_draws, 40)
    for rows_at_once in (1, 3):
        assert draw(logits_PV, num_draws, rows_at_once).equal(whole)
    assert draw(logits_PV[:11], num_draws, 4).equal(whole[:11]), "nor on what follows"


def test_a_prompt_that_is_computed_again_has_the_same_draws() -> None:
    """As after the engine has taken a request's memory for another."""
    logits_PV = torch.randn(40, V, generator=torch.Generator().manual_seed(0))
    scored = start(40, 5)
    scored.fill(0, logits_PV[:20], lambda hidden: hidden)
    scored.fill(0, logits_PV, lambda hidden: hidden)
    assert scored.ids_PC.equal(draw(logits_PV, 5, 40))


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float) -> None:
    logits_V = 2 * torch.randn(V, generator=torch.Generator().manual_seed(1))
    tokens = draw(logits_V.repeat(2000, 1), 100, 256, temperature)
    logits_V[NEVER] = -torch.inf
    expected = (logits_V.double() / temperature).softmax(-1) * tokens.numel()
    counts = tokens.flatten().bincount(minlength=V)
    assert (counts[NEVER] == 0).all()
    likely = expected > 5
    deviation = (counts - expected)[likely] / expected[likely].sqrt()
    assert deviation.abs().max() < 4 and deviation.square().mean() < 2
    token_PD = tokens.double()
    spread = token_PD.std().item()
    assert token_PD.mean(1).std().item() == pytest.approx(spread / 10, rel=0.1), "draws of a row are independent"
    assert token_PD.mean(0).std().item() < 2 * spread / 2000**0.5, "and those of different rows"


def test_rows_that_have_diverged_and_certain_tokens_have_draws_too() -> None:
    logits_PV = torch.full((3, V), -torch.inf)
    logits_PV[0] = torch.nan
    logits_PV[1, V - 2] = 0.0
    logits_PV[2, 0] = 0.0
    scored = start(3, 100)
    scored.fill(0, logits_PV, lambda hidden: hidden)
    assert (scored.ids_PC >= 0).all() and (scored.ids_PC < V).all()
    assert (scored.ids_PC[1] == V - 2).all() and (scored.ids_PC[2] == 0).all()
