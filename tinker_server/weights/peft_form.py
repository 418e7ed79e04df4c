"""PEFT's form of adapters in which experts share factors, or parts of a linear have adapters of their own.

It has a shared factor for each expert, and the adapters of a linear's parts as blocks of one of the whole
(`api_schemas/divided_linears.py`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tinker_server.api_schemas.adapter_names import EXPERT_MATRICES, is_stack
from tinker_server.api_schemas.divided_linears import DividedLinear, from_header
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinker_server.weights.tensor_files import CopiedTensor, NewTensor, Place, read_header, rearrange


def write_expanded(source: Path, directory: Path) -> bool:
    """Write PEFT's two files of the adapter in `source` into a new directory, if its experts are in stacks or it has
    adapters of parts of linears; return whether it is so."""
    with (source / ADAPTER_FILE).open("rb") as read:
        _, metadata, _ = read_header(read)
    texts = metadata if isinstance(metadata, dict) else {}
    matrices, divided = json.loads(texts.get(EXPERT_MATRICES, "{}")), from_header(texts)
    if not matrices and not divided:
        return False
    directory.mkdir()
    rearrange(source / ADAPTER_FILE, directory / ADAPTER_FILE, partial(_expand, matrices, divided))
    config = json.loads((source / ADAPTER_CONFIG_FILE).read_text())
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(_expand_config(config, matrices, divided), indent=1))
    return True


def _expand_config(
    config: dict[str, Any], matrices: Mapping[str, str], divided: Mapping[str, DividedLinear]
) -> dict[str, Any]:
    """Return the config of the files that `_expand` makes: the adapter of a divided linear has the ranks of its parts,
    and an alpha of as many times."""
    renamed = {**matrices, **{part: whole for whole, linear in divided.items() for part in linear.parts}}
    modules = {(parent, dot, renamed.get(last, last)) for parent, dot, last in _split(config["target_modules"])}
    patterns = {
        pattern: {whole: len(linear.parts) * config[field] for whole, linear in divided.items()}
        for pattern, field in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    }
    return config | {"target_modules": sorted(map("".join, modules))} | (patterns if divided else {})


def _split(modules: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    return (module.rpartition(".") for module in modules)


def _expand(
    matrices: Mapping[str, str], divided: Mapping[str, DividedLinear], header: dict[str, Place]
) -> dict[str, NewTensor]:
    """Return a file's tensors with those of each expert apart, whose matrices have these names, and those of divided
    linears together."""
    wholes = {part: whole for whole, linear in divided.items() for part in linear.parts}
    exported: dict[str, NewTensor] = {}
    for name, place in header.items():
        parent, last, half, _ = name.rsplit(".", 3)
        if last in wholes:
            linear = divided[wholes[last]]
            places = [header[f"{parent}.{part}.{half}.weight"] for part in linear.parts]
            exported[f"{parent}.{wholes[last]}.{half}.weight"] = _Whole(linear, places, is_a=half == "lora_A")
        elif is_stack(name):
            exported |= _expand_stack(name, matrices[last], header)
        else:
            begin, end = place["data_offsets"]
            exported[name] = CopiedTensor(place["dtype"], place["shape"], {None: (begin, end)})
    return exported


def _expand_stack(name: str, matrix: str, header: dict[str, Place]) -> dict[str, CopiedTensor]:
    """Split a stacked tensor of all experts into a tensor of each expert, of its matrix of this name."""
    experts, stack, half, _ = name.rsplit(".", 3)
    dtype, shape, (begin, end) = header[name]["dtype"], header[name]["shape"], header[name]["data_offsets"]
    num_experts = max(header[f"{experts}.{stack}.{each}.weight"]["shape"][0] for each in ("lora_A", "lora_B"))
    size = (end - begin) // shape[0]
    firsts = [begin + number % shape[0] * size for number in range(num_experts)]
    return {
        f"{experts}.{number}.{matrix}.{half}.weight": CopiedTensor(dtype, shape[1:], {None: (first, first + size)})
        for number, first in enumerate(firsts)
    }


@dataclass(frozen=True)
class _Whole:
    """A or B of a divided linear, made of those of its parts."""

    linear: DividedLinear
    places: Sequence[Place]
    """Of the parts, in their order."""
    is_a: bool

    @property
    def dtype(self) -> str:
        return self.places[0]["dtype"]

    @property
    def shape(self) -> list[int]:
        rows, columns = self.places[0]["shape"]
        num_parts = len(self.places)
        return [num_parts * rows, columns] if self.is_a else [self.linear.num_outputs, num_parts * columns]

    @property
    def num_bytes(self) -> int:
        begin, end = self.places[0]["data_offsets"]
        row_bytes = (end - begin) // self.places[0]["shape"][0]
        return row_bytes * (self.shape[0] if self.is_a else self.linear.num_outputs * len(self.places))

    def copy(self, read: BinaryIO, write: BinaryIO, first: int) -> None:
        """Copy A's parts below each other, and B's as blocks between zeros."""
        parts = []
        for place in self.places:
            begin, end = place["data_offsets"]
            read.seek(first + begin)
            parts.append(read.read(end - begin))
        if self.is_a:
            write.writelines(parts)
            return
        size = self.num_bytes // self.linear.num_outputs // len(parts)
        zeros = [bytes(size * number) for number in range(len(parts) + 1)]
        for source in self.linear.sources():
            if source is None:
                write.write(zeros[-1])
            else:
                number, row = source
                write.write(zeros[number] + parts[number][row * size : (row + 1) * size] + zeros[-2 - number])
