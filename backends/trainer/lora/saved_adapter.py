"""Reads a saved adapter: this server's, or another program's, under PEFT's names or those of Tinker's tools.

Every tensor must be the model's, by its exact name: a tensor that is taken for another, or left out, gives wrong
numbers without an error. The header is checked before a tensor is read. Factors that experts share are read for models
whose experts share them, also from files that repeat them for each expert; for models whose experts have adapters of
their own they are repeated. Adapters of parts of a linear are read from an adapter of the whole, too, if it is of their
blocks (`api_schemas/divided_linears.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinker_server.api_schemas.adapter_names import expert_stack, is_stack, tinker_name
from tinker_server.api_schemas.divided_linears import DividedLinear, parts_of_whole
from tinker_server.backends.formats.part_of_whole import take_part
from tinker_server.backends.names import join_names
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from tinker_server.backends.trainer.lora.linear import ALPHA
from tinker_server.backends.trainer.lora.saved_config import SavedConfig, read_config

_DTYPES = ("F32", "F16", "BF16")
_OF_BASE = ".base_layer."
"""In the names of the base's own tensors, which PEFT saves beside the adapter of a head or an embedding."""


def read_adapter(
    directory: Path,
    own: Mapping[str, Tensor],
    *,
    has_tower: bool,
    divided: Mapping[str, DividedLinear] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names of a model's `own`, scaled to the alpha of all models.

    `divided`: linears in parts, by the last parts of their names. Only files of PEFT's names can have a tower. Raises
    InvalidInput if they are not this model's, or the directory is gone.
    """
    if not (directory / ADAPTER_FILE).exists():
        raise InvalidInput(f"the checkpoint has no {ADAPTER_FILE}: it was deleted, or is no adapter")
    config = read_config(directory)
    try:
        with safe_open(directory / ADAPTER_FILE, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
            found = {name for name, part in slices.items() if not _is_placeholder(name, part.get_shape(), own)}
            wholes = {part: whole for whole in found for part in parts_of_whole(whole, divided) if part in own}
            others = _OtherForms(_experts_of_stacks(found, own), wholes)
            stacks = _names_in_file(others.rename(found), list(own), has_tower=has_tower)
            for name in found:
                num_parts = len(parts_of_whole(name, divided)) if name in wholes.values() else 1
                _check_header(name, slices[name].get_dtype(), slices[name].get_shape(), config, num_parts)

            def scale(name: str) -> Tensor:
                tensor: Tensor = file.get_tensor(name)
                factor = _scale_of_b(name, config) if name.endswith(".lora_B.weight") else 1
                return tensor if factor == 1 else tensor.to(torch.float32) * factor

            def read(name: str) -> Tensor:
                if name in others.experts:
                    parts = {number: scale(part) for number, part in others.experts[name].items()}
                    return _join_experts(name, parts, own)
                return take_part(name, wholes[name], scale, divided) if name in wholes else scale(name)

            tensors = dict(_under_own_names(stacks, ((name, read(name)) for name in stacks), own))
    except SafetensorError as error:
        raise InvalidInput(f"{ADAPTER_FILE} is no safetensors file: {error}") from None
    return tensors


class _OtherForms(NamedTuple):
    """Tensors that a file has in another form than the model."""

    experts: Mapping[str, Mapping[int, str]]
    """Names of those of single experts, by the name of their stack."""
    wholes: Mapping[str, str]
    """Names of those of whole linears, by the name of each part."""

    def rename(self, found: set[str]) -> set[str]:
        """Return the names that a file's tensors have in the model's form. Raises InvalidInput if an adapter is there
        in both forms."""
        others = {*self.wholes.values()}.union(*(names.values() for names in self.experts.values()))
        names = self.experts.keys() | self.wholes.keys()
        if twice := join_names(sorted(found & names), 3):
            raise InvalidInput(f"{ADAPTER_FILE} has {twice} twice: alone, and with others in another form")
        return (found - others) | names


def _scale_of_b(name: str, config: SavedConfig) -> float:
    """Return by what a B is multiplied so that the scale of all models gives the config's."""
    module = _module(name)
    return config.alpha_of(module) / ALPHA * (config.rank / config.rank_of(module))


def _module(name: str) -> str:
    """Return the name in the base of the module whose adapter a tensor is of."""
    return name.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _check_header(name: str, dtype: str, shape: Sequence[int], config: SavedConfig, num_parts: int) -> None:
    """Raise InvalidInput for a tensor of another type, or of another rank than the config says, or an adapter of so
    many parts has."""
    if dtype not in _DTYPES:
        raise InvalidInput(f"{name} is of type {dtype}; {', '.join(_DTYPES)} are taken")
    rank = config.rank_of(_module(name))
    if rank != num_parts * config.rank:
        needed = "r" if num_parts == 1 else f"{num_parts} times r, as many as it has adapters of its rows here"
        raise InvalidInput(
            f"{ADAPTER_CONFIG_FILE}: rank_pattern and r {config.rank} give {name} the rank {rank}; it must have"
            f" {needed}"
        )
    if len(shape) < 2 or shape[-2 if ".lora_A." in name else -1] != rank:
        raise InvalidInput(
            f"{ADAPTER_CONFIG_FILE}: r is {rank}, but {name} has shape {tuple(shape)}: the LoRA ranks differ"
        )


def _is_placeholder(name: str, shape: Sequence[int], own: Mapping[str, Tensor]) -> bool:
    """Return whether an empty tensor stands for a matrix that experts without a gate have not."""
    return 0 in shape and ".experts.w3." in name and not any(".experts.w3." in tinker_name(known)[0] for known in own)


def _experts_of_stacks(found: Iterable[str], own: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Return a file's tensors of single experts by number, for each stack of a model whose experts share factors."""
    experts: dict[str, dict[int, str]] = {}
    for name in found:
        place = expert_stack(name)
        if place is not None and place[0] in own:
            experts.setdefault(place[0], {})[place[1]] = name
    return experts


def _join_experts(name: str, experts: Mapping[int, Tensor], own: Mapping[str, Tensor]) -> Tensor:
    """Return the stack of this name. Raises InvalidInput if an expert is missing, or a factor is not shared."""
    halves = (name, name.replace(".lora_A.", ".lora_B."), name.replace(".lora_B.", ".lora_A."))
    num_experts = max(len(own[half]) for half in halves)
    if sorted(experts) != list(range(num_experts)):
        raise InvalidInput(f"{name}: the file has {len(experts)} experts of it, this model {num_experts}")
    tensors = [experts[number] for number in range(num_experts)]
    if len(own[name]) == num_experts:
        return torch.stack(tensors)
    if not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        raise InvalidInput(f"{name}: the experts of the file differ in it, those of this model share it")
    return tensors[0][None]


def _names_in_file(found: set[str], own: Sequence[str], *, has_tower: bool) -> dict[str, list[str]]:
    """Return, by the name of each tensor in a file, the model's names of its parts. Raises InvalidInput."""
    if found == set(own):
        return {name: [name] for name in own}
    of_tools = {} if has_tower else _tools_names(own)
    is_of_tools = len(found & of_tools.keys()) > len(found & set(own))
    expected = of_tools if is_of_tools else {name: [name] for name in own}
    form = "Tinker's tools" if is_of_tools else "PEFT"
    missing, unknown = sorted(expected.keys() - found), sorted(found - expected.keys())
    if of_base := join_names([name for name in unknown if _OF_BASE in name], 3):
        raise InvalidInput(
            f"{ADAPTER_FILE} has {of_base}, which belongs to the base and not to the adapter: save the adapter without"
            " it (PeftModel.save_pretrained(..., save_embedding_layers=False))"
        )
    if missing or unknown:
        differences = [f"which has {join_names(missing, 3)}"] * bool(missing)
        differences += [f"which has no {join_names(unknown, 3)}"] * bool(unknown)
        raise InvalidInput(
            f"the checkpoint trains other modules than this model, {' and '.join(differences)} in the names of {form}"
        )
    return expected


def _tools_names(own: Iterable[str]) -> dict[str, list[str]]:
    """Return the model's names by the tools' names, those of experts in the order of their stack."""
    parts: dict[str, dict[int | None, str]] = {}
    for name in own:
        stack, number = tinker_name(name)
        parts.setdefault(stack, {})[number] = name
    return {stack: [of[number] for number in sorted(of, key=lambda one: one or 0)] for stack, of in parts.items()}


def _under_own_names(
    stacks: Mapping[str, list[str]], tensors: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor]
) -> Iterable[tuple[str, Tensor]]:
    """Yield each tensor, those of experts as the model has them. Raises InvalidInput for a stack of another number of
    experts."""
    for name, tensor in tensors:
        names = stacks[name]
        of_model, num_found = own[names[0]], len(tensor) if tensor.dim() == 3 else 0
        if not is_stack(name):
            yield names[0], tensor
        elif of_model.dim() == 3:
            if num_found != len(of_model):
                whose = "share it" if len(of_model) == 1 else "have their own"
                raise InvalidInput(
                    f"{name} has shape {tuple(tensor.shape)}, and this model's has {len(of_model)} as its first"
                    f" dimension: the experts of this model {whose}"
                )
            yield names[0], tensor
        elif num_found in (1, len(names)):
            yield from zip(names, tensor.expand(len(names), *tensor.shape[1:]), strict=True)
        else:
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)}; a stack of {len(names)} experts of three dimensions is needed"
            )
