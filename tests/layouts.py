"""Layouts in which models are published, made of tiny ones."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def split(directory: Path) -> None:
    """Have the weights in two shards with an index, as large models have them."""
    tensors = load_file(directory / "model.safetensors")
    names: dict[str, str] = {}
    (directory / "model.safetensors").unlink()
    for number, shard in enumerate(SHARDS):
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        save_file(part, directory / shard, {"format": "pt"})
        names |= dict.fromkeys(part, shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def add_mistrals_layout(directory: Path, other: Path) -> None:
    """Add the same model in Mistral's own format: here with other weights, so that a reader of it is seen."""
    split(directory)
    shutil.copyfile(other / "model.safetensors", directory / "consolidated.safetensors")
    (directory / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 2}))
    (directory / "tekken.json").write_text("{}")
    (directory / "tokenizer.model.v3").write_bytes(b"")
