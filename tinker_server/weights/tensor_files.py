"""Files of tensors that are copied as bytes under other names. This file knows no tensor library."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypedDict

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format's own reader."""


class Place(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class NewTensor(Protocol):
    """A tensor of a new file, made of bytes of an old file."""

    @property
    def dtype(self) -> str:
        """As in the header."""

    @property
    def shape(self) -> list[int]:
        """As in the header."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the new tensor."""

    def copy(self, read: BinaryIO, write: BinaryIO, first: int) -> None:
        """Write the new tensor; the old file's tensors begin at `first`."""


def read_header(read: BinaryIO) -> tuple[dict[str, Place], object, int]:
    """Return the tensors and the metadata of a safetensors file, and its header's size in bytes. Raises ValueError."""
    (header_bytes,) = struct.unpack("<Q", read.read(8))
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{read.name} is no safetensors file")
    header = json.loads(read.read(header_bytes))
    metadata = header.pop("__metadata__", None)
    return header, metadata, header_bytes


def rearrange(
    source: Path, target: Path, arrange: Callable[[dict[str, Place]], "Mapping[str, NewTensor]"]
) -> list[str]:
    """Copy a safetensors file with the tensors that `arrange` makes of its header; return their names."""
    with source.open("rb") as read, target.open("wb") as write:
        header, metadata, header_bytes = read_header(read)
        exported = arrange(header)
        places: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
        end = 0
        for name, tensor in exported.items():
            begin, end = end, end + tensor.num_bytes
            places[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        text = json.dumps(places, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
        write.write(struct.pack("<Q", len(text)) + text)
        for tensor in exported.values():
            tensor.copy(read, write, 8 + header_bytes)
    return list(exported)


@dataclass
class CopiedTensor:
    """A tensor of the new file, with the offsets of its bytes in the old file, counted from the first tensor."""

    dtype: str
    part_shape: list[int]
    parts: dict[int | None, tuple[int, int]] = field(default_factory=dict)
    """Offsets by index in the stack; a tensor that is no stack has a single part, with None."""

    @property
    def shape(self) -> list[int]:
        """A stack has its index first."""
        return self.part_shape if None in self.parts else [len(self.parts), *self.part_shape]

    @property
    def num_bytes(self) -> int:
        return sum(end - begin for begin, end in self.parts.values())

    def copy(self, read: BinaryIO, write: BinaryIO, first: int) -> None:
        """Copy all parts in the order of their indices."""
        for _, (begin, end) in sorted(self.parts.items(), key=lambda part: part[0] or 0):
            read.seek(first + begin)
            for size in _pieces(end - begin):
                write.write(read.read(size))


def _pieces(num_bytes: int) -> list[int]:
    whole, rest = divmod(num_bytes, 1 << 20)
    return [1 << 20] * whole + [rest]
