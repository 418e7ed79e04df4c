"""The losses against a reference vector that was computed from their formulas."""

import numpy as np
import pytest
import torch

from api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from api_schemas.training import ForwardBackwardInput
from backends.protocol import InvalidInput
from backends.trainer.batching import loss_inputs
from backends.trainer.checks import loss_config
from backends.trainer.losses import LOSSES, gspo

LOGPROBS, OLD, ADVANTAGES, WEIGHTS = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [1.0, -1.0, 2.0], [1.0, 0.0, -0.5]


def evaluate(loss_fn: str, config: dict | None = None, **inputs: list[float]) -> tuple[float, list[float]]:
    """The loss and its gradient by the log probabilities, for one datum of three positions."""
    datum = Datum(
        model_input=ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2, 3])]),
        loss_fn_inputs={"target_tokens": np.array([1, 2, 3])}
        | {name: np.array(values, dtype=np.float32) for name, values in inputs.items()},
    )
    loss = LOSSES[loss_fn]
    settings = loss_config(loss, ForwardBackwardInput(data=[datum], loss_fn=loss_fn, loss_fn_config=config))
    logprobs = torch.tensor(LOGPROBS)[:, None].requires_grad_()
    value = loss.compute(loss_inputs(loss, settings, [datum], logprobs))
    value.backward()
    return value.item(), logprobs.grad[:, 0].tolist()


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
        return gspo(logprobs, old_logprobs, ones, ones, **bounds, datum_T=datum, num_datums=count)

    zeros = [torch.zeros(len(one), dtype=torch.long) for one in alone]
    separate = sum(value(one, before, zero, 1) for one, before, zero in zip(alone, old, zeros, strict=True))
    together = value(torch.cat(alone), torch.cat(old), torch.tensor([0, 0, 1, 1, 1]), 2)
    torch.testing.assert_close(together, separate)


def test_an_unknown_config_key_is_refused_by_name():
    with pytest.raises(InvalidInput, match=r"clip_hihg_threshold.*clip_low_threshold, clip_high_threshold"):
        evaluate("ppo", {"clip_hihg_threshold": 1.2}, **RL)


def test_a_config_value_that_is_no_number_is_refused():
    with pytest.raises(InvalidInput, match="'beta' is 'small', not a number"):
        evaluate("dro", {"beta": "small"}, **RL)
