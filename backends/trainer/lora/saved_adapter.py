"""Reads a saved adapter: this server's, or one of another program, under PEFT's names or those of Tinker's tools.

Every tensor must be one of the model's, by its exact name: a tensor that is taken for another, or left out, gives wrong
numbers without an error. The header is checked before a tensor is read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from api_schemas.adapter_names import NOT_FOR_PEFT, tinker_name
from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from backends.trainer.lora.linear import ALPHA

_DTYPES = ("F32", "F16", "BF16")
_CHANGED_BASE = ("use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias", "modules_to_save")
_PATTERNS = ("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters")
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base as it was."""
_MAX_NAMES = 3
"""Names in one error."""


def read_adapter(directory: Path, own: Mapping[str, Tensor], *, has_tower: bool) -> dict[str, Tensor]:
    """Return an adapter's tensors under the names of a model's `own`, scaled to the alpha of all models.

    Only files of PEFT's names can have a tower. Raises InvalidInput if they are not this model's, or the directory is
    gone.
    """
    if not (directory / ADAPTER_FILE).exists():
        raise InvalidInput(f"the checkpoint has no {ADAPTER_FILE}: it was deleted, or is no adapter")
    alpha = _checked_alpha(directory)
    try:
        with safe_open(directory / ADAPTER_FILE, "pt") as file:
            stacks = _names_in_file(set(file.keys()), list(own), has_tower=has_tower)
            for name in stacks:
                if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
                    raise InvalidInput(f"{name} is of type {dtype}; {', '.join(_DTYPES)} are taken")
            tensors = dict(_under_own_names(stacks, ((name, file.get_tensor(name)) for name in stacks)))
    except SafetensorError as error:
        raise InvalidInput(f"{ADAPTER_FILE} is no safetensors file: {error}") from None
    if alpha != ALPHA:
        for name in [name for name in tensors if name.endswith(".lora_B.weight")]:
            tensors[name] = tensors[name].to(torch.float32) * (alpha / ALPHA)
    return tensors


def _checked_alpha(directory: Path) -> float:
    """Return `lora_alpha`. Raises InvalidInput for a config that asks for more than the plain product of A and B."""
    try:
        config = json.loads((directory / ADAPTER_CONFIG_FILE).read_text())
    except (OSError, ValueError):
        raise InvalidInput(f"the checkpoint has no readable {ADAPTER_CONFIG_FILE}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE} is no JSON object")
    if config.get("peft_type") not in (None, "LORA", NOT_FOR_PEFT):
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: peft_type {config['peft_type']!r} is not supported, only LORA is")
    for field in (*_CHANGED_BASE, *_PATTERNS):
        if config.get(field):
            raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: {field} {config[field]!r} is not supported; leave it out")
    if config.get("bias") not in (None, "none"):
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: bias {config['bias']!r} is not supported, only 'none' is")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise InvalidInput(
            f"{ADAPTER_CONFIG_FILE}: init_lora_weights {config['init_lora_weights']!r} is not supported: it changes the"
            " base; convert the adapter first (PeftModel.save_pretrained, path_initial_model_for_weight_conversion)"
        )
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: lora_alpha {alpha!r} is not a number above 0")
    return float(alpha)


def _names_in_file(found: set[str], own: Sequence[str], *, has_tower: bool) -> dict[str, list[str]]:
    """Return, by the name of each tensor in a file, the model's names of its parts. Raises InvalidInput."""
    if found == set(own):
        return {name: [name] for name in own}
    of_tools = {} if has_tower else _tools_names(own)
    is_of_tools = len(found & of_tools.keys()) > len(found & set(own))
    expected = of_tools if is_of_tools else {name: [name] for name in own}
    form = "Tinker's tools" if is_of_tools else "PEFT"
    if missing := _some(expected.keys() - found):
        raise InvalidInput(
            f"the checkpoint trains other modules than this model, which has {missing} in the names of {form}"
        )
    if unknown := _some(found - expected.keys()):
        raise InvalidInput(
            f"the checkpoint trains other modules than this model, which has no {unknown} in the names of {form}"
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
    stacks: Mapping[str, list[str]], tensors: Iterable[tuple[str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """Yield each tensor, those of experts one by one. Raises InvalidInput for a stack of another number of experts."""
    for name, tensor in tensors:
        names = stacks[name]
        if ".experts." not in name or names == [name]:
            yield names[0], tensor
            continue
        if tensor.dim() != 3 or len(tensor) != len(names):
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)}; a stack of {len(names)} experts of three dimensions is needed"
            )
        yield from zip(names, tensor, strict=True)


def _some(names: Iterable[str]) -> str:
    """Join the first few names; empty if there are none."""
    ordered = sorted(names)
    others = f" and {len(ordered) - _MAX_NAMES} others" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + others
