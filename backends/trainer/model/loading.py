"""The frozen base from its files. Where ranks share it, each keeps its own part of every tensor: none holds it whole.

transformers reads the files, renames and stacks what they hold, and sets one finished tensor after the other in a model
without memory. Here each is taken as it is set, and its place stays without memory until all have come. So whatever
transformers can read is sharded, and not a tensor more than the one at hand is whole.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from backends.families.family import Family
from backends.model_spec import ModelSpec
from backends.protocol import BackendFailed
from backends.trainer.distributed import Root, World, shard
from backends.trainer.model import attention

_MAX_NAMES = 5
"""In one error."""


def load(config: ModelSpec, family: Family, world: World, *, is_sharded: bool) -> Root:
    """The frozen base on this rank's device: its part of each parameter where `is_sharded`, else the whole.

    Raises BackendFailed with the names of tensors that the files lack, that have another shape than the model's, or
    that the model does not have.
    """
    dtype = getattr(torch, config.dtype)
    attention_name = family.attention(attention.implementation(world.device, dtype))
    parts = _Parts(world, is_sharded=is_sharded)
    hook = register_module_parameter_registration_hook(parts.take)  # type: ignore[arg-type]
    try:
        model, found = family.model_class.from_pretrained(
            config.directory,
            dtype=dtype,
            attn_implementation=attention_name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, with their names
        )
    finally:
        hook.remove()
    _check(found, config.directory)
    own = parts.of(model, config.directory)
    model.requires_grad_(False)
    _move_buffers(model, world.device)
    root = Root(model)
    if is_sharded:
        shard(root, model.get_decoder().layers, world)
    _fill(model, own)
    return root


class _Parts:
    """What this rank keeps of the parameters that were read so far."""

    def __init__(self, world: World, *, is_sharded: bool) -> None:
        self._device = world.device
        self._index, self._count = (world.rank, world.size) if is_sharded else (0, 1)
        self._kept: dict[nn.Parameter, Tensor] = {}
        """By the parameter without memory that stands in its place: tied ones share it."""

    def take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Called with every parameter that is about to be set in any module; what it returns is set instead."""
        if parameter is None or not _was_read(parameter):
            return None
        place = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
        place._is_hf_initialized = True  # type: ignore[attr-defined]
        self._kept[place] = self._part(parameter.detach())
        return place

    def _part(self, whole: Tensor) -> Tensor:
        """The rows that FSDP2 gives this rank: as torch.chunk cuts them, and none where there are too few."""
        if self._count == 1:
            return whole.to(self._device)
        rows = whole.chunk(self._count)
        own = rows[self._index] if self._index < len(rows) else whole[:0]
        # Memory of its own: a view would keep the whole alive.
        return torch.empty(own.shape, dtype=own.dtype, device=self._device).copy_(own)

    def of(self, model: nn.Module, source: str) -> dict[str, Tensor]:
        """By name, the part of every parameter of the model. Raises BackendFailed where one was never read."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _refuse(source, "lacks", [name for name, place in parameters.items() if place not in self._kept])
        return {name: self._kept[place] for name, place in parameters.items()}


def _was_read(parameter: nn.Parameter) -> bool:
    """Whether transformers has it from the files: so it marks what it must not initialise."""
    return not parameter.is_meta and getattr(parameter, "_is_hf_initialized", False)


def _check(found: Mapping[str, Any], source: str) -> None:
    """`found` is what transformers says of the files."""
    _refuse(source, "lacks", found["missing_keys"])
    _refuse(source, "has tensors that the model has not:", found["unexpected_keys"])
    shapes = [f"{name} {tuple(has)} instead of {tuple(wanted)}" for name, has, wanted in found["mismatched_keys"]]
    _refuse(source, "has other shapes than the model:", shapes)


def _refuse(source: str, fault: str, names: Iterable[str]) -> None:
    """Nothing happens where there are no names."""
    found = sorted(names)
    if found:
        others = f" and {len(found) - _MAX_NAMES} others" if len(found) > _MAX_NAMES else ""
        raise BackendFailed(f"{source} {fault} {', '.join(found[:_MAX_NAMES])}{others}")


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """transformers has computed what is not in the files, on the CPU."""
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, buffer.to(device))


def _fill(model: PreTrainedModel, own: Mapping[str, Tensor]) -> None:
    """Give every parameter its memory; what is tied stays tied."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for name, place in list(model.named_parameters(remove_duplicate=False)):
        if place not in filled:
            filled[place] = nn.Parameter(placed(own[name], place), requires_grad=False)
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, filled[place])


def placed(part: Tensor, place: Tensor) -> Tensor:
    """As FSDP2 holds it, where it has sharded the place."""
    if not isinstance(place, DTensor):
        return part
    assert part.shape == place.to_local().shape
    return DTensor.from_local(
        part, place.device_mesh, place.placements, run_check=False, shape=place.shape, stride=place.stride()
    )
