"""Fp8 in blocks (`formats/block_fp8.py`) of files that have none: their matrices are quantised as they are read.

Trainer, engine and the holder of a base quantise with the function here, by the same blocks and on the CPU, so that all
have the same bytes. The matrices have the names of published fp8 files, in which experts stand alone, whatever form
the files have. Knows neither transformers nor vLLM.

N outputs, K inputs, I and J blocks of them; R rows of some blocks
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tinker_server.backends.formats.block_fp8 import BLOCK, packed
from tinker_server.backends.formats.expert_names import STACKS, expert_matrix

_PLAIN = ("BF16", "F16", "F32")
"""Types of tensors, as files name them, that are quantised."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_AT_ONCE = 1 << 20
"""Numbers that are in float32 at once, about: what stays in a processor's cache."""
Layouts = Mapping[str, tuple[str, list[int]]]
"""Type and shape of each tensor of the files, by name."""


class Indexed(Protocol):
    """A tensor, or one whose parts are read when they are indexed."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """Read a part."""


@dataclass(frozen=True)
class Origin:
    """The place in the files of a matrix that is quantised."""

    tensor: str
    """Name of the tensor that has it."""
    shape: tuple[int, int]
    """N and K."""
    expert: int | None = None
    """Its number in a stack of experts; None: the tensor is the matrix."""
    first_row: int = 0
    """Outputs that stand before its own: those of gates before those of ups."""
    is_transposed: bool = False

    def read(self, tensor: Indexed, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows of the matrix, by default all."""
        end = self.shape[0] if end is None else min(end, self.shape[0])
        rows = slice(self.first_row + begin, self.first_row + end)
        index = (slice(None), rows) if self.is_transposed else (rows,)
        if self.expert is None:
            return tensor[index]
        found: Tensor = tensor[(slice(self.expert, self.expert + 1), *index)][0]
        return found.mT if self.is_transposed else found


def find_origins(layouts: Layouts, names: Collection[str]) -> dict[str, Origin]:
    """Return where files have those of the matrices that are not quantised in them."""
    found = {}
    for name in names:
        kind, shape = layouts.get(name, ("", []))
        is_alone = kind in _PLAIN and len(shape) == 2
        origin = Origin(name, (shape[0], shape[1])) if is_alone else _part_of_stack(name, layouts)
        if origin is not None:
            found[name] = origin
    return found


def _part_of_stack(name: str, layouts: Layouts) -> Origin | None:
    """Return the place in a stack of gates above ups [E, 2 I, H] or of downs [E, H, I], or in their transposes."""
    if (matrix := expert_matrix(name)) is None:
        return None
    module, expert, kind = matrix
    stacks = [layouts.get(f"{module}.{STACKS[of]}", ("", [])) for of in ("gate", "down")]
    if any(type_ not in _PLAIN or len(shape) != 3 for type_, shape in stacks):
        return None
    (count, *into), (_, *out) = (shape for _, shape in stacks)
    is_transposed = into == [out[1], 2 * out[0]]
    if expert >= count or not (is_transposed or into == [2 * out[1], out[0]]):
        return None
    hidden, inner = out[::-1] if is_transposed else out
    shape = (hidden, inner) if kind == "down" else (inner, hidden)
    first_row = inner if kind == "up" else 0
    return Origin(f"{module}.{STACKS[kind]}", shape, expert, first_row, is_transposed)


def quantise(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix in fp8, and its scales [I, J] in float32. A block's scale makes its largest number the largest
    of fp8; numbers are divided by it in float32, and rounded once."""
    num_rows = max(1, _AT_ONCE // (BLOCK * weight_NK.shape[1])) * BLOCK
    numbers, scales = zip(*map(_quantise_rows, weight_NK.split(num_rows)), strict=True)
    return torch.cat(numbers), torch.cat(scales)


def _quantise_rows(rows_RK: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_inputs = rows_RK.shape
    padded = functional.pad(rows_RK, (0, -num_inputs % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.to(torch.float32, copy=True).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest_IJ = torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3)))
    # Of a block of zeros alone, any scale is right.
    scale_IJ = torch.where(largest_IJ == 0, 1.0, (largest_IJ / _LARGEST).clamp(min=_LEAST_SCALE))
    blocks /= scale_IJ[:, None, :, None]
    scaled = blocks.clamp_(-_LARGEST, _LARGEST).flatten(2).flatten(0, 1)
    return scaled[:num_rows, :num_inputs].to(torch.float8_e4m3fn), scale_IJ


def pack_at_load(weights: Iterable[tuple[str, Tensor]], origins: Mapping[str, Origin]) -> Iterator[tuple[str, Tensor]]:
    """Yield the files' tensors by name, in place of those that have matrices of `origins` each of these, packed."""
    by_tensor: defaultdict[str, list[str]] = defaultdict(list)
    for name, origin in origins.items():
        by_tensor[origin.tensor].append(name)
    for tensor_name, tensor in weights:
        if tensor_name not in by_tensor:
            yield tensor_name, tensor
        for name in by_tensor.get(tensor_name, ()):
            yield name, packed(*quantise(origins[name].read(tensor)))
