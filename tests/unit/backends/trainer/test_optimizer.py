"""A fused step that bounds show to be possible is taken without a trial; any other is tried."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer import optimizer
from tinker_server.backends.trainer.optimizer import prepare_step

SIZES = [(3, 5), (0,), (7,)]


def make(*, fused: bool = True, scale: float = 1.0, steps: int = 2) -> torch.optim.AdamW:
    """Return an optimizer after some steps, with a gradient."""
    random = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, generator=random)) for size in SIZES]
    adam = torch.optim.AdamW(weights, fused=fused)
    for number in range(steps + 1):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random) * scale
        if number < steps:
            adam.step()
    return adam


def trials(adam: torch.optim.AdamW, params: AdamParams, monkeypatch: pytest.MonkeyPatch, **given: bool) -> int:
    """Prepare a step, and return how many trials it took, one of which may have refused it."""
    whole, count = optimizer._try_step, 0

    def counted(*of: Any) -> list[torch.Tensor] | None:
        nonlocal count
        count += 1
        return whole(*of)

    monkeypatch.setattr(optimizer, "_try_step", counted)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in adam.param_groups[0]["params"]])
    with suppress(InvalidInput):
        prepare_step(adam, params, norm, sums_bits=given.get("sums_bits", False))
    return count


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("params", [AdamParams(), AdamParams(learning_rate=1e3, eps=1e-30, weight_decay=1.0)])
def test_a_step_whose_bounds_are_finite_needs_no_trial(
    params: AdamParams, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = make(steps=steps)
    assert trials(adam, params, monkeypatch) == 0
    adam.step()
    assert all(weight.isfinite().all() for weight in adam.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("params", "scale", "changes"),
    [
        (AdamParams(learning_rate=1e38), 1.0, {}),
        (AdamParams(learning_rate=1.0, weight_decay=1e38), 1.0, {}),
        (AdamParams(learning_rate=1e5, eps=1e-30), 1e5, {}),
        (AdamParams(), 1e18, {}),
        (AdamParams(beta1=0.99999), 1.0, {}),
        (AdamParams(beta2=0.99999), 1.0, {}),
        (AdamParams(), 1.0, {"weight": 1e38}),
        (AdamParams(), 1.0, {"exp_avg": 1e30}),
        (AdamParams(), 1.0, {"exp_avg_sq": 1e38}),
    ],
)
def test_a_step_that_may_leave_the_bounds_is_tried(
    params: AdamParams, scale: float, changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = make()
    first = adam.param_groups[0]["params"][0]
    for weight in adam.param_groups[0]["params"]:
        weight.grad *= scale
    for name, value in changes.items():
        (first.data if name == "weight" else adam.state[first][name])[0, 0] = value
    assert trials(adam, params, monkeypatch) == 1


@pytest.mark.parametrize(("kind", "value"), [("exp_avg_sq", -1.0), ("exp_avg_sq", torch.nan), ("exp_avg", torch.nan)])
def test_moments_of_which_no_step_can_be_taken_are_found_by_the_trial(kind: str, value: float) -> None:
    adam = make()
    adam.state[adam.param_groups[0]["params"][2]][kind][3] = value
    with pytest.raises(InvalidInput, match="not finite"):
        prepare_step(adam, AdamParams(), torch.ones(()), sums_bits=False)


def test_steps_that_are_not_fused_or_whose_bits_are_compared_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials(make(fused=False), AdamParams(), monkeypatch) == 1
    assert trials(make(), AdamParams(), monkeypatch, sums_bits=True) == 1
