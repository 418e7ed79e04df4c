"""Export of adapters under the names of Tinker's tools, with PEFT's form in a subdirectory.

The trainer writes PEFT's names, and of a layer's experts that share a factor stacks as the tools have them
(`api_schemas/adapter_names.py`). Tensors are renamed in the file's header and copied as bytes, those of experts one
after the other. PEFT's form is in `peft_form.py`. This file knows no tensor library.

The tools have no names for a vision tower and would leave it out silently. So an adapter with one is exported in PEFT's
form alone, and the tools find no files. PEFT in turn would silently load only those tensors of the tools' form whose
names it knows. So that form's config has a `peft_type` that PEFT refuses; the tools read `r` and `lora_alpha`.
"""

import json
from pathlib import Path

from tinker_server.api_schemas.adapter_names import (
    NOT_FOR_PEFT,
    is_of_a_layer,
    layout_of,
    tinker_name,
)
from tinker_server.api_schemas.training import Layout
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinker_server.weights.peft_form import write_expanded
from tinker_server.weights.tensor_files import CopiedTensor, Place, read_header, rearrange

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


def layout_in(source: Path, rank: int) -> Layout | None:
    """Return the layout of the adapter of this rank in a file; None if it is the same in both."""
    with source.open("rb") as read:
        header, metadata, _ = read_header(read)
    shapes = {name: shape for name, place in header.items() if isinstance(shape := place.get("shape"), list)}
    return layout_of(shapes, rank, metadata if isinstance(metadata, dict) else {})


def has_tower(source: Path) -> bool:
    """Return whether the file's adapter covers more than the layers of a decoder and a head."""
    with source.open("rb") as read:
        header, _, _ = read_header(read)
    modules = {name.partition(".lora_")[0] for name in header if not is_of_a_layer(name)}
    return len(modules) > 1


def rename_tensors(source: Path, target: Path) -> list[str]:
    """Copy a safetensors file with its tensors under their tinker names; return the names."""
    return rearrange(source, target, _collect)


def _collect(header: dict[str, Place]) -> dict[str, CopiedTensor]:
    """Return a file's tensors by exported name. Raises ValueError if two have the same, or an expert has none."""
    exported: dict[str, CopiedTensor] = {}
    for peft_name, place in header.items():
        name, number = tinker_name(peft_name)
        tensor = exported.setdefault(name, CopiedTensor(place["dtype"], place["shape"]))
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
