"""A forward_backward under way on a rank: which of its datums are still to be computed, what is known of the others.

All ranks hold the same passes and choose the same rows of them (`choose_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from api_schemas.inputs import Datum, ImageChunk
from api_schemas.training import ForwardBackwardInput, ForwardBackwardOutput
from backends.protocol import InvalidInput
from backends.trainer.commands import NewRequest
from backends.trainer.model.packing import plan_steps
from backends.trainer.step.loss_metrics import metrics
from backends.trainer.step.losses import LOSSES
from backends.trainer.step.validation import loss_config
from backends.trainer.trained_weights import AnyTenant

MAX_COLUMNS = 256
"""Ranks of a row's models together: beyond it their columns cost more than a row of their own (on an H200)."""


@dataclass
class Share:
    """What one rank knows of a pass."""

    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """By datum: the shape of its target_tokens, float32, nats."""
    observed: list[Sequence[float]] = field(default_factory=list)
    """By row, what `loss_metrics.observe` gives."""
    replayed: dict[int, int] = field(default_factory=dict)
    """By datum, its tokens whose experts the sampler chose."""


class BatchPass:
    """One batch through one adapter, on one rank."""

    def __init__(
        self,
        new: NewRequest,
        tenant: AnyTenant,
        loss_input: ForwardBackwardInput,
        plan: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        """`loss_input` has passed `check_forward_backward`; `plan` is what `plan_pass` made of it."""
        self.number = new.number
        """Names it on all ranks."""
        self.owner, self.model_id = new.owner, new.model_id
        self.tenant = tenant
        self.data = loss_input.data
        self.lengths = lengths(loss_input)
        self.loss = LOSSES[loss_input.loss_fn]
        self.config = loss_config(self.loss, loss_input)
        self.backward = new.backward
        self.apart = any(targets(datum).ndim > 1 for datum in self.data)
        """Its rows are its own: several targets of a token would have all tokens of the row computed for as many."""
        self.share = Share()
        self.note: str | None = None
        """A metric of the value 1 that the answer carries besides the loss's own."""
        self._plan = plan
        self._left = {index for step in plan for row in step for index in row}

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to compute."""
        return not self._left

    @property
    def next_rows(self) -> list[list[int]]:
        """By rank, datums of the next step that has any left."""
        for step in self._plan:
            rows = [[index for index in row if index in self._left] for row in step]
            if any(rows):
                return rows
        return []

    @property
    def left(self) -> list[int]:
        """Datums that are still to be computed, as planned."""
        return [index for step in self._plan for row in step for index in row if index in self._left]

    def next_on(self, rank: int, besides: Sequence[int]) -> list[int]:
        """Datums of the next row that this rank has once these are computed, as planned."""
        rows = ([index for index in step[rank] if index in self._left and index not in besides] for step in self._plan)
        return next((row for row in rows if row), [])

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Of some datums together."""
        return sum(self.lengths[index] for index in indices)

    def num_images(self, indices: Sequence[int]) -> int:
        """Of some datums together."""
        return sum(isinstance(chunk, ImageChunk) for index in indices for chunk in self.data[index].model_input.chunks)

    def computed(self, indices: Sequence[int]) -> None:
        """These are no longer left."""
        self._left.difference_update(indices)

    def require_finite(self, indices: Sequence[int]) -> None:
        """Raises InvalidInput where this rank has got a log probability of these datums that is not."""
        for index in indices:
            if not np.isfinite(self.share.logprobs[index]).all():
                raise InvalidInput(
                    f"datum {index}: the model's log probabilities are not finite: its weights have diverged; load"
                    " a checkpoint, and train with a smaller learning_rate"
                )

    def output(self, shares: Sequence[Share]) -> ForwardBackwardOutput:
        """The answer, of all ranks' shares."""
        logprobs = {index: values for share in shares for index, values in share.logprobs.items()}
        return ForwardBackwardOutput(
            loss_fn_outputs=[{"logprobs": logprobs[index]} for index in range(len(self.data))],
            metrics=metrics((row for share in shares for row in share.observed), self.loss)
            | self._replayed(shares)
            | ({self.note: 1.0} if self.note else {}),
        )

    def _replayed(self, shares: Sequence[Share]) -> dict[str, float]:
        """Nothing where no routing is replayed at all."""
        counts = [count for share in shares for count in share.replayed.values()]
        return {"replayed_tokens:sum": float(sum(counts))} if counts else {}


Row = dict[BatchPass, list[int]]
"""Datums of each of the passes that a packed row holds."""


def plan_pass(
    loss_input: ForwardBackwardInput, world_size: int, max_tokens: int, longest: int
) -> list[list[list[int]]]:
    """`plan_steps` in rows of `max_tokens`. Raises InvalidInput for a datum of more than `longest` tokens."""
    of_datums = lengths(loss_input)
    for index, length in enumerate(of_datums):
        if length > longest:
            raise InvalidInput(f"datum {index}: {length} tokens, but the GPU's memory is enough for {longest}")
    return plan_steps(of_datums, world_size, min(max_tokens, longest))


def choose_rows(passes: Sequence[BatchPass], world_size: int, max_tokens: int) -> list[Row]:
    """Each rank's next row: what the first of the passes has planned, then where there is room what the others have
    left, in their order."""
    first = passes[0]
    rows: list[Row] = [{first: indices} if indices else {} for indices in first.next_rows]
    used = [first.num_tokens(row.get(first, ())) for row in rows]
    for other in passes[1:]:
        if first.apart or other.apart or other.backward != first.backward:
            continue
        for index in other.left:
            rank = min(range(world_size), key=used.__getitem__)
            if used[rank] + other.lengths[index] <= max_tokens and _has_columns(rows[rank], other):
                rows[rank].setdefault(other, []).append(index)
                used[rank] += other.lengths[index]
    return rows


def _has_columns(row: Row, other: BatchPass) -> bool:
    num_columns: int = sum(one.tenant.adapter.config.rank for one in {**row, other: []})
    return num_columns <= MAX_COLUMNS


def lengths(loss_input: ForwardBackwardInput) -> list[int]:
    """Tokens of each datum: an input is as long as its targets, which `check_forward_backward` has seen to."""
    return [len(targets(datum)) for datum in loss_input.data]


def targets(datum: Datum) -> np.ndarray:
    """[N] or [N, K] int64."""
    return datum.loss_fn_inputs["target_tokens"]
