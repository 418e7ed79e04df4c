"""Files of layer-stacked adapters, for the engine beside the trainer: two tensors per kind of linear, not per linear.

36 layers become 14 tensors instead of 504. Writing is then bandwidth-bound; 504 single tensors take 1.5x as long, and
the engine 10 ms more to find them in the file. In a mixture's layer all experts are one target module; a factor that
they share is in files once. A large adapter is several files, written in parallel: the time goes into the system's
allocation of memory. All other files have PEFT's names, and stacks of experts that share a factor; of exports, the
adapters of parts of a linear in one of the whole.

L matrices of a stacked tensor, r rank, I inputs, O outputs, E experts
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from safetensors import safe_open
from torch import Tensor

from tinker_server.api_schemas.divided_linears import from_header, parts_of_whole
from tinker_server.backends.formats.part_of_whole import take_part
from tinker_server.backends.protocol import ADAPTER_FILE

_KEY, _NUM_FILES = "stacks", "stack_files"
_MOST_FILES, _FILE_BYTES = 4, 1 << 24
"""Largest number of files, and bytes from which another is written."""
TargetModules = Sequence[tuple[str, int | None]]
"""Target modules of a stacked tensor, in order: a linear's name and None; the name of a layer's experts and their
number."""


@dataclass
class StackedFile:
    """A safetensors file to be written."""

    name: str
    targets: list[TargetModules] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def add(self, targets: TargetModules, a_LrI: Tensor, b_LOr: Tensor) -> None:
        """Add the stacked tensors of some target modules."""
        number = len(self.targets)
        self.targets.append(targets)
        self.tensors |= {f"{number}.A": a_LrI, f"{number}.B": b_LOr}

    def metadata(self, num_files: int) -> dict[str, str]:
        """Return the file's header; `num_files` is the number of the adapter's files."""
        return {_KEY: json.dumps(self.targets), _NUM_FILES: str(num_files)}


def to_files(stacks: Sequence[tuple[TargetModules, Tensor, Tensor]]) -> list[StackedFile]:
    """Spread stacked tensors, A [L, r, I] and B [L, O, r], over files of similar size; the first is `ADAPTER_FILE`."""
    sizes = [a_LrI.nbytes + b_LOr.nbytes for _, a_LrI, b_LOr in stacks]
    num_files = max(1, min(_MOST_FILES, len(stacks), sum(sizes) // _FILE_BYTES))
    files = [StackedFile(name) for name in (ADAPTER_FILE, *_others(num_files))]
    for index in sorted(range(len(stacks)), key=lambda index: -sizes[index]):
        min(files, key=lambda file: file.size_bytes).add(*stacks[index])
    return files


def other_files(metadata: Mapping[str, str] | None) -> list[str]:
    """Return the names of the files beside `ADAPTER_FILE`, from its header; none if it is not of this form."""
    return _others(int((metadata or {}).get(_NUM_FILES, 1)))


class AdapterFile(Protocol):
    """An opened adapter."""

    def keys(self) -> list[str]:
        """Return the names of all tensors."""

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor."""


class _File(AdapterFile, Protocol):
    def metadata(self) -> dict[str, str]:
        """Return the header's texts."""


@contextmanager
def open_adapter(path: str, framework: str) -> Iterator[AdapterFile]:
    """Open an adapter as `safe_open` does: tensors named as in PEFT's form, but those of a layer's experts in one, a
    factor that these share once, and those of a divided linear apart."""
    with ExitStack() as opened:
        first = opened.enter_context(safe_open(path, framework=framework))
        if _KEY not in (first.metadata() or {}):
            yield _PlainAdapter(first)
            return
        others = [Path(path).with_name(name) for name in other_files(first.metadata())]
        yield _StackedAdapter(
            [first, *(opened.enter_context(safe_open(other, framework=framework)) for other in others)]
        )


class _PlainAdapter:
    """A file with each tensor under its own name."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._divided = from_header(file.metadata())
        self._wholes: dict[str, str | None] = {}
        """Names of all tensors, with that in the file of the divided linear which they are a part of."""
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            parts = parts_of_whole(name, self._divided)
            self._wholes |= dict.fromkeys(parts, name) if parts else {name: None}

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._wholes)

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        if (whole := self._wholes.get(name)) is not None:
            return take_part(name, whole, self._file.get_tensor, self._divided).contiguous()
        return self._file.get_tensor(name)


class _StackedAdapter:
    """Each tensor under its own name, from opened files."""

    def __init__(self, files: Sequence[_File]) -> None:
        self._views: Mapping[str, Tensor] = {
            f"{name}.lora_{half}.weight": view
            for file in files
            for number, targets in enumerate(json.loads(file.metadata()[_KEY]))
            for half in "AB"
            for name, view in _views(targets, file.get_tensor(f"{number}.{half}"))
        }

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._views)

    def get_tensor(self, name: str) -> Tensor:
        """Return A [r, I] or B [O, r]; for experts [E, r, I] or [E, O, r], if they share it of one."""
        return self._views[name]


def _views(targets: TargetModules, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each target module's matrices."""
    of_each = stack.split(len(stack) // len(targets))
    for (name, num_experts), matrices in zip(targets, of_each, strict=True):
        yield name, matrices[0] if num_experts is None else matrices


def _others(num_files: int) -> list[str]:
    return [f"stacks-{number}.safetensors" for number in range(1, num_files)]
