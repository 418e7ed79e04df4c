"""The page of a run says why nothing can be learned, and is silent about a run that learns."""

from dataclasses import replace

import pytest

from tinker_server.dashboard.hints import hints
from tinker_server.dashboard.pages.curves import important_of
from tinker_server.store.records import Step

BATCH = Step(
    model_id="m",
    seq_id=1,
    step=0,
    at=0,
    tokens=9,
    loss=1.0,
    loss_tokens=5,
    sampler_gap=0.01,
    clip_fraction=0.1,
    advantage=0.0,
    waited_s=0,
    run_s=1,
)
TAKEN = Step(model_id="m", seq_id=2, step=0, at=0, learning_rate=1e-4, grad_norm=1.0, waited_s=0, run_s=0)
EMPTY = replace(BATCH, loss=0.0, loss_tokens=0, advantage=None, sampler_gap=None, clip_fraction=None)


def test_a_run_that_learns_has_no_hint_even_if_its_mean_advantage_is_0() -> None:
    assert hints([]) == hints([BATCH, TAKEN]) == []
    supervised = replace(BATCH, sampler_gap=None, clip_fraction=None, advantage=None)
    assert hints([supervised, TAKEN]) == []


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ([BATCH, TAKEN, EMPTY], "All advantages of the last batch are 0"),
        ([BATCH, TAKEN, EMPTY, EMPTY, TAKEN], "All advantages of the last 2 batches are 0"),
        ([EMPTY, replace(TAKEN, grad_norm=0.0)], "All advantages or weights of the last batch are 0"),
        ([BATCH, replace(TAKEN, learning_rate=0.0)], "learning rate of the last step is 0"),
        ([BATCH, replace(TAKEN, grad_norm=0.0)], "gradient of the last step is exactly 0"),
        ([replace(BATCH, clip_fraction=1.0), TAKEN], "Every position of the last batch was clipped"),
        ([replace(BATCH, sampler_gap=0.5), TAKEN], "differ from the trainer's by 0.5 nats"),
        ([replace(BATCH, loss=None), TAKEN], "not finite"),
    ],
)
def test_each_reason_is_one_sentence(last: list[Step], text: str) -> None:
    (found,) = hints(last)
    assert text in found


def test_a_batch_that_trains_again_ends_the_hint() -> None:
    assert hints([EMPTY, replace(TAKEN, grad_norm=0.0), BATCH, TAKEN]) == []


def test_rewards_accuracies_and_evaluations_come_first() -> None:
    names = ["env/all/reward/total", "optim/lr", "progress/done_frac", "test/nll", "time/total", "train/accuracy"]
    assert important_of(names) == ["env/all/reward/total", "train/accuracy", "test/nll"]
    assert important_of(["a", "b"]) == ["a", "b"] and important_of([]) == []
