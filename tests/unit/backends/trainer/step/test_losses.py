"""The losses against a reference vector that was computed from their formulas."""

import math
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from tests.factories import present
from tests.loss_formulas import loss_of
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardInput
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.model.packing import loss_inputs
from tinker_server.backends.trainer.step.losses import LOSSES, gspo
from tinker_server.backends.trainer.step.validation import loss_config

LOGPROBS, OLD, ADVANTAGES, WEIGHTS = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [1.0, -1.0, 2.0], [1.0, 0.0, -0.5]


def evaluate(loss_fn: str, config: dict | None = None, **inputs: list[float]) -> tuple[float, list[float]]:
    """The loss and its gradient by the log probabilities, for one datum of three positions."""
    datum = Datum(
        model_input=ModelInput(chunks=[EncodedTextChunk(tokens=np.array([1, 2, 3]))]),
        loss_fn_inputs={"target_tokens": np.array([1, 2, 3])}
        | {name: np.array(values, dtype=np.float32) for name, values in inputs.items()},
    )
    loss = LOSSES[loss_fn]
    settings = loss_config(loss, ForwardBackwardInput(data=[datum], loss_fn=loss_fn, loss_fn_config=config))
    logprobs = torch.tensor(LOGPROBS)[:, None].requires_grad_()
    value = loss.by_position(loss_inputs(loss, settings, [datum], logprobs.device)(logprobs)).sum()
    value.backward()
    return value.item(), present(logprobs.grad)[:, 0].tolist()


RL = {"logprobs": OLD, "advantages": ADVANTAGES}


@pytest.mark.parametrize(
    ("loss_fn", "config", "inputs", "value", "gradient"),
    [
        ("cross_entropy", None, {"weights": WEIGHTS}, 0.75, [-1, 0, 0.5]),
        ("cross_entropy", None, {}, 3.5, [-1, -1, -1]),
        ("importance_sampling", None, RL, -3.280842, [-1.648721, 0.367879, -2]),
        ("ppo", None, RL, -2.4, [0, 0, -2]),
        ("cispo", None, RL, 1.912962, [-1.648721, 0.367879, -2]),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": "1.2"}, RL, 0.6, [-1.2, 0.8, -2]),
        ("dro", {"beta": 0.05}, RL, 0.03125, [-0.975, 0.95, -2]),
        (
            "gspo",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            {**RL, "sequence_ratio_mask": [1, 1, 0]},
            -1.536402,
            [-0.778801, 0, -1.557602],
        ),
        ("ppo", None, {**RL, "clip_high_threshold": [2, 2, 2]}, -2.848721, [-1.648721, 0, -2]),
    ],
)
def test_a_loss_and_its_gradient_are_the_protocols(loss_fn, config, inputs, value, gradient):
    got_value, got_gradient = evaluate(loss_fn, config, **inputs)
    assert got_value == pytest.approx(value, abs=2e-6)
    assert got_gradient == pytest.approx(gradient, abs=2e-6)


def test_the_sequence_ratio_of_gspo_is_of_each_datum_alone():
    alone = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.3, -0.1, -4.0])]
    old = [torch.tensor([-1.2, -1.8]), torch.tensor([-0.5, -0.2, -3.0])]
    bounds = {"low_T": torch.tensor(0.0), "high_T": torch.tensor(9.0)}

    def value(logprobs, old_logprobs, datum, count):
        ones = torch.ones_like(logprobs)
        return gspo(logprobs, old_logprobs, ones, ones, **bounds, datum_T=datum, num_datums=count).sum()

    zeros = [torch.zeros(len(one), dtype=torch.long) for one in alone]
    separate = sum(value(one, before, zero, 1) for one, before, zero in zip(alone, old, zeros, strict=True))
    together = value(torch.cat(alone), torch.cat(old), torch.tensor([0, 0, 1, 1, 1]), 2)
    torch.testing.assert_close(together, separate)


def of_sequences(log_ratios: list[list[float]], advantages: list[list[float]], masks: list[list[float]]) -> float:
    """-sum over sequences of sum_i min(s A_i, clip(s) A_i), s the geometric mean of the ratios inside the mask; a sum
    over the sequences that have one."""
    total = 0.0
    for own, of_tokens, mask in zip(log_ratios, advantages, masks, strict=True):
        inside = [one for one, is_inside in zip(own, mask, strict=True) if is_inside]
        if inside:
            ratio = math.prod(math.exp(one) for one in inside) ** (1 / len(inside))
            total -= sum(min(ratio * one, min(max(ratio, 0.8), 1.2) * one) for one in of_tokens)
    return total


@pytest.mark.parametrize("masks", [[[1, 0], [0, 0, 0]], [[0, 0], [0, 0, 0]], [[0, 0], [0, 1, 1]], [[1, 1], [1, 1, 1]]])
def test_a_sequence_outside_of_its_mask_contributes_nothing_to_gspo(masks: list[list[float]]) -> None:
    """Without a position to take the mean over, a sequence has no ratio, whatever its advantages are."""
    log_ratios, advantages = [[0.1, -0.4], [0.3, -0.05, 0.2]], [[1.0, -2.0], [20.0, -30.0, 3.0]]
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1]).requires_grad_()
    old = logprobs.detach() - torch.tensor([*chain(*log_ratios)])
    value = gspo(
        logprobs,
        old,
        torch.tensor([*chain(*advantages)]),
        torch.tensor([*chain(*masks)], dtype=torch.float32),
        torch.tensor(0.8),
        torch.tensor(1.2),
        datum_T=torch.tensor([0, 0, 1, 1, 1]),
        num_datums=2,
    ).sum()
    value.backward()
    assert value.item() == pytest.approx(of_sequences(log_ratios, advantages, masks), rel=1e-5)
    of_each = present(logprobs.grad).split([2, 3])
    assert [bool(one.any()) for one in of_each] == [any(mask) for mask in masks]


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
@pytest.mark.parametrize("old", [[-1.5, -1.0, -0.5], [-9.0, -0.1, -31.0], [-61.0, -75.0, -80.0]])
def test_ratios_up_to_e_to_the_80_have_the_plain_formulas_gradient(loss_fn: str, old: list[float]) -> None:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64).requires_grad_()
    mask = {"sequence_ratio_mask": [1.0, 1.0, 1.0]} if loss_fn == "gspo" else {}
    inputs: dict[str, Any] = {"logprobs": old, "advantages": ADVANTAGES, **mask}
    value = loss_of(loss_fn, logprobs, {name: np.array(values) for name, values in inputs.items()}, {})
    value.backward()
    got_value, got_gradient = evaluate(loss_fn, **inputs)
    assert logprobs.grad is not None
    assert got_value == pytest.approx(value.item(), rel=2e-5)
    assert got_gradient == pytest.approx(logprobs.grad.tolist(), rel=2e-5)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_the_loss_of_several_datums_is_the_sum_of_the_plain_formulas_of_each(loss_fn: str) -> None:
    """Of different lengths and, for gspo, ratios: below its bounds, within them and above. Its ratio is that of the
    masked positions, which differ from datum to datum."""
    random = np.random.default_rng(0)
    data, parts, wanted = [], [], []
    for length, shift in ((3, -1.0), (1, 1e-4), (7, 1.0), (4, 0.0)):
        current = torch.from_numpy(random.normal(-3, 1, length)).requires_grad_()
        mask = np.ones(length, np.float32)
        mask[1::2] = 0
        old = current.detach().numpy() - np.where(mask, shift, random.normal(size=length))
        advantages = random.normal(size=length)
        inputs = {"logprobs": old, "advantages": advantages, "sequence_ratio_mask": mask}
        named = {name: values.astype(np.float32) for name, values in inputs.items()}
        if loss_fn != "gspo":
            del named["sequence_ratio_mask"]
        tokens = np.arange(length)
        chunk = EncodedTextChunk(tokens=tokens)
        data.append(Datum(model_input=ModelInput(chunks=[chunk]), loss_fn_inputs={"target_tokens": tokens, **named}))
        parts.append(current)
        wanted.append(loss_of(loss_fn, current, inputs, {}))
    torch.stack(wanted).sum().backward()
    loss = LOSSES[loss_fn]
    settings = loss_config(loss, ForwardBackwardInput(data=data, loss_fn=loss_fn))
    logprobs = torch.cat([one.detach() for one in parts]).float()[:, None].requires_grad_()
    value = loss.by_position(loss_inputs(loss, settings, data, logprobs.device)(logprobs)).sum()
    value.backward()
    assert value.item() == pytest.approx(sum(one.item() for one in wanted), rel=1e-5)
    gradient = torch.cat([present(one.grad) for one in parts])
    assert (gradient != 0).any()
    assert present(logprobs.grad)[:, 0].tolist() == pytest.approx(gradient.tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
@pytest.mark.parametrize("sentinel", [-90.0, -1000.0, -99999.0, -3e38])
def test_tokens_that_must_not_train_may_have_any_old_log_probability(loss_fn: str, sentinel: float) -> None:
    """With advantage 0, for gspo also outside of the mask, value and gradient are those of the other tokens alone."""
    mask: dict[str, Any] = {"sequence_ratio_mask": [1.0, 0.0, 1.0]} if loss_fn == "gspo" else {}
    inputs: dict[str, Any] = {"advantages": [1.0, 0.0, 2.0], **mask}
    wanted = evaluate(loss_fn, logprobs=[-1.5, -1.0, -0.5], **inputs)
    got = evaluate(loss_fn, logprobs=[-1.5, sentinel, -0.5], **inputs)
    assert got == wanted
    assert got[1][1] == 0


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_ratio_beyond_float32_counts_as_the_largest_and_clips_as_any_other(loss_fn: str) -> None:
    mask: dict[str, Any] = {"sequence_ratio_mask": [1.0, 1.0, 1.0]} if loss_fn == "gspo" else {}
    value, gradient = evaluate(loss_fn, logprobs=[-500.0] * 3, advantages=[1.0, 1.0, 2.0], **mask)
    assert np.isfinite([value, *gradient]).all()
    if loss_fn in ("ppo", "gspo"):  # clipped from above, where nothing is left to gain
        assert gradient == [0, 0, 0]
    else:
        assert max(gradient) < 0


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_a_lower_clipping_bound_above_the_upper_is_refused_by_name(loss_fn: str) -> None:
    loss = LOSSES[loss_fn]
    config: dict[str, float | str] = {"clip_low_threshold": 1.3, "clip_high_threshold": 1.2}
    with pytest.raises(InvalidInput, match=r"clip_low_threshold 1\.3 is above clip_high_threshold 1\.2"):
        loss_config(loss, ForwardBackwardInput(data=[], loss_fn=loss_fn, loss_fn_config=config))


def test_an_unknown_config_key_is_refused_by_name():
    with pytest.raises(InvalidInput, match=r"clip_hihg_threshold.*clip_low_threshold, clip_high_threshold"):
        evaluate("ppo", {"clip_hihg_threshold": 1.2}, **RL)


def test_a_config_value_that_is_no_number_is_refused():
    with pytest.raises(InvalidInput, match="'beta' is 'small', not a number"):
        evaluate("dro", {"beta": "small"}, **RL)
