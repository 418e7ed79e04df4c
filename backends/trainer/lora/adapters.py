"""LoRA models on one frozen base: each an adapter of its own rank, any number of them in one packed row.

Adapters are ordinary float32 tensors whatever the base's precision, and whole on every rank. A model's tensors of
equal matrices of all layers are one stack: an optimizer step, a copy or a sum is then a few operations, not hundreds.

L matrices, r rank of a model, I inputs and O outputs of a matrix, R rank columns of a row's models
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from api_schemas.training import Trainable
from backends.families.family import LoraFlag
from backends.families.lora_names import EXPERT_STACKS, name_in_files
from backends.formats.stacked_adapters import Places
from backends.kernels.pinned_copy import to_device
from backends.protocol import InvalidInput
from backends.trainer.lora.experts import ExpertAdapters, LoraExperts
from backends.trainer.lora.linear import LoraLinear, RowScales

ALPHA = 32
"""Fixed: an adapter's output is scaled by ALPHA / rank, which the SDK's weight export expects."""


@dataclass(frozen=True)
class Group:
    """Matrices of equal name and shape, in the order of their layers, and of the experts of a layer."""

    flag: LoraFlag
    names: tuple[str, ...]
    """Of the matrices, as a PEFT file has them."""
    places: tuple[LoraLinear | ExpertAdapters, ...]
    """What computes with them: one matrix each, or those of a layer's experts."""
    place_names: tuple[str, ...]
    """Of the places, as the engine has them: a linear's own, and one for all experts of a layer."""
    positions: tuple[int, ...]
    """Where the matrices stand among all that take LoRA, in the model's own order."""

    @property
    def matrix_shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.places[0].matrix_shape


@dataclass(frozen=True)
class Stack:
    """One model's tensors for a group of matrices."""

    group: Group
    a_LrI: nn.Parameter
    b_LrO: nn.Parameter
    """B, transposed."""


@dataclass(frozen=True)
class Adapter:
    """One model's tensors."""

    config: Trainable
    stacks: tuple[Stack, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A [L, r, I] and B [L, O, r] of every stack."""
        return [parameter for stack in self.stacks for parameter in (stack.a_LrI, stack.b_LrO)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Views of all tensors, A [r, I] and B [O, r], by their name in a PEFT file."""
        return self.named([(stack.a_LrI.data, stack.b_LrO.data) for stack in self.stacks])

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Views of the gradients, named and shaped as `tensors`; empty where there are none."""
        return self.named([(stack.a_LrI.grad, stack.b_LrO.grad) for stack in self.stacks])

    def named(self, halves: Sequence[tuple[Tensor | None, Tensor | None]]) -> dict[str, Tensor]:
        """By name in a PEFT file, in the model's own order: layer by layer what there is per stack for A and B."""
        places: list[tuple[int, str, Tensor, Tensor]] = []
        for stack, (a_LrI, b_LrO) in zip(self.stacks, halves, strict=True):
            if a_LrI is not None and b_LrO is not None:
                places += zip(stack.group.positions, stack.group.names, a_LrI, b_LrO, strict=True)
        parts = {}
        for _, name, a_rI, b_rO in sorted(places, key=lambda place: place[0]):
            parts[f"base_model.model.{name}.lora_A.weight"] = a_rI
            parts[f"base_model.model.{name}.lora_B.weight"] = b_rO.T
        return parts

    @property
    def places(self) -> list[Places]:
        """Of every stack, as the engine has them."""
        return [
            [
                (f"base_model.model.{name}", place.num_matrices if isinstance(place, ExpertAdapters) else None)
                for place, name in zip(stack.group.places, stack.group.place_names, strict=True)
            ]
            for stack in self.stacks
        ]

    def stacked(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """What `named` gave, as it stands for each of `parameters`."""
        stacks = [torch.empty_like(parameter.data) for parameter in self.parameters]
        for name, place in self.named(list(zip(stacks[::2], stacks[1::2], strict=True))).items():
            place.copy_(tensors[name])
        return stacks


class Adapters:
    """Puts LoRA into a model's linears, makes adapters, and loads those of a row."""

    def __init__(self, model: PreTrainedModel, modules: Mapping[LoraFlag, list[str]], max_rank: int) -> None:
        """Replaces linears and experts in place; before the model is sharded, which goes by its modules.

        `modules` are the full names of those that each of a request's flags trains.
        """
        self._max_rank = max_rank
        self._row, self._tower = RowScales(), RowScales()
        self._tower.is_off = True
        self._groups = _replace_modules(model, modules, self._row, self._tower)
        weight = model.get_output_embeddings().weight
        self._device, self._dtype = weight.device, weight.dtype
        self.gradient_dtype = torch.promote_types(self._dtype, torch.float32)
        self._columns: list[slice] = []
        self._loaded: list[RowStack] = []
        self._buffers: dict[int, list[RowStack]] = {}
        """By R, kept: compiled code and graphs know their addresses."""
        model.get_input_embeddings().register_forward_hook(_want_gradient)

    def create(self, config: Trainable) -> Adapter:
        """A fresh adapter: A uniform as nn.Linear, drawn from `config.seed` in float32, and B zero.

        The same seed gives the same tensors on every device and rank. Raises InvalidInput.
        """
        if config.full:
            raise InvalidInput("this model trains all weights; start the server with the setting backend.full for it")
        if not 1 <= config.rank <= self._max_rank:
            raise InvalidInput(
                f"lora_config.rank is {config.rank}; this server takes 1 to {self._max_rank}"
                " (setting backend.max_lora_rank)"
            )
        flags = [flag for flag in get_args(LoraFlag) if getattr(config, flag)]
        if not flags:
            raise InvalidInput("lora_config: at least one of train_attn, train_mlp, train_unembed must be true")
        for flag in flags:
            if flag == "train_vision" and not self.train_vision:
                raise InvalidInput(
                    "the model trains its vision tower; this server does not (setting backend.train_vision)"
                )
            if not any(group.flag == flag for group in self._groups):
                raise InvalidInput(f"lora_config.{flag}: this model has no modules that it could train")
        adapter = Adapter(
            config, tuple(self._stack(group, config.rank) for group in self._groups if group.flag in flags)
        )
        _initialise(adapter)
        return adapter

    def _stack(self, group: Group, rank: int) -> Stack:
        outputs, inputs = group.matrix_shape
        halves = [
            nn.Parameter(torch.zeros(len(group.names), rank, width, dtype=self.gradient_dtype, device=self._device))
            for width in (inputs, outputs)
        ]
        return Stack(group, *halves)

    def load(self, adapters: Sequence[Adapter]) -> Tensor:
        """Put the adapters of a row's models side by side, in the base's precision, with gradients of 0.

        Returns [models, R], the scales of a token of each model; `use` takes a row's.
        """
        ends = list(accumulate(adapter.config.rank for adapter in adapters))
        self._columns = [slice(end - a.config.rank, end) for end, a in zip(ends, adapters, strict=True)]
        width = self._width(sum(adapter.config.rank for adapter in adapters))
        if width not in self._buffers:
            self._buffers[width] = [RowStack.zeros(group, width, self._dtype, self._device) for group in self._groups]
        if self._loaded is not self._buffers[width]:
            self._loaded = self._buffers[width]
            for row_stack in self._loaded:
                row_stack.bind()
        for row_stack in self._loaded:
            row_stack.clear()
        for columns, stack, row_stack in self._placed(adapters):
            row_stack.a_LRI[:, columns].copy_(stack.a_LrI.data)
            row_stack.b_LRO[:, columns].copy_(stack.b_LrO.data)
        scales = torch.zeros(len(adapters), width, dtype=self.gradient_dtype)
        for scale_R, columns in zip(scales, self._columns, strict=True):
            scale_R[columns] = ALPHA / (columns.stop - columns.start)
        return to_device(scales, self._device)

    def blank(self, num_tokens: int) -> Tensor:
        """[T, R] scales of tokens of no model, after `load([])`: the base alone."""
        return torch.zeros(num_tokens, self._width(0), dtype=self.gradient_dtype, device=self._device)

    def use(self, scales_TR: Tensor) -> None:
        """The next forward is of a row whose tokens have these scales."""
        self._row.scales_TR = scales_TR

    @property
    def train_vision(self) -> bool:
        """Whether models may train the vision tower."""
        return any(group.flag == "train_vision" for group in self._groups)

    @contextmanager
    def in_tower(self, scales_R: Tensor) -> Iterator[None]:
        """Inside, the vision tower computes for the one model with these scales; outside, without any adapter."""
        self._tower.scales_TR, self._tower.is_off = scales_R[None], False
        try:
            yield
        finally:
            self._tower.is_off = True

    @property
    def gathered(self) -> list[Tensor]:
        """The gradients of the rows since `load`, of all loaded adapters."""
        return [total for row_stack in self._loaded for total in (row_stack.grad_a_LRI, row_stack.grad_b_LRO)]

    def collect(self, adapters: Sequence[Adapter]) -> None:
        """Add the gradients of the rows since `load`, which had the loaded adapters, to each model's own: once."""
        for columns, stack, row_stack in self._placed(adapters):
            for parameter, total in ((stack.a_LrI, row_stack.grad_a_LRI), (stack.b_LrO, row_stack.grad_b_LRO)):
                part = total[:, columns]
                parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)

    def discard(self) -> None:
        """Forget the gradients since `load`: of a row that failed."""
        torch._foreach_zero_(self.gathered)

    def _placed(self, adapters: Sequence[Adapter]) -> Iterator[tuple[slice, Stack, "RowStack"]]:
        by_group = {id(row_stack.group): row_stack for row_stack in self._loaded}
        for columns, adapter in zip(self._columns, adapters, strict=True):
            for stack in adapter.stacks:
                yield columns, stack, by_group[id(stack.group)]

    def _width(self, rank: int) -> int:
        """R for ranks that sum to `rank`. Few widths on a GPU: compiled code and graphs are made for each."""
        return rank if self._device.type == "cpu" else max(16, 1 << max(0, rank - 1).bit_length())


@dataclass(frozen=True)
class RowStack:
    """What the matrices of a group compute with: the adapters of a row's models, and their gradients."""

    group: Group
    a_LRI: Tensor
    b_LRO: Tensor
    grad_a_LRI: Tensor
    grad_b_LRO: Tensor

    @classmethod
    def zeros(cls, group: Group, width: int, dtype: torch.dtype, device: torch.device) -> "RowStack":
        """Of `width` rank columns; they add nothing."""
        outputs, inputs = group.matrix_shape
        wide = torch.promote_types(dtype, torch.float32)
        sizes = ((inputs, dtype), (outputs, dtype), (inputs, wide), (outputs, wide))
        return cls(
            group, *(torch.zeros(len(group.names), width, size, dtype=kind, device=device) for size, kind in sizes)
        )

    def clear(self) -> None:
        """Make all 0."""
        torch._foreach_zero_(self._stacks())

    def bind(self) -> None:
        """Have the group's matrices compute with it."""
        stacks = self._stacks()
        begin = 0
        for place in self.group.places:
            # .data has a version counter of its own: backward adds to one layer's after another's.
            place.take(*(stack[begin : begin + place.num_matrices].data for stack in stacks))
            begin += place.num_matrices

    def _stacks(self) -> tuple[Tensor, ...]:
        return self.a_LRI, self.b_LRO, self.grad_a_LRI, self.grad_b_LRO


def _want_gradient(embeddings: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Without it the first layer's adapters would get no gradient: nothing before them wants any.

    A copy, as an input with images is one too: code is compiled apart for what a graph begins with.
    """
    return output.requires_grad_().clone() if torch.is_grad_enabled() else output


def _replace_modules(
    model: PreTrainedModel, modules: Mapping[LoraFlag, list[str]], of_tokens: RowScales, of_tower: RowScales
) -> list[Group]:
    """Put one that takes adapters in the place of every linear and of every layer's experts."""
    flags = {name: flag for flag, names in modules.items() for name in names}
    found: dict[tuple[LoraFlag, str, torch.Size], list[tuple[str, list[str], LoraLinear | ExpertAdapters]]] = {}
    in_order: list[str] = []
    for name in [name for name, _ in model.named_modules() if name in flags]:
        parent_name, _, last = name.rpartition(".")
        base = model.get_submodule(name)
        row = of_tower if flags[name] == "train_vision" else of_tokens
        ours = LoraLinear(base, row) if isinstance(base, nn.Linear) else LoraExperts(base, row)
        setattr(model.get_submodule(parent_name), last, ours)
        for kind, place, place_name, own_names in _matrices(name, ours):
            names = [name_in_files(model, one) for one in own_names]
            in_order += names
            member = (name_in_files(model, place_name), names, place)
            found.setdefault((flags[name], kind, place.matrix_shape), []).append(member)
    positions = {name: position for position, name in enumerate(in_order)}
    groups = []
    for (flag, _, _), members in found.items():
        place_names, names_of_places, places = zip(*members, strict=True)
        all_names = tuple(name for names in names_of_places for name in names)
        groups.append(Group(flag, all_names, places, place_names, tuple(positions[name] for name in all_names)))
    return groups


def _matrices(
    name: str, module: LoraLinear | LoraExperts
) -> Iterator[tuple[str, LoraLinear | ExpertAdapters, str, list[str]]]:
    """Of what `name` was: by kind, what computes with its adapters, its name and the matrices' own."""
    if isinstance(module, LoraLinear):
        yield name.rpartition(".")[2], module, name, [name]
        return
    for projection, adapters in module.adapters.items():
        names = [f"{name}.{i}.{projection}" for i in range(adapters.num_matrices)]
        yield f"expert {projection}", adapters, f"{name}.{EXPERT_STACKS[projection]}", names


def _initialise(adapter: Adapter) -> None:
    """Draw each A in the model's own order of modules, so that grouping does not change the numbers."""
    generator = torch.Generator().manual_seed((adapter.config.seed or 0) % 2**63)
    for name, tensor in adapter.tensors.items():
        if name.endswith("lora_A.weight"):
            fresh = torch.empty(tensor.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
            tensor.copy_(fresh)


def check_tensors(source: dict[str, Tensor], adapter: Adapter, where: str) -> None:
    """Raises InvalidInput where names or shapes differ from the adapter's."""
    tensors = adapter.tensors
    if source.keys() != tensors.keys():
        raise InvalidInput(f"{where}: the checkpoint trains other modules than this model")
    for name, tensor in tensors.items():
        if source[name].shape != tensor.shape:
            raise InvalidInput(
                f"{where}: {name} has shape {tuple(source[name].shape)}, this model's {tuple(tensor.shape)}:"
                " the LoRA ranks differ"
            )
