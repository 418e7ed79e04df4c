"""Check that LoRA reaches every weight it could: a model of which it would silently train a part is refused."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from backends.families.family import Family
from backends.families.lora_names import trained_modules, trained_parameters
from backends.protocol import BackendFailed


@dataclass(frozen=True)
class Numbers:
    """Counts of the numbers in a model's tensors."""

    adapter: int
    """Numbers of an adapter that trains all modules, per LoRA rank."""
    all_gathered: int
    """Numbers of a sharded base that ranks all-gather at once: all but the layers, and two layers."""
    trained: int
    """Numbers that full fine-tuning trains."""
    stacks: tuple[str, ...]
    """Names of those with more than two dimensions: experts, and convolutions of linear attention."""


def check_coverage(family: Family, config: PretrainedConfig, source: str, *, train_vision: bool = False) -> Numbers:
    """Refuse a model unless every weight matrix is trained by exactly one flag, or frozen by its family.

    `train_vision`: the server's setting. Builds the model of `config` without memory for its weights. Raises
    BackendFailed with the weights' names.
    """
    model = _without_memory(family, config, source)
    groups = trained_modules(family, model, train_vision=train_vision)
    modules = [name for names in groups.values() for name in names]
    twice = {name for name in modules if modules.count(name) > 1}
    missing = list(untrained(model, modules, _frozen(family, source, train_vision=train_vision)))
    if missing or twice:
        raise BackendFailed(
            f"{source}: {type(model).__name__} is not supported: LoRA would leave out"
            f" {', '.join(dict.fromkeys(_without_numbers([*missing, *twice])))}"
        )
    adapter = sum(_adapter_numbers(dict(model.get_submodule(name).named_parameters())) for name in modules)
    layers = [_count(layer) for layer in model.get_decoder().layers]
    trained = trained_parameters(model)
    stacks = tuple(dict.fromkeys(_without_numbers(name for name, one in trained.items() if one.dim() > 2)))
    all_gathered = _count(model) - sum(layers) + 2 * max(layers)
    return Numbers(adapter, all_gathered, sum(one.numel() for one in trained.values()), stacks)


def _adapter_numbers(parameters: Mapping[str, nn.Parameter]) -> int:
    """Count the numbers of a module's adapters per rank: inputs and outputs of each matrix."""
    if "gate_up_proj" in parameters:  # two matrices of each expert in one tensor
        num_experts, outputs, inputs = parameters["down_proj"].shape
        return 3 * num_experts * (outputs + inputs)
    shapes = [parameter.shape for parameter in parameters.values()]
    return sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes if len(shape) >= 2)


def _frozen(family: Family, source: str, *, train_vision: bool) -> Sequence[str]:
    if not train_vision or family.vision is None:
        return family.frozen
    tower = family.vision.lora
    if tower is None:
        raise BackendFailed(
            f"{source}: LoRA on this kind of vision tower is not supported: nobody has compared it in trainer and"
            " engine; leave the setting backend.train_vision off"
        )
    return [*(name for name in family.frozen if name != tower.root), *tower.frozen]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without_memory(family: Family, config: PretrainedConfig, source: str) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return family.model_class.from_config(config)
    except Exception as error:  # noqa: BLE001 - an architecture's own code, on a config that may not suit it
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendFailed(f"{source}: no model that generates text can be built of its config: {reason}") from None


def untrained(model: PreTrainedModel, modules: Iterable[str], frozen: Iterable[str]) -> Iterator[str]:
    """Yield names of weights that multiply activations but belong neither to `modules` nor to `frozen`, which is named
    as in `Family.frozen`.

    These are linear layers, experts (3-D), and all else of two or more dimensions; not embedding tables, and not
    convolutions over time, to which LoRA does not apply.
    """
    trained = set(modules)
    patterns = [re.compile(rf"{re.escape(name)}(\..+)?".replace(r"\*", r"\d+")) for name in frozen]
    for name, module in model.named_modules():
        if name in trained or isinstance(module, nn.Embedding | nn.Conv1d):
            continue
        if any(pattern.fullmatch(name) for pattern in patterns):
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                yield f"{name}.{parameter_name}"


def _without_numbers(names: Iterable[str]) -> Iterator[str]:
    """Give the same weight of every layer the same name."""
    return (re.sub(r"\.\d+\.", ".*.", name) for name in names)
