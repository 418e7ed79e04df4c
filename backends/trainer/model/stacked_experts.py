"""Experts that files have one by one, as the stacks that transformers has.

Published fp8 files have each expert's matrices alone, also of kinds whose files in bfloat16 have stacks. transformers
knows only the latter form of these kinds.

E experts, I inner width, H hidden width
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")
_STACKS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


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


def stack_name(name: str) -> str:
    """Return the name of the stack that has an expert's matrix; any other name as it is."""
    found = _EXPERT.fullmatch(name)
    return name if found is None else f"{found['experts']}.{_STACKS[found['matrix']]}"


def with_stacked_experts(state: Mapping[str, Readable]) -> dict[str, Readable]:
    """Put stacks in the place of experts, which are numbered from 0. Where a matrix is missing they stay, and the model
    then lacks their stack."""
    stacked: dict[str, Readable] = {}
    experts: defaultdict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for name, tensor in state.items():
        if found := _EXPERT.fullmatch(name):
            experts[stack_name(name)][found["matrix"], int(found["number"])] = name
        else:
            stacked[name] = tensor
    for stack, names in experts.items():
        kinds = sorted({kind for kind, _ in names})  # gate before up
        numbers = range(len(names) // len(kinds))
        if kinds == [kind for kind, one in _STACKS.items() if stack.endswith(one)] and all(
            (kind, number) in names for kind in kinds for number in numbers
        ):
            stacked[stack] = _Stack([[state[names[kind, number]] for number in numbers] for kind in kinds])
        else:
            stacked |= {name: state[name] for name in names.values()}
    return stacked
