"""Sentences about a run from whose last steps nothing can be learned, with the likely reason."""

from collections.abc import Sequence

from tinker_server.operations.recording import is_optim_step
from tinker_server.store.records import Step

WIDE_GAP_NATS = 0.1
"""Mean gap of trainer and sampler: on policy it is some 0.01 in bfloat16, and 1e-5 in float32."""
ALL_CLIPPED = 0.999


def hints(last: Sequence[Step]) -> list[str]:
    """Return sentences for people about a run's last recorded operations, in order; none where it can learn."""
    batches = [step for step in last if step.loss_tokens is not None]
    steps = [step for step in last if is_optim_step(step)]
    texts = [*_no_position(batches), *_no_change(steps, batches)]
    newest = batches[-1] if batches else None
    if newest is not None and (newest.clip_fraction or 0) >= ALL_CLIPPED:
        texts.append(
            "Every position of the last batch was clipped, so its gradient is 0: the policy has moved too far from the"
            " one that sampled."
        )
    if newest is not None and (newest.sampler_gap or 0) > WIDE_GAP_NATS:
        texts.append(
            f"The log probabilities that were sent differ from the trainer's by {newest.sampler_gap:.2g} nats on"
            " average: the samples are of older weights, of another temperature, or their tokens are misaligned."
        )
    if newest is not None and newest.loss is None:
        texts.append("The last loss was not finite.")
    return texts


def _no_position(batches: Sequence[Step]) -> list[str]:
    """Return a sentence if no position of the newest batches trained."""
    num_empty = 0
    for batch in reversed(batches):
        if batch.loss_tokens:
            break
        num_empty += 1
    if not num_empty:
        return []
    of = "the last batch" if num_empty == 1 else f"the last {num_empty} batches"
    if any(batch.advantage is not None for batch in batches):
        return [f"All advantages of {of} are 0: the samples of each group had the same reward. Nothing is learned."]
    return [f"All advantages or weights of {of} are 0, so no position trains. Nothing is learned."]


def _no_change(steps: Sequence[Step], batches: Sequence[Step]) -> list[str]:
    """Return a sentence if the newest optim_step left the weights as they were."""
    if not steps:
        return []
    if steps[-1].learning_rate == 0:
        return ["The learning rate of the last step is 0, so the weights stay as they are."]
    if steps[-1].grad_norm == 0 and (not batches or batches[-1].loss_tokens):
        return ["The gradient of the last step is exactly 0, although positions train: look at loss and advantages."]
    return []
