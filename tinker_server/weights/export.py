"""Adapters under the names of the tinker weight tools: a text decoder's, without the model around it.

`tinker_cookbook.weights` builds and merges adapters whose tensors are named

    base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.unembed_tokens.lora_B.weight                [out, rank], the head

whatever the model calls its decoder (`model.language_model.layers`) and its head (`lm_head`). PEFT and
vLLM want the model's own names, which is how the trainer writes them. Only names differ, so they are
changed in the file's header and the tensors are copied as bytes; knows no tensor library.
"""

import json
import re
import shutil
import struct
from pathlib import Path

from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE

_LAYER = re.compile(r"base_model\.model\.(?:.+?\.)??layers\.(?P<rest>\d+\..+)")
_HEAD = re.compile(r"base_model\.model\.(?:.+\.)?[^.]+\.(?P<half>lora_[AB])\.weight")
_MAX_HEADER_BYTES = 100_000_000
"""As the format's own reader has it."""


def tinker_name(peft_name: str) -> str:
    """The exported name of a tensor: what is not in a decoder layer is of the head."""
    if layer := _LAYER.fullmatch(peft_name):
        return f"base_model.model.model.layers.{layer['rest']}"
    if head := _HEAD.fullmatch(peft_name):
        return f"base_model.model.model.unembed_tokens.{head['half']}.weight"
    raise ValueError(f"{peft_name!r} is not a tensor of an adapter")


def write_tinker_form(peft: Path, directory: Path) -> None:
    """Write the adapter in `peft` (PEFT's two files) into `directory`, under the tinker names."""
    names = rename_tensors(peft / ADAPTER_FILE, directory / ADAPTER_FILE)
    config = json.loads((peft / ADAPTER_CONFIG_FILE).read_text())
    config["target_modules"] = sorted({name.split(".")[-3] for name in names})
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=1))


def rename_tensors(source: Path, target: Path) -> list[str]:
    """Copy a safetensors file with its tensors under their tinker names; the names."""
    with source.open("rb") as read, target.open("wb") as write:
        (header_bytes,) = struct.unpack("<Q", read.read(8))
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{source.name} is no safetensors file")
        header = json.loads(read.read(header_bytes))
        metadata = header.pop("__metadata__", None)
        renamed = {tinker_name(name): place for name, place in header.items()}
        if len(renamed) != len(header):
            raise ValueError("two tensors of the adapter have the same exported name")
        if metadata is not None:
            renamed = {"__metadata__": metadata, **renamed}
        text = json.dumps(renamed, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
        write.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(read, write, 1 << 20)
    return [name for name in renamed if name != "__metadata__"]
