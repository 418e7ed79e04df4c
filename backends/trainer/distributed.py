"""Ranks and devices: who am I, how the frozen base is sharded, how gradients are summed, how ranks agree.

Adapters are whole on every rank and outside FSDP: their gradients are summed once per optim_step.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from backends.protocol import BackendFailed, InvalidInput

log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longer than any rank waits for another: the server ends a group that hangs long before."""


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device


def join_world(device_kind: str, gpu_memory_fraction: float = 1.0) -> World:
    """Reads the launcher's variables (as torchrun sets them) and joins the process group when there are peers.

    Where MASTER_LISTEN_FD is set, rank 0 finds the socket of the group's meeting there, bound and listening.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if device_kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.cuda.set_per_process_memory_fraction(gpu_memory_fraction, device)
    if size > 1:
        # gloo carries the small Python objects (errors, results), nccl the tensors.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        listening = os.environ.get("MASTER_LISTEN_FD") if rank == 0 else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=rank == 0,
            timeout=_COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=None if listening is None else int(listening),
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_COLLECTIVE_TIMEOUT)
    return World(rank, size, device)


class Root(nn.Module):
    """The frozen base as FSDP2's root: what is called through it finds all that belongs to no layer gathered."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` returns, which may use any part of the model. Where that is sharded, all ranks call it with
        what runs the same layers."""
        return function(*args, **kwargs)


def shard(root: Root, layers: Iterable[nn.Module], world: World) -> None:
    """Shard the base with FSDP2: one unit per decoder layer, the rest (embeddings, vision tower,
    head) in the root's unit, gathered by every rank at each forward whether or not it has an image."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # of gradients, where the base itself trains
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def sum_gradients(parameters: list[nn.Parameter], world: World) -> None:
    """Replace every gradient by its sum over ranks; a missing one counts as zero. All ranks fail, or none."""
    if world.size == 1:
        return

    def flatten() -> Tensor:
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])

    flat = agreed(flatten, world)
    dist.all_reduce(flat)

    def unflatten() -> list[Tensor]:
        pieces = flat.split([p.numel() for p in parameters])
        return [piece.view_as(parameter).clone() for parameter, piece in zip(parameters, pieces, strict=True)]

    for parameter, gradient in zip(parameters, agreed(unflatten, world), strict=True):
        parameter.grad = gradient


def gather_objects(value: Any, world: World) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def agreed(action: Callable[[], T], world: World) -> T:
    """What `action` returns here, once it has ended on every rank; where it fails on any of them, all raise.

    `action` holds no collective. InvalidInput is raised as it was, anything else as BackendFailed: what
    went wrong is then known to all, and the ranks can go on together.
    """
    values, errors = agreed_each({"": action}, world)
    for error in errors.values():
        raise error
    return values[""]


def agreed_each(
    actions: Mapping[K, Callable[[], T]], world: World
) -> tuple[dict[K, T], dict[K, InvalidInput | BackendFailed]]:
    """As `agreed`, for several at once: what each returns here, and the errors of those that failed on any rank.

    Ranks may have different ones to do.
    """
    values: dict[K, T] = {}
    errors: dict[K, InvalidInput | BackendFailed] = {}
    for key, action in actions.items():
        try:
            values[key] = action()
        except Exception as raised:  # noqa: BLE001 - every rank is told of it
            errors[key] = told(raised)
    if world.size > 1:
        any_failed = torch.tensor(int(bool(errors)))
        dist.all_reduce(any_failed, dist.ReduceOp.MAX)
        if any_failed.item():
            # Every rank picks the same one: the request's own fault, if a rank found that.
            everyones = [one for of_rank in gather_objects(errors, world) for one in of_rank.items()]
            errors = dict(sorted(everyones, key=lambda one: isinstance(one[1], InvalidInput)))
    return {key: value for key, value in values.items() if key not in errors}, errors


def told(error: Exception) -> InvalidInput | BackendFailed:
    """An error as every rank may raise it; where it is not the request's, the log gets it as it was.

    After an error of the device itself, such as a failed assertion in a kernel, nothing in this process can use the
    device any more: the process ends, and what ran is restored in the next one.
    """
    if isinstance(error, (InvalidInput, BackendFailed)):
        return error
    log.error("a rank failed", exc_info=error)
    if isinstance(error, torch.AcceleratorError):
        raise SystemExit("the device cannot be used any more by this process") from error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return BackendFailed(f"out of GPU memory; send shorter or fewer datums at once ({error})")
    if isinstance(error, MemoryError):
        return BackendFailed("out of memory; send shorter or fewer datums at once")
    if isinstance(error, OSError):
        return BackendFailed(f"a file cannot be read or written: {error.strerror or type(error).__name__}")
    if isinstance(error, SafetensorError):  # of a full disk too
        return BackendFailed(f"a file cannot be read or written: {error}")
    return BackendFailed(f"{type(error).__name__}: {error}")


def from_rank_zero(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Rank 0's CPU tensors, on every rank; what the others pass is ignored."""
    if world.size == 1:
        return tensors
    layout = gather_objects({name: (one.shape, one.dtype) for name, one in tensors.items()}, world)[0]

    def place(name: str) -> Tensor:
        shape, dtype = layout[name]
        return tensors[name].contiguous() if world.rank == 0 else torch.empty(shape, dtype=dtype)

    received = agreed(lambda: {name: place(name) for name in layout}, world)
    for tensor in received.values():
        dist.broadcast(tensor, src=0)
    return received
