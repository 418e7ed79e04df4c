"""Puts modules that take adapters into a model, and groups their matrices.

A linear may have several adapters: of all its rows, or, in the layout of the hosted service, of some rows each
(`families/lora_names.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tinker_server.api_schemas.divided_linears import DividedLinear
from tinker_server.api_schemas.training import Layout
from tinker_server.backends.families.family import LoraFlag
from tinker_server.backends.families.lora_names import EXPERT_STACKS, UNGATED_STACKS, name_in_files, service_adapters
from tinker_server.backends.trainer.lora.experts import ExpertAdapters, LoraExperts
from tinker_server.backends.trainer.lora.linear import LinearAdapters, LoraLinear, TokenScales
from tinker_server.backends.trainer.lora.model import Group


class _Kind(NamedTuple):
    """What the matrices of a group have in common."""

    flag: LoraFlag
    name: str
    layout: Layout | None
    matrix_shape: torch.Size
    num_matrices: tuple[int, int]


class _Target(NamedTuple):
    """A target module of a group."""

    name: str
    names: list[str]
    """Of the tensors."""
    adapters: LinearAdapters | ExpertAdapters
    divided: tuple[str, DividedLinear] | None = None
    """The linear of which these are rows, by the last part of its name."""


def replace_modules(
    model: PreTrainedModel, modules: Mapping[LoraFlag, list[str]], of_text: TokenScales, of_tower: TokenScales
) -> list[Group]:
    """Replace every linear and every layer's experts by a module that takes adapters."""
    flags = {name: flag for flag, names in modules.items() for name in names}
    found: dict[_Kind, list[_Target]] = {}
    in_order: list[str] = []
    for name in [name for name, _ in model.named_modules() if name in flags]:
        base, scales = model.get_submodule(name), of_tower if flags[name] == "train_vision" else of_text
        replace_module = _replace_linear if isinstance(base, nn.Linear) else _replace_experts
        for matrix, layout, target in replace_module(model, name, scales):
            names = [name_in_files(model, own_name) for own_name in target.names]
            in_order += names
            shapes = (target.adapters.matrix_shape, target.adapters.num_matrices)
            member = target._replace(name=name_in_files(model, target.name), names=names)
            found.setdefault(_Kind(flags[name], matrix, layout, *shapes), []).append(member)
    positions = {name: position for position, name in enumerate(in_order)}
    return [_group(kind, members, positions, model) for kind, members in found.items()]


def _group(kind: _Kind, members: list[_Target], positions: Mapping[str, int], model: PreTrainedModel) -> Group:
    target_names, names_by_target, targets, divided = zip(*members, strict=True)
    assert all(each == divided[0] for each in divided), "linears of equal names have equal rows"
    names = tuple(name for own_names in names_by_target for name in own_names)
    places = tuple(positions[name] for name in names)
    group = Group(kind.flag, names, targets, target_names, places, kind.layout, divided=divided[0])
    if kind.layout == "service" and isinstance(members[0].adapters, ExpertAdapters):
        expert_matrix = name_in_files(model, f".{kind.name}").removeprefix(".")
        group = replace(group, num_matrices=kind.num_matrices, expert_matrix=expert_matrix)
    return group


_Found = tuple[str, Layout | None, _Target]
"""Kind of matrix, the layout whose models have it, and the target module."""


def _replace_linear(model: PreTrainedModel, name: str, scales: TokenScales) -> Iterator[_Found]:
    """Replace a linear; yield its adapters."""
    parent, _, last = name.rpartition(".")
    parts = service_adapters(model, name)
    linear = LoraLinear(model.get_submodule(name), scales, [] if parts is None else list(parts.values()))
    setattr(model.get_submodule(parent), last, linear)
    yield last, None if parts is None else "own", _Target(name, [name], linear.whole)
    rows = {part.rpartition(".")[2]: (own.begin, own.end, own.num_blocks) for part, own in (parts or {}).items()}
    divided = last, DividedLinear(linear.whole.matrix_shape[0], rows)
    for part, adapters in zip(parts or (), linear.parts, strict=True):
        yield part.rpartition(".")[2], "service", _Target(part, [part], adapters, divided)


def _replace_experts(model: PreTrainedModel, name: str, scales: TokenScales) -> Iterator[_Found]:
    """Replace a layer's experts; yield the adapters of their matrices."""
    parent, _, last = name.rpartition(".")
    experts = LoraExperts(model.get_submodule(name), scales)
    setattr(model.get_submodule(parent), last, experts)
    stacks = EXPERT_STACKS if experts.has_gate else UNGATED_STACKS
    for layout, matrices in experts.adapters.items():
        for projection, adapters in matrices.items():
            stack = f"{name}.{stacks[projection]}"
            own_names = [f"{name}.{i}.{projection}" for i in range(adapters.num_experts)]
            yield projection, layout, _Target(stack, own_names if layout == "own" else [stack], adapters)
