"""A forward_backward in flight on a rank: its datums that are still to be computed, and the results of the others.

All ranks hold the same requests and choose the same microbatches of them (`choose_microbatches`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import LOGPROBS, ForwardBackwardInput, ForwardBackwardOutput
from tinker_server.backends.inputs.rendering import Layout
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.commands import NewRequest
from tinker_server.backends.trainer.distributed import World, gather_objects
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model.packing import plan_steps
from tinker_server.backends.trainer.model.shared_prefixes import Prefixes, Trie, count_fitting, identify
from tinker_server.backends.trainer.step.losses import LOSSES, metrics
from tinker_server.backends.trainer.step.validation import loss_config

SHARING_OFF = "sharing_off:max"
"""A metric of value 1: during the request the trainer found that sharing gives other numbers, and ended it."""
_MOST_TARGETS = 4096
"""Targets of a batch's datums side by side, above which soft targets are not shared: a token of a prefix has all that
are different, which would take gigabytes."""


@dataclass
class Share:
    """A rank's results of a request."""

    outputs: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    """By datum and name: the shape of its target_tokens, float32, nats."""
    observed: list[Sequence[float]] = field(default_factory=list)
    """By microbatch, what `losses.observe` gives."""
    replayed: dict[int, int] = field(default_factory=dict)
    """By datum, the number of its tokens whose experts the sampler chose."""
    shared: int = 0
    """Tokens of datums that were not computed, since another datum has them too."""


@dataclass(frozen=True)
class CheckedBatch:
    """A batch that has passed `check_forward_backward`."""

    loss_input: ForwardBackwardInput
    layouts: Sequence[Layout]
    """By datum."""
    prefixes: Prefixes | None = None
    """What datums have in common, as `find_prefixes` gives it."""
    note: str | None = None
    """A metric of value 1 that the answer carries besides the loss's own."""

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each datum."""
        return [layout.num_tokens for layout in self.layouts]


class BatchRequest:
    """A batch through a model, on a rank."""

    def __init__(self, new: NewRequest, model: LoraModel, batch: CheckedBatch, plan: list[list[list[int]]]) -> None:
        """`plan` is what `plan_batch` made of the batch."""
        loss_input = batch.loss_input
        self.number = new.number
        """Names the request on all ranks."""
        self.owner, self.model_id = new.owner, new.model_id
        self.model = model
        self.data = loss_input.data
        self.layouts = batch.layouts
        self._prefixes = batch.prefixes
        self.lengths = batch.lengths
        self.loss = LOSSES[loss_input.loss_fn]
        self.config = loss_config(self.loss, loss_input)
        self.backward = new.backward
        self.exclusive = any(targets(datum).ndim > 1 for datum in self.data)
        """True if no other request may share its microbatches: with several targets per token, all tokens of the
        microbatch would be computed for as many."""
        self.share = Share()
        self._notes = [batch.note] if batch.note else []
        self._plan = plan
        """What is left of it: steps without a datum are removed."""

    @property
    def next_parts(self) -> list[list[int]]:
        """By rank, the datums left of the next step."""
        return self._plan[0] if self._plan else []

    @property
    def left(self) -> list[int]:
        """Datums that are still to be computed, in planned order."""
        return [index for step in self._plan for part in step for index in part]

    def next_on(self, rank: int, besides: Sequence[int]) -> list[int]:
        """Return this rank's datums of the next planned microbatch, once those of `besides` are computed."""
        parts = ([index for index in step[rank] if index not in besides] for step in self._plan)
        return next((part for part in parts if part), [])

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Count the tokens that are computed for some datums in one microbatch."""
        if self._prefixes is not None:
            return self._prefixes.num_tokens(indices)
        return sum(self.lengths[index] for index in indices)

    def trie(self, indices: Sequence[int]) -> Trie | None:
        """Return the segments that are computed for some datums in one microbatch; None: each datum is computed."""
        return None if self._prefixes is None else self._prefixes.trie(indices)

    def num_images(self, indices: Sequence[int]) -> int:
        """Count the images of some datums."""
        return sum(len(self.layouts[index].spans) for index in indices)

    def mark_computed(self, indices: Sequence[int]) -> None:
        """Mark these datums as computed."""
        done = set(indices)
        plan = [[[index for index in part if index not in done] for part in step] for step in self._plan]
        self._plan = [step for step in plan if any(step)]

    def compute_whole(self, side_by_side: int, max_tokens: int) -> None:
        """Share nothing of what is left, and plan it anew, as `plan_batch` does: sharing gives other numbers."""
        if self._prefixes is None:
            return
        self._prefixes, left = None, self.left
        self._notes.append(SHARING_OFF)
        plan = plan_steps([self.lengths[index] for index in left], side_by_side, max_tokens) if left else []
        self._plan = [[sorted(left[place] for place in part) for part in step] for step in plan]

    def require_finite(self, indices: Sequence[int]) -> None:
        """Raise InvalidInput if a log probability that this rank has of these datums is not finite."""
        for index in indices:
            if not np.isfinite(self.share.outputs[index][LOGPROBS]).all():
                raise InvalidInput(
                    f"datum {index}: the model's log probabilities are not finite: its weights have diverged; load"
                    " a checkpoint, and train with a smaller learning_rate"
                )

    def output(self, shares: Sequence[Share]) -> ForwardBackwardOutput:
        """Build the answer from all ranks' shares."""
        outputs = {index: named for share in shares for index, named in share.outputs.items()}
        return ForwardBackwardOutput(
            loss_fn_outputs=[outputs[index] for index in range(len(self.data))],
            metrics=metrics((values for share in shares for values in share.observed), self.loss)
            | self._count_replayed(shares)
            | self._count_shared(shares)
            | dict.fromkeys(self._notes, 1.0),
        )

    def _count_replayed(self, shares: Sequence[Share]) -> dict[str, float]:
        """Return the count of router replay; empty if no routing is replayed at all."""
        counts = [count for share in shares for count in share.replayed.values()]
        return {"replayed_tokens:sum": float(sum(counts))} if counts else {}

    def _count_shared(self, shares: Sequence[Share]) -> dict[str, float]:
        """Return the count of tokens that were not computed; empty if there are none."""
        count = sum(share.shared for share in shares)
        return {"shared_tokens:sum": float(count)} if count else {}


Members = dict[BatchRequest, list[int]]
"""The datums of each request in a packed microbatch."""


def find_prefixes(
    data: Sequence[Datum],
    layouts: Sequence[Layout],
    make: Callable[[Sequence[np.ndarray]], Prefixes],
    tell_apart: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]] | None = None,
) -> Prefixes | None:
    """Find what datums have in common; None if they share nothing. `make` makes `Prefixes` of identities; `tell_apart`
    gives others to tokens that are not computed alike."""
    width = max(targets(datum).size // len(targets(datum)) for datum in data)
    if width > 1 and width * len(data) > _MOST_TARGETS:
        return None
    inputs = [(datum.model_input, layout) for datum, layout in zip(data, layouts, strict=True)]
    identities = identify(inputs)
    prefixes = make(identities)
    if tell_apart is not None and prefixes.shares:
        prefixes = make(tell_apart(identities))
    return prefixes if prefixes.shares else None


def agree_on_prefixes(batches: Mapping[int, CheckedBatch], world: World) -> dict[int, CheckedBatch]:
    """Return the batches by number, the datums of a batch whole if ranks have found different routing: files may be
    deleted meanwhile, and ranks of other machines have others."""
    own = {number: batch.prefixes and batch.prefixes.digest for number, batch in batches.items()}
    everyones = gather_objects(own, world)
    return {
        number: batch if len({of_rank[number] for of_rank in everyones}) == 1 else replace(batch, prefixes=None)
        for number, batch in batches.items()
    }


def plan_batch(batch: CheckedBatch, side_by_side: int, max_tokens: int, longest: int) -> list[list[list[int]]]:
    """Return by step and rank the datums of each microbatch, of at most `max_tokens`. Datums that share tokens are in
    the same microbatch as far as they fit. `side_by_side`: the number of ranks that compute different microbatches.

    Raises InvalidInput for a datum of more than `longest` tokens.
    """
    lengths, prefixes = batch.lengths, batch.prefixes
    for index, length in enumerate(lengths):
        if length > longest:
            raise InvalidInput(f"datum {index}: {length} tokens, but the GPU's memory is enough for {longest}")
    most = min(max_tokens, longest)
    if prefixes is None:
        return plan_steps(lengths, side_by_side, most)
    units = prefixes.units(most, side_by_side)
    plan = plan_steps([num_tokens for _, num_tokens in units], side_by_side, most)
    return [[sorted(index for unit in part for index in units[unit][0]) for part in step] for step in plan]


def choose_microbatches(requests: Sequence[BatchRequest], max_tokens: int, max_rank: int) -> list[Members]:
    """Choose each rank's next microbatch: what the first request has planned, and as far as there is room what the
    others have left, in their order. The ranks of a microbatch's models sum to `max_rank` at most, if it is not the
    first's alone."""
    first = requests[0]
    chosen: list[Members] = [{first: indices} if indices else {} for indices in first.next_parts]
    used = [first.num_tokens(members.get(first, ())) for members in chosen]
    for other in requests[1:]:
        if first.exclusive or other.exclusive or other.backward != first.backward:
            continue
        _fill(chosen, used, other, max_tokens, max_rank)
    return chosen


def _fill(chosen: Sequence[Members], used: list[int], other: BatchRequest, max_tokens: int, max_rank: int) -> None:
    """Add to the ranks' microbatches, which have `used` tokens, what fits of another request, evenly."""
    left = other.left
    ranks = [
        rank
        for rank, members in enumerate(chosen)
        if sum(model.config.rank for model in {member.model for member in (*members, other)}) <= max_rank
    ]
    while left and ranks:
        rank = min(ranks, key=used.__getitem__)
        # What each of the emptiest ranks has once they have taken all that is left, as evenly as they can.
        ordered, num_tokens = sorted(used[rank] for rank in ranks), other.num_tokens(left)
        level = min(
            -(-(sum(ordered[:count]) + num_tokens) // count)  # rounded up
            for count in range(1, len(ordered) + 1)
        )
        room = min(max_tokens - used[rank], max(level - used[rank], other.num_tokens(left[:1])))
        count = count_fitting(left, partial(_has_room, other, room))
        if count:
            chosen[rank][other] = left[:count]
            used[rank] += other.num_tokens(left[:count])
        left = left[count:]
        ranks.remove(rank)


def _has_room(request: BatchRequest, room: int, indices: Sequence[int]) -> bool:
    return request.num_tokens(indices) <= room


def targets(datum: Datum) -> np.ndarray:
    """Return [N] or [N, K] int64."""
    return datum.loss_fn_inputs["target_tokens"]
