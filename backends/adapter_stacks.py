"""An adapter's file as the engine beside the trainer reads it: two tensors for each kind of linear, not of each one.

Of 36 layers that is 14 tensors in the place of 504, which take as long to write as their bytes do; one by one they take
half as long again, and to find them in the file takes the engine 10 ms more. Of a mixture's layer, whose experts have
adapters of their own, a place is that of all its experts. Whoever else loads adapters wants PEFT's form, and gets that.

L matrices of a stack, r rank, I inputs, O outputs
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from safetensors import safe_open
from torch import Tensor

_KEY = "places"
Places = Sequence[tuple[str, int | None]]
"""Of one stack, in order: a linear's name and None; that of all experts of a layer, and how many they are."""


def to_file(stacks: Sequence[tuple[Places, Tensor, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file of these stacks, A [L, r, I] and B [L, O, r]."""
    tensors: dict[str, Tensor] = {}
    for number, (_, a_LrI, b_LOr) in enumerate(stacks):
        tensors |= {f"{number}.A": a_LrI, f"{number}.B": b_LOr}
    return tensors, {_KEY: json.dumps([places for places, _, _ in stacks])}


@contextmanager
def open_adapter(path: str, framework: str) -> Iterator[Any]:
    """In place of `safe_open`: an adapter's tensors named as in PEFT's form, but those of a layer's experts in one."""
    with safe_open(path, framework=framework) as file:
        places = (file.metadata() or {}).get(_KEY)
        yield file if places is None else _Stacks(file, json.loads(places))


class _Stacks:
    """Of a file that has them, each tensor under its own name."""

    def __init__(self, file: Any, stacks: Sequence[Places]) -> None:
        self._views: Mapping[str, Tensor] = {
            f"{name}.lora_{half}.weight": view
            for number, places in enumerate(stacks)
            for half in "AB"
            for name, view in _views(places, file.get_tensor(f"{number}.{half}"))
        }

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._views)

    def get_tensor(self, name: str) -> Tensor:
        """A [r, I] or B [O, r]; of experts [E, r, I] or [E, O, r]."""
        return self._views[name]


def _views(places: Places, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    begin = 0
    for name, num_experts in places:
        if num_experts is None:
            yield name, stack[begin]
        else:
            yield name, stack[begin : begin + num_experts]
        begin += num_experts or 1
