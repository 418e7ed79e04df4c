"""Ranks and devices: who am I, how the frozen base is sharded, how gradients are summed.

Adapters are whole on every rank and outside FSDP: their gradients are summed once per optim_step.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device


def join_world(device_kind: str) -> World:
    """Reads the launcher's variables (as torchrun sets them) and joins the process group when there are peers."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if device_kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size > 1:
        # gloo carries the small Python objects (errors, results), nccl the tensors.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=12))
    return World(rank, size, device)


def shard(model: nn.Module, layers: Iterable[nn.Module], world: World) -> None:
    """Shard the frozen base with FSDP2: one unit per decoder layer, the rest (embeddings, vision tower,
    head) in the root's unit, gathered by every rank at each forward whether or not it has an image."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sum_gradients(parameters: list[nn.Parameter], world: World) -> None:
    """Replace every gradient by its sum over ranks; a missing one counts as zero."""
    if world.size == 1:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


def gather_objects(value: Any, world: World) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.size > 1:
        gather_objects(None, world)
