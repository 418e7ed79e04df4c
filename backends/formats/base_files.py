"""The rule which files of a directory are a base model. Trainer, engine, holder, fingerprint and memory plan use it.

Weights are found as transformers finds them: model.safetensors, or else the files that model.safetensors.index.json
names. Published directories also have the same weights in other layouts (`consolidated.safetensors`,
`model.fp16.safetensors`), of which vLLM by itself would take another one than transformers, or all. What no reader may
choose is refused by name. vLLM gets a directory of links to these files alone.
"""

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from tinker_server.backends.names import join_names
from tinker_server.backends.protocol import BackendFailed

CONFIG_FILE = "config.json"
OTHER_LAYOUTS = ["*.bin", "*.pth", "*.gguf", "original/*", "consolidated*"]
"""Files that hold weights otherwise than in transformers' safetensors files."""
_TEXT_FILES = (
    "config*.json",  # config.json may name another one for a version of transformers
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "*processor*.json",
)
"""Names of configs, tokenizers, chat templates and processors that transformers reads. Mistral's own (params.json,
tekken.json) are not among them: vLLM would prefer them."""
_REFUSED = {
    ADAPTER_CONFIG_NAME: "transformers would load an adapter upon the weights, and the engine would not: serve the base"
    " alone, and load the adapter as a checkpoint; or merge it into the weights",
    "hf_quant_config.json": "the engine would take the weights for quantised ones, and the trainer would not: name the"
    " quantisation in config.json",
}
"""Files that change what a model computes, and that a reader ignores."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files of the weights. Raises BackendFailed, naming files, if there are none or two sets of them, or
    if one is missing."""
    single, index = directory / SAFE_WEIGHTS_NAME, directory / SAFE_WEIGHTS_INDEX_NAME
    named = _read_index(index) if index.is_file() else []
    present = [path for path in named if path.is_file()]
    if single.is_file():
        if others := [path.name for path in present if path != single]:
            raise BackendFailed(
                f"{directory} has two sets of weights: {SAFE_WEIGHTS_NAME}, and {join_names(others, 3)}, which"
                f" {SAFE_WEIGHTS_INDEX_NAME} names; remove one of them, and the index with the second"
            )
        return [single]
    if missing := [path.name for path in named if path not in present]:
        raise BackendFailed(f"{directory} lacks {join_names(missing, 3)}, which {SAFE_WEIGHTS_INDEX_NAME} names")
    if not named:
        names = sorted(path.name for path in directory.glob("*"))
        found = [name for name in names if name.endswith(".safetensors") or _is_other(name)]
        also = f"; it has {join_names(found, 3)}, which are not read" if found else ""
        raise BackendFailed(
            f"{directory} has no safetensors weights: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}{also}"
        )
    return named


def text_files(directory: Path) -> list[Path]:
    """Return the files of config, tokenizer and processor. Raises BackendFailed for one that changes what the model
    computes, for one of its readers alone."""
    for name, reason in _REFUSED.items():
        if (directory / name).exists():
            raise BackendFailed(f"{directory} has {name}: {reason}; then remove the file")
    config = directory / CONFIG_FILE
    if config.is_file() and (other := _read_json(config).get("transformers_weights")) is not None:
        raise BackendFailed(
            f"{config} names transformers_weights {other}, which the engine does not read: leave the field out, and"
            f" call the weights {SAFE_WEIGHTS_NAME}, or name them in {SAFE_WEIGHTS_INDEX_NAME}"
        )
    return sorted({path for pattern in _TEXT_FILES for path in directory.glob(pattern) if path.is_file()})


def find_needed_files(directory: Path) -> dict[str, Path]:
    """Return all files that a model is served from, by their names within its directory. Raises BackendFailed as
    `weight_files` and `text_files`."""
    found, weights = text_files(directory), weight_files(directory)
    if weights != [directory / SAFE_WEIGHTS_NAME]:
        found = [*found, directory / SAFE_WEIGHTS_INDEX_NAME]
    return {path.relative_to(directory).as_posix(): path for path in [*found, *weights]}


def link_files(files: Mapping[str, Path], links: Path) -> Path:
    """Make `links` a directory of links to files, by their names within it, in place of what was there. Return it."""
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir(parents=True)
    for name, path in files.items():
        (links / name).parent.mkdir(exist_ok=True)
        (links / name).symlink_to(path.absolute())
    return links


def _read_index(index: Path) -> list[Path]:
    """Return the files that an index names. Raises BackendFailed for one outside its directory."""
    names = sorted(set(map(str, _read_json(index).get("weight_map", {}).values())))
    for name in names:
        if Path(name).name != name:
            raise BackendFailed(f"{index} names {name}, which is not a file beside it")
    return [index.parent / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise BackendFailed(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BackendFailed(f"{path} is no JSON object")
    return content


def _is_other(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in OTHER_LAYOUTS)
