"""The progress of a run is computed from its last operations."""

from dataclasses import replace

from tinker_server.dashboard.pages.runs import Progress
from tinker_server.store.records import Step

BATCH = Step(model_id="m", seq_id=1, step=0, at=0, tokens=10, loss=20.0, loss_tokens=10, waited_s=1, run_s=2)
TAKEN = Step(model_id="m", seq_id=2, step=0, at=0, learning_rate=1e-4, grad_norm=1.0, waited_s=0, run_s=2)


def test_the_loss_of_a_step_is_unknown_if_that_of_any_of_its_batches_is() -> None:
    assert Progress.of([BATCH, replace(BATCH, seq_id=2, loss=40.0)]).loss == 3.0
    assert Progress.of([BATCH, replace(BATCH, seq_id=2, loss=None)]).loss is None
    assert Progress.of([BATCH, TAKEN, replace(BATCH, seq_id=3, step=1, loss=None)]).loss is None
    assert Progress.of([replace(BATCH, loss=None), TAKEN, replace(BATCH, seq_id=3, step=1)]).loss == 2.0
