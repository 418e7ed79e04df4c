"""Experts that files have one by one, as the stacks that transformers has.

Published fp8 files have each expert's matrices alone, also of kinds whose files in bfloat16 have stacks. transformers
knows only the latter form of these kinds.

E experts, I inner width, H hidden width
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor

from tinker_server.backends.formats.expert_names import STACKS, expert_matrix, stack_name


class Readable(Protocol):
    """A tensor, or one that is read when it is indexed."""

    def __getitem__(self, index: EllipsisType, /) -> Tensor:
        """Read all of it."""


@dataclass(frozen=True)
class _Stack:
    """[E, 2 I, H] of gates above ups, or [E, H, I]; read when it is indexed."""

    parts: Sequence[Sequence[Readable]]
    """The experts' gates and their ups, or their downs."""

    def __getitem__(self, index: EllipsisType, /) -> Tensor:
        stacks = [torch.stack([one[...] for one in part]) for part in self.parts]
        return stacks[0] if len(stacks) == 1 else torch.cat(stacks, 1)


def with_stacked_experts(state: Mapping[str, Readable]) -> dict[str, Readable]:
    """Put stacks in the place of experts, which are numbered from 0. Where a matrix is missing they stay, and the model
    then lacks their stack."""
    stacked: dict[str, Readable] = {}
    experts: defaultdict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for name, tensor in state.items():
        if found := expert_matrix(name):
            experts[stack_name(name)][found[2], found[1]] = name
        else:
            stacked[name] = tensor
    for stack, names in experts.items():
        kinds = sorted({kind for kind, _ in names})  # gate before up
        numbers = range(len(names) // len(kinds))
        if kinds == [kind for kind, one in STACKS.items() if stack.endswith(one)] and all(
            (kind, number) in names for kind in kinds for number in numbers
        ):
            stacked[stack] = _Stack([[state[names[kind, number]] for number in numbers] for kind in kinds])
        else:
            stacked |= {name: state[name] for name in names.values()}
    return stacked


def stacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of matrices by the model's names, of experts' those of their stacks; of
    stacks that stay packed, whose model has inputs before outputs."""
    found: dict[str, tuple[int, ...]] = {}
    counts: Counter[str] = Counter()
    for name, (*experts, outputs, inputs) in shapes.items():
        stack, matrix = stack_name(name), expert_matrix(name)
        if experts:
            found[name] = *experts, inputs, outputs
        elif matrix is None:
            found[stack] = outputs, inputs
        elif matrix[2] == "gate":  # its up stands below it
            counts[stack] += 1
            found[stack] = counts[stack], 2 * outputs, inputs
        elif matrix[2] == "down":
            counts[stack] += 1
            found[stack] = counts[stack], outputs, inputs
    return found
