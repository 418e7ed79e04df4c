"""Files of saved weights: an adapter in PEFT's form, for training the optimizer beside it, of a suspended
model its gradient too.

A directory is written under another name and renamed, so that it is there whole or not at all, and is
never written again. Knows no model.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, cast

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from api_schemas.training import Trainable
from backends.files import written_aside
from backends.formats.load_check import Canary
from backends.formats.stacked_adapters import Places, StackFile, to_files
from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from backends.trainer.lora.adapters import ALPHA

OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENT_FILE = "gradient.safetensors"
_LAYER = re.compile(r"(model\.)?layers\.\d+\.")
"""Of a model that is nothing but a decoder."""
_EXPERT = re.compile(r"\bexperts\.\d+\.")
GradientState = Literal["none", "whole", "incomplete"]
"""Of what was accumulated since the last optim_step; incomplete: a part of it failed."""


def write_directory(directory: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `write` fill a fresh directory, make it durable where asked to, and give it its name."""
    with written_aside(directory, durable=durable) as aside:
        aside.mkdir()
        write(aside)


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], config: Trainable, base_model: str, canary: Canary | None = None
) -> None:
    """The two files that PEFT and vLLM load."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, directory / ADAPTER_FILE, None if canary is None else canary.to_metadata())
    _write_config(directory, (name.rpartition(".lora_")[0] for name in tensors), config, base_model)


def write_stacks(
    directory: Path,
    stacks: Sequence[tuple[Places, Tensor, Tensor]],
    config: Trainable,
    base_model: str,
    canary: Canary,
) -> None:
    """The same for the engine beside us, as `adapter_stacks` has it. All is in host memory."""
    files = to_files(stacks)

    def write(file: StackFile) -> None:
        own = canary.to_metadata() if file.name == ADAPTER_FILE else {}
        save_file(file.tensors, directory / file.name, file.metadata(len(files)) | own)

    with ThreadPoolExecutor(len(files)) as threads:
        list(threads.map(write, files))
    _write_config(directory, (name for places, _, _ in stacks for name, _ in places), config, base_model)


def _write_config(directory: Path, modules: Iterable[str], config: Trainable, base_model: str) -> None:
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({_target(module.removeprefix("base_model.model.")) for module in modules}),
    }
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(peft_config, indent=1))


def _target(module: str) -> str:
    """What PEFT knows a module by: the end of its name where the model is nothing but a decoder, elsewhere the whole of
    it. A vision tower's linears, which nothing may train, can end as a decoder's do. Experts, of which there are
    thousands, end as no tower's linears beside them."""
    is_told_by_its_end = _LAYER.match(module) or _EXPERT.search(module)
    return module.rpartition(".")[2] if is_told_by_its_end else module


def write_optimizer(directory: Path, state: Mapping[str, Tensor]) -> None:
    """Adam's moments and step counts, by `<adapter tensor>:<exp_avg|exp_avg_sq|step>`; empty before the first step."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, directory / OPTIMIZER_FILE)


def write_gradient(directory: Path, gradient: Mapping[str, Tensor], state: GradientState) -> None:
    """What was accumulated since the last optim_step, by tensor name, and how whole it is."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in gradient.items()}
    save_file(tensors, directory / GRADIENT_FILE, metadata={"state": state})


def read_gradient(directory: Path) -> tuple[dict[str, Tensor], GradientState]:
    """What write_gradient wrote."""
    with safe_open(directory / GRADIENT_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, cast(GradientState, file.metadata()["state"])


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """Raises InvalidInput where the directory is gone."""
    return _read(directory / ADAPTER_FILE)


def read_optimizer(directory: Path) -> dict[str, Tensor]:
    """Raises InvalidInput where there is no optimizer state, as in weights saved for a sampler."""
    return _read(directory / OPTIMIZER_FILE)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise InvalidInput(f"the checkpoint has no {path.name}: it was deleted, or was not saved for training")
    return load_file(path)
