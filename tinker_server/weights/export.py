"""Export of adapters under the names of Tinker's tools, with PEFT's form in a subdirectory.

The trainer writes PEFT's names, and of a layer's experts that share a factor stacks as the tools have them
(`api_schemas/adapter_names.py`). Tensors are renamed in the file's header and copied as bytes, those of experts one
after the other. PEFT's form has a shared factor for each expert. This file knows no tensor library.

The tools have no names for a vision tower and would leave it out silently. So an adapter with one is exported in PEFT's
form alone, and the tools find no files. PEFT in turn would silently load only those tensors of the tools' form whose
names it knows. So that form's config has a `peft_type` that PEFT refuses; the tools read `r` and `lora_alpha`.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypedDict

from api_schemas.adapter_names import (
    EXPERT_MATRICES,
    NOT_FOR_PEFT,
    is_of_a_layer,
    is_on_hidden_side,
    is_stack,
    tinker_name,
)
from api_schemas.training import Layout
from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE

PEFT = "peft"
"""Subdirectory of exported weights that holds them in PEFT's form."""
README_FILE = "README.txt"
"""Not README.md: the SDK's command line writes that, where there is none, when it uploads a checkpoint."""
_PEFT_ALONE = """\
peft/   the adapter, as PEFT and vLLM load it: PeftModel.from_pretrained(model, ".../peft")
"""
_BOTH_FORMS = """\
adapter_model.safetensors, adapter_config.json
        the adapter under the names of Tinker's tools, for tinker_cookbook.weights alone (build_lora_adapter,
        build_hf_model). PEFT knows only some of these names, and refuses the config.
"""
_NO_TINKER_FORM = "        There is no other form: Tinker's tools have no names for a vision tower, which it covers.\n"
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format's own reader."""


def write_tinker_form(peft: Path, directory: Path) -> None:
    """Write the adapter in `peft` (PEFT's two files) into `directory` under the tinker names, with a README.

    If it covers a vision tower, for which there are no such names, write only the README.
    """
    if has_tower(peft / ADAPTER_FILE):
        (directory / README_FILE).write_text(_PEFT_ALONE + _NO_TINKER_FORM)
        return
    names = rename_tensors(peft / ADAPTER_FILE, directory / ADAPTER_FILE)
    config = json.loads((peft / ADAPTER_CONFIG_FILE).read_text())
    config["peft_type"] = NOT_FOR_PEFT
    config["target_modules"] = sorted({name.split(".")[-3] for name in names})
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=1))
    (directory / README_FILE).write_text(_BOTH_FORMS + _PEFT_ALONE)


def write_both_forms(directory: Path) -> None:
    """Write the tinker form into `directory` beside what the trainer has saved in `peft/`, which becomes PEFT's."""
    write_tinker_form(directory / PEFT, directory)
    expanded = directory / f"{PEFT}-expanded"
    if write_expanded(directory / PEFT, expanded):
        for file in expanded.iterdir():
            file.replace(directory / PEFT / file.name)
        expanded.rmdir()


def write_expanded(source: Path, directory: Path) -> bool:
    """Write PEFT's two files of the adapter in `source` into a new directory, if its experts are in stacks; return
    whether they are."""
    with (source / ADAPTER_FILE).open("rb") as read:
        _, metadata, _ = _header(read)
    texts = metadata if isinstance(metadata, dict) else {}
    if EXPERT_MATRICES not in texts:
        return False
    matrices = json.loads(texts[EXPERT_MATRICES])
    directory.mkdir()
    _rearrange(source / ADAPTER_FILE, directory / ADAPTER_FILE, partial(_expand, matrices))
    config = json.loads((source / ADAPTER_CONFIG_FILE).read_text())
    config["target_modules"] = sorted({matrices.get(module, module) for module in config["target_modules"]})
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=1))
    return True


def layout_of(source: Path) -> Layout:
    """Return the layout of the adapter in a file: `service` if it has stacks of experts with one matrix each on the
    hidden side, and several on the other."""
    with source.open("rb") as read:
        header, _, _ = _header(read)
    shapes = {name: place.get("shape") for name, place in header.items() if is_stack(name)}
    stacks = {name: shape for name, shape in shapes.items() if isinstance(shape, list) and shape and 0 not in shape}
    shares = all((shape[0] == 1) == is_on_hidden_side(name) for name, shape in stacks.items())
    return "service" if stacks and shares else "own"


def has_tower(source: Path) -> bool:
    """Return whether the file's adapter covers more than the layers of a decoder and a head."""
    with source.open("rb") as read:
        header, _, _ = _header(read)
    modules = {name.partition(".lora_")[0] for name in header if not is_of_a_layer(name)}
    return len(modules) > 1


class _Place(TypedDict):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def _header(read: BinaryIO) -> tuple[dict[str, _Place], object, int]:
    """Return the tensors and the metadata of a safetensors file, and its header's size in bytes. Raises ValueError."""
    (header_bytes,) = struct.unpack("<Q", read.read(8))
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{read.name} is no safetensors file")
    header = json.loads(read.read(header_bytes))
    metadata = header.pop("__metadata__", None)
    return header, metadata, header_bytes


def rename_tensors(source: Path, target: Path) -> list[str]:
    """Copy a safetensors file with its tensors under their tinker names; return the names."""
    return _rearrange(source, target, _collected)


def _rearrange(source: Path, target: Path, arrange: Callable[[dict[str, _Place]], "dict[str, _Exported]"]) -> list[str]:
    """Copy a safetensors file with the tensors that `arrange` makes of its header; return their names."""
    with source.open("rb") as read, target.open("wb") as write:
        header, metadata, header_bytes = _header(read)
        exported = arrange(header)
        places: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
        if isinstance(metadata, dict):
            metadata.pop(EXPERT_MATRICES, None)  # for this file's own names alone
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
class _Exported:
    """One tensor of the new file, with the offsets of its bytes in the old one, counted from the first tensor."""

    dtype: str
    part_shape: list[int]
    parts: dict[int | None, tuple[int, int]] = field(default_factory=dict)
    """Offsets by index in the stack; a tensor that is no stack has one part, with None."""

    @property
    def shape(self) -> list[int]:
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


def _collected(header: dict[str, _Place]) -> dict[str, _Exported]:
    """Return a file's tensors by exported name. Raises ValueError if two have the same, or an expert has none."""
    exported: dict[str, _Exported] = {}
    for peft_name, place in header.items():
        name, number = tinker_name(peft_name)
        tensor = exported.setdefault(name, _Exported(place["dtype"], place["shape"]))
        if number in tensor.parts or (tensor.parts and None in (number, *tensor.parts)):
            raise ValueError("two tensors of the adapter have the same exported name")
        if (tensor.dtype, tensor.part_shape) != (place["dtype"], place["shape"]):
            raise ValueError(f"{peft_name}: experts of a layer differ in shape or type")
        begin, end = place["data_offsets"]
        tensor.parts[number] = begin, end
    for name, tensor in exported.items():
        if None not in tensor.parts and set(tensor.parts) != set(range(len(tensor.parts))):
            raise ValueError(f"{name}: an expert of the layer has no tensor")
    return exported


def _expand(matrices: Mapping[str, str], header: dict[str, _Place]) -> dict[str, _Exported]:
    """Return a file's tensors with those of each expert apart, whose matrices have these names."""
    exported: dict[str, _Exported] = {}
    for name, place in header.items():
        dtype, shape, (begin, end) = place["dtype"], place["shape"], place["data_offsets"]
        if not is_stack(name):
            exported[name] = _Exported(dtype, shape, {None: (begin, end)})
            continue
        experts, matrix, half, _ = name.rsplit(".", 3)
        num_experts = max(header[f"{experts}.{matrix}.{each}.weight"]["shape"][0] for each in ("lora_A", "lora_B"))
        size = (end - begin) // shape[0]
        for number in range(num_experts):
            first = begin + number % shape[0] * size
            expert = f"{experts}.{number}.{matrices[matrix]}.{half}.weight"
            exported[expert] = _Exported(dtype, shape[1:], {None: (first, first + size)})
    return exported
