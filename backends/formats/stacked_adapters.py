"""An adapter's files as the engine beside the trainer reads them: two tensors for each kind of linear, not of each one.

Of 36 layers that is 14 tensors in the place of 504, which take as long to write as their bytes do; one by one they take
half as long again, and to find them in the file takes the engine 10 ms more. Of a mixture's layer, whose experts have
adapters of their own, a place is that of all its experts. A large one is several files, written side by side: what
takes time is that the system finds memory for them. Whoever else loads adapters wants PEFT's form, and gets that.

L matrices of a stack, r rank, I inputs, O outputs
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from backends.protocol import ADAPTER_FILE

_KEY, _NUM_FILES = "stacks", "stack_files"
_MOST_FILES, _FILE_BYTES = 4, 1 << 24
"""As many files as there are so many bytes, at most."""
Places = Sequence[tuple[str, int | None]]
"""Of one stack, in order: a linear's name and None; that of all experts of a layer, and how many they are."""


@dataclass
class StackFile:
    """A safetensors file yet to be written."""

    name: str
    places: list[Places] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def add(self, places: Places, a_LrI: Tensor, b_LOr: Tensor) -> None:
        """One more stack."""
        number = len(self.places)
        self.places.append(places)
        self.tensors |= {f"{number}.A": a_LrI, f"{number}.B": b_LOr}

    def metadata(self, num_files: int) -> dict[str, str]:
        """What its header says of it, of all of which there are so many."""
        return {_KEY: json.dumps(self.places), _NUM_FILES: str(num_files)}


def to_files(stacks: Sequence[tuple[Places, Tensor, Tensor]]) -> list[StackFile]:
    """Files of about the same size that hold these stacks, A [L, r, I] and B [L, O, r]; the first is `ADAPTER_FILE`."""
    sizes = [a_LrI.nbytes + b_LOr.nbytes for _, a_LrI, b_LOr in stacks]
    num_files = max(1, min(_MOST_FILES, len(stacks), sum(sizes) // _FILE_BYTES))
    files = [StackFile(name) for name in (ADAPTER_FILE, *_others(num_files))]
    for index in sorted(range(len(stacks)), key=lambda index: -sizes[index]):
        min(files, key=lambda file: file.size_bytes).add(*stacks[index])
    return files


def other_files(metadata: Mapping[str, str] | None) -> list[str]:
    """Names of the files beside `ADAPTER_FILE`, as its header tells them; none where it is not ours."""
    return _others(int((metadata or {}).get(_NUM_FILES, 1)))


@contextmanager
def open_adapter(path: str, framework: str) -> Iterator[Any]:
    """In place of `safe_open`: an adapter's tensors named as in PEFT's form, but those of a layer's experts in one."""
    with ExitStack() as opened:
        first = opened.enter_context(safe_open(path, framework=framework))
        if _KEY not in (first.metadata() or {}):
            yield first
            return
        others = [Path(path).with_name(name) for name in other_files(first.metadata())]
        yield _Stacks([first, *(opened.enter_context(safe_open(other, framework=framework)) for other in others)])


class _Stacks:
    """Of files that have them, each tensor under its own name."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._views: Mapping[str, Tensor] = {
            f"{name}.lora_{half}.weight": view
            for file in files
            for number, places in enumerate(json.loads(file.metadata()[_KEY]))
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


def _others(num_files: int) -> list[str]:
    return [f"stacks-{number}.safetensors" for number in range(1, num_files)]
