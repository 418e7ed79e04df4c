"""Metrics of a loss equal numbers computed one by one."""

import numpy as np
import pytest
import torch

from tinker_server.backends.trainer.step.losses import LOSSES, LossInputs, metrics, observe

NEW = [-1.0, -2.0, -0.5, -3.0]
OLD = [-1.2, -1.0, -0.5, 7.0]
ADVANTAGES = [1.0, -2.0, 0.5, 0.0]
"""The last position does not train, whatever its old log probability is."""


def inputs(loss_fn: str, **more: list[float]) -> LossInputs:
    tensors = {"logprobs": OLD, "advantages": ADVANTAGES, **more}
    loss = LOSSES[loss_fn]
    return LossInputs(
        torch.tensor(NEW)[:, None],
        {name: torch.tensor(values) for name, values in tensors.items()},
        dict(loss.config),
        torch.tensor([0, 0, 1, 1]),
        2,
    )


def measured(loss_fn: str, *microbatches: LossInputs) -> dict[str, float]:
    loss = LOSSES[loss_fn]
    return metrics([observe(loss, x, loss.by_position(x).sum()).tolist() for x in microbatches], loss)


def test_the_gap_and_both_estimates_of_the_divergence_are_over_positions_that_train() -> None:
    log_ratios = np.array(NEW[:3]) - np.array(OLD[:3])
    wanted = {
        "tokens:sum": 3,
        "sampler_gap:mean": np.abs(log_ratios).mean(),
        "sampler_gap:max": 1.0,
        "kl_k1:mean": -log_ratios.mean(),
        "kl_k3:mean": (np.exp(log_ratios) - 1 - log_ratios).mean(),
        "ratio:mean": np.exp(log_ratios).mean(),
        "clip_fraction:mean": 0,
        "advantage:mean": np.mean(ADVANTAGES[:3]),
        "loss:sum": -(np.exp(log_ratios) * ADVANTAGES[:3]).sum(),
    }
    assert measured("importance_sampling", inputs("importance_sampling")) == pytest.approx(wanted, abs=1e-6)


def test_the_clip_fraction_counts_ratios_outside_of_the_bounds() -> None:
    bounds = {"clip_low_threshold": [0.8] * 4, "clip_high_threshold": [1.2] * 4}  # ratios 1.22, 0.37, 1
    assert measured("ppo", inputs("ppo", **bounds))["clip_fraction:mean"] == pytest.approx(2 / 3)


def test_gspo_clips_and_reports_the_ratio_of_the_sequence() -> None:
    bounds = {"clip_low_threshold": [0.9] * 4, "clip_high_threshold": [1.1] * 4}
    got = measured("gspo", inputs("gspo", sequence_ratio_mask=[1.0, 1.0, 1.0, 0.0], **bounds))
    first = np.exp((0.2 - 1.0) / 2)  # of the first datum's two positions; the second datum's is 1
    assert got["ratio:mean"] == pytest.approx((2 * first + 1) / 3)
    assert got["clip_fraction:mean"] == pytest.approx(2 / 3)


def test_a_sequence_outside_of_the_mask_of_gspo_counts_in_no_metric() -> None:
    bounds = {"clip_low_threshold": [0.9] * 4, "clip_high_threshold": [1.1] * 4}
    got = measured("gspo", inputs("gspo", sequence_ratio_mask=[1.0, 1.0, 0.0, 0.0], **bounds))
    assert got["tokens:sum"] == 2 and got["advantage:mean"] == pytest.approx(np.mean(ADVANTAGES[:2]))
    assert got["ratio:mean"] == pytest.approx(np.exp((0.2 - 1.0) / 2))
    assert got["sampler_gap:max"] == 1.0


def test_microbatches_of_a_request_add_up_and_the_largest_gap_is_of_all() -> None:
    one = inputs("importance_sampling")
    twice = measured("importance_sampling", one, one)
    once = measured("importance_sampling", one)
    assert twice["tokens:sum"] == 6 and twice["loss:sum"] == pytest.approx(2 * once["loss:sum"])
    assert {k: v for k, v in twice.items() if not k.endswith(":sum")} == pytest.approx(
        {k: v for k, v in once.items() if not k.endswith(":sum")}
    )


def test_a_request_that_trains_nothing_has_no_means() -> None:
    nothing = inputs("importance_sampling")
    nothing.tensors["advantages"].zero_()  # type: ignore[attr-defined]
    assert measured("importance_sampling", nothing) == {"loss:sum": 0, "tokens:sum": 0}


def test_cross_entropy_reports_its_loss_and_the_tokens_that_it_weighs() -> None:
    x = LossInputs(torch.tensor([[-1.0], [-2.0]]), {"weights": torch.tensor([[0.0], [3.0]])}, {}, torch.zeros(2), 1)
    assert measured("cross_entropy", x) == {"loss:sum": 6.0, "tokens:sum": 1.0}
