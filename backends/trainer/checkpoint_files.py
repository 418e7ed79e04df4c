"""Files of saved weights: an adapter in PEFT's form; for training the optimizer beside it; for a suspended model its
gradient too.

A directory is written under another name and renamed, so that it is there whole or not at all, and is never written
again. Knows no model.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import cast

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.files import make_directory, write_aside
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.formats.stacked_adapters import StackedFile, TargetModules, to_files
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from tinker_server.backends.trainer.distributed import World, agreed, on_rank_zero, to_broadcast
from tinker_server.backends.trainer.lora.linear import ALPHA
from tinker_server.backends.trainer.optimizer import GradientState, all_finite

OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENT_FILE = "gradient.safetensors"
_LAYER = re.compile(r"(model\.)?layers\.\d+\.")
"""Begins the name of a decoder layer in a model that is nothing but a decoder."""
_EXPERT = re.compile(r"\bexperts\.(\d+\.|w[123]$)")


def write_directory(directory: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `write` fill a fresh directory, make it durable if asked to, and give it its name."""
    with write_aside(directory, durable=durable) as aside:
        make_directory(aside)  # and the folder that it is in, if another's deletion has just left that empty
        write(aside)


def write_on_rank_zero(directory: Path, write: Callable[[Path], None], world: World, *, durable: bool = True) -> None:
    """Write a directory on rank 0. A failure is raised on every rank."""
    on_rank_zero(lambda: write_directory(directory, write, durable=durable), world)


def require_finite(weights: Sequence[Tensor], world: World) -> None:
    """Raise InvalidInput on every rank if a weight of any is NaN or infinite."""

    def require() -> None:
        if not all_finite(weights):
            raise InvalidInput("the model's weights hold NaN or infinity and cannot be saved")

    agreed(require, world)


class SnapshotWriter:
    """Writes snapshots on a thread, while the rank goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "snapshots")
        self._begun: dict[Path, Future[None]] = {}

    def begin(self, directory: Path, write: Callable[[Path], None]) -> None:
        """Have `write` fill the directory, on the thread."""
        self._begun[directory] = self._thread.submit(self._write, directory, write)

    def written(self, directory: Path) -> Future[None]:
        """Return a future that is done when the begun snapshot is on disk."""
        return self._begun.pop(directory)

    def _write(self, directory: Path, write: Callable[[Path], None]) -> None:
        """Raises errors as the server gets them: a file that cannot be written is not the model's fault."""
        try:
            write_directory(directory, write)
        except Exception as error:
            raise to_broadcast(error) from error


def write_adapter(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: Trainable,
    base_model: str,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the two files that PEFT and vLLM load; `metadata` is for the header of the tensors."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, directory / ADAPTER_FILE, dict(metadata) or None)
    _write_config(directory, (name.rpartition(".lora_")[0] for name in tensors), config, base_model)


def write_stacked(
    directory: Path,
    stacks: Sequence[tuple[TargetModules, Tensor, Tensor]],
    config: Trainable,
    base_model: str,
    load_check: LoadCheck,
) -> None:
    """Write the same for the engine beside us (`formats/stacked_adapters.py`). All tensors are in host memory."""
    files = to_files(stacks)

    def write(file: StackedFile) -> None:
        own = load_check.to_metadata() if file.name == ADAPTER_FILE else {}
        save_file(file.tensors, directory / file.name, file.metadata(len(files)) | own)

    with ThreadPoolExecutor(len(files)) as threads:
        list(threads.map(write, files))
    _write_config(directory, (name for targets, _, _ in stacks for name, _ in targets), config, base_model)


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
    """Return the name by which PEFT finds a module: its last part if the model is nothing but a decoder, else the whole
    of it. A vision tower's linears, which nothing may train, can end as a decoder's do. Experts, of which there are
    thousands, end as no tower's linears do."""
    last_part_is_enough = _LAYER.match(module) or _EXPERT.search(module)
    return module.rpartition(".")[2] if last_part_is_enough else module


def write_optimizer(directory: Path, state: Mapping[str, Tensor]) -> None:
    """Write Adam's moments and step counts, by `<tensor>:<exp_avg|exp_avg_sq|step>`; empty before the first step."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, directory / OPTIMIZER_FILE)


def write_gradient(directory: Path, gradient: Mapping[str, Tensor], state: GradientState) -> None:
    """Write the gradient accumulated since the last optim_step, by tensor name, and its state."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in gradient.items()}
    save_file(tensors, directory / GRADIENT_FILE, metadata={"state": state})


def read_gradient(directory: Path) -> tuple[dict[str, Tensor], GradientState]:
    """Read what write_gradient wrote."""
    with safe_open(directory / GRADIENT_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, cast(GradientState, file.metadata()["state"])


def read_optimizer(directory: Path) -> dict[str, Tensor]:
    """Read Adam's state. Raises InvalidInput if there is none, as in weights saved for a sampler."""
    return _read(directory / OPTIMIZER_FILE)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise InvalidInput(f"the checkpoint has no {path.name}: it was deleted, or was not saved for training")
    return load_file(path)
