"""Ranks and devices: joining the process group, sharding the base, summing gradients, agreeing on errors, time limits.

Adapters are outside FSDP: `shards.py` has how ranks share them.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from tinker_server.backends.protocol import BackendFailed, InvalidInput

log = logging.getLogger(__name__)
K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Never reached: the server ends a hanging group earlier."""
# Time limits notice what will never end, so each is about ten times what a slow machine needs.
_FLOPS = {"cpu": 2e9, "cuda": 2e12}
"""Floating-point operations a second: a tenth of two busy cores, a fiftieth of a data-centre GPU."""
_IMAGE_S = 30
"""Decoding and processing the largest image, 50 megapixels, took 3 s."""
_BODY_BYTES_PER_S = 500_000
"""Decoding and checking JSON runs at 5 MB/s or more."""
_FILE_BYTES_PER_S = 2_000_000
"""A network disk; with fsync."""
_SAMPLED_BYTES_PER_S = 20_000_000
"""A core samples 700 MB/s, if it has nothing else to do: each rank samples the whole model."""
_NETWORK_BYTES_PER_S = 10_000_000
"""Between machines: less than a tenth of 1 Gbit/s."""


@dataclass(frozen=True)
class World:
    """This process among its peers: all ranks of a trainer, or some of them."""

    rank: int
    size: int
    device: torch.device
    across_dtype: torch.dtype = torch.float32
    """Precision in which gradients travel between machines."""
    num_machines: int = 1
    """Machines that have the ranks, as many each: first those of the first machine, then those of the next."""
    group: dist.ProcessGroup | None = None
    """The ranks' group; None: the default one."""
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    """With several machines the group of this one's ranks, and that of the ranks that have the same place on each."""
    num_slices: int = 1
    """So many consecutive ranks compute each packed microbatch together, each a slice of its tokens."""
    slices_group: dist.ProcessGroup | None = None
    """With several slices the group of those that compute this rank's microbatch."""

    @property
    def machine(self) -> "World":
        """The ranks of this machine."""
        if self.groups is None:
            return self
        num_own = self.size // self.num_machines
        return World(self.rank % num_own, num_own, self.device, group=self.groups[0])

    @property
    def across(self) -> "World":
        """The ranks that have the same place on each machine, by machine."""
        if self.groups is None:
            return World(0, 1, self.device)
        return World(self.rank // self.machine.size, self.num_machines, self.device, group=self.groups[1])

    @property
    def context(self) -> "World":
        """The ranks that compute this rank's packed microbatch, by slice."""
        if self.slices_group is None:
            return World(0, 1, self.device)
        return World(self.rank % self.num_slices, self.num_slices, self.device, group=self.slices_group)

    @property
    def num_microbatches(self) -> int:
        """Number of packed microbatches that are computed side by side."""
        return self.size // self.num_slices

    @property
    def microbatch(self) -> int:
        """Number of this rank's microbatch among them."""
        return self.rank // self.num_slices


ALONE = World(0, 1, torch.device("cpu"))
"""A process without peers."""


def join_world(
    device_kind: str,
    gpu_memory_fraction: float = 1.0,
    across_dtype: torch.dtype = torch.float32,
    num_slices: int = 1,
) -> World:
    """Read the launcher's variables (as torchrun sets them) and join the process group if there are peers.

    `num_slices` divides the ranks of each machine. MASTER_LISTEN_FD, if set, is rank 0's socket for the group's
    rendezvous, bound and listening.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    num_machines = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
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
    groups = None if num_machines == 1 else _groups(size, num_machines)
    slices = None if num_slices == 1 else _subgroup(_consecutive(size, num_slices))
    return World(
        rank, size, device, across_dtype, num_machines, groups=groups, num_slices=num_slices, slices_group=slices
    )


def _groups(size: int, num_machines: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the groups of `World.groups`: every rank takes part in making all."""
    num_own = size // num_machines
    places = [list(range(place, size, num_own)) for place in range(num_own)]
    return _subgroup(_consecutive(size, num_own)), _subgroup(places)


def _consecutive(size: int, num_own: int) -> list[list[int]]:
    return [list(range(first, first + num_own)) for first in range(0, size, num_own)]


def _subgroup(ranks: list[list[int]]) -> dist.ProcessGroup:
    """Make all groups of these ranks, and return this rank's own."""
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=_COLLECTIVE_TIMEOUT)
    assert isinstance(own, dist.ProcessGroup)
    return own


class Root(nn.Module):
    """The base as FSDP2's root: inside a call through it, parameters that belong to no layer are all-gathered."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, which may use any part of the model. If that is sharded, all ranks call it with functions
        that run the same layers."""
        return function(*args, **kwargs)


def shard(root: Root, layers: Iterable[nn.Module], world: World, whole: set[nn.Parameter]) -> None:
    """Shard the base with FSDP2: a unit per decoder layer, the rest (embeddings, vision tower, head) in the root's
    unit, which every rank all-gathers at each forward whether or not it has an image. `world` has one machine's
    ranks, each of which has the parameters of `whole` in any case."""
    group = world.group or dist.group.WORLD
    assert group is not None, "only several ranks share a base"
    mesh = DeviceMesh.from_group(group, world.device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # of gradients, if the base itself trains
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=whole)
    fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=whole)


def sum_on_rank_zero(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Move the sum over ranks of every gradient to rank 0; the others keep none. A missing tensor counts as zeros.

    All ranks fail, and keep their own gradients, or none.
    """
    if world.size == 1:
        return
    for parameter, gradient in zip(parameters, whole_gradients(parameters, world), strict=True):
        dist.reduce(gradient, group=world.group, group_dst=0)
        if world.rank != 0:
            parameter.grad = None


def whole_gradients(parameters: Sequence[nn.Parameter], world: World) -> list[Tensor]:
    """Set every missing gradient to zeros, and return all. All ranks fail, or none."""

    def fill() -> list[Tensor]:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    return agreed(fill, world)


def total_norm(gradients: Sequence[Tensor], world: World) -> Tensor:
    """Return the L2 norm [] of a gradient of which every rank of a machine has a part. All ranks fail, or none."""
    norm = agreed(lambda: torch.nn.utils.get_total_norm(list(gradients)), world)
    if world.machine.size == 1:
        return norm
    square = norm.double() ** 2
    dist.all_reduce(square, group=world.machine.group)
    return square.sqrt().to(norm.dtype)


def gather_objects(value: T, world: World) -> list[T]:
    """Return every rank's value, in rank order, on every rank."""
    if world.size == 1:
        return [value]
    values = [value] * world.size
    dist.all_gather_object(values, value, world.group)
    return values


def largest(value: int, world: World) -> int:
    """Return the largest of the ranks' values on every rank."""
    if world.size == 1:
        return value
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX, world.group)
    return int(found.item())


def agreed(action: Callable[[], T], world: World) -> T:
    """Return `action`'s value once it has ended on every rank; if it fails on any of them, all raise.

    `action` holds no collective. InvalidInput is raised as it was, anything else as BackendFailed: every rank then
    knows the error, and they go on together.
    """
    values, errors = agreed_each({"": action}, world)
    for error in errors.values():
        try:
            raise error
        finally:
            # Or error, traceback and this frame keep each other alive, and all that callers' frames have.
            del error, errors
    return values[""]


def on_rank_zero(action: Callable[[], T], world: World) -> T | None:
    """Run `action` on rank 0 alone; return its value there and None elsewhere. If it fails, all raise, as in
    `agreed`."""
    return agreed(lambda: action() if world.rank == 0 else None, world)


def agreed_each(
    actions: Mapping[K, Callable[[], T]], world: World
) -> tuple[dict[K, T], dict[K, InvalidInput | BackendFailed]]:
    """Act as `agreed`, for several actions at once: return their values here, and the errors of those that failed on
    any rank.

    Ranks may have different actions.
    """
    values: dict[K, T] = {}
    errors: dict[K, InvalidInput | BackendFailed] = {}
    for key, action in actions.items():
        try:
            values[key] = action()
        except Exception as raised:  # noqa: BLE001 - it is broadcast to every rank
            errors[key] = to_broadcast(raised).with_traceback(None)
    if world.size > 1 and largest(int(bool(errors)), world):
        # Every rank picks the same error: the request's own fault, if a rank found that.
        everyones = [error for of_rank in gather_objects(errors, world) for error in of_rank.items()]
        errors = dict(sorted(everyones, key=lambda item: isinstance(item[1], InvalidInput)))
    return {key: value for key, value in values.items() if key not in errors}, errors


def to_broadcast(error: Exception) -> InvalidInput | BackendFailed:
    """Convert an error to one that every rank may raise. If it is not the request's, it is logged as it was.

    After an error of the device itself, such as a failed assertion in a kernel, nothing in this process can use the
    device any more: the process ends, and the next one restores what ran.
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
    if isinstance(error, SafetensorError):  # a full disk too
        return BackendFailed(f"a file cannot be read or written: {error}")
    return BackendFailed(f"{type(error).__name__}: {error}")


def from_rank_zero(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Broadcast rank 0's CPU tensors to every rank; what the others pass is ignored."""
    if world.size == 1:
        return tensors
    layout = gather_objects({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, world)[0]

    def buffer(name: str) -> Tensor:
        shape, dtype = layout[name]
        return tensors[name].contiguous() if world.rank == 0 else torch.empty(shape, dtype=dtype)

    received = agreed(lambda: {name: buffer(name) for name in layout}, world)
    for tensor in received.values():
        dist.broadcast(tensor, group=world.group, group_src=0)
    return received


def decoding_s(size_bytes: int) -> float:
    """Return the seconds to decode and check a request's body."""
    return size_bytes / _BODY_BYTES_PER_S


def microbatch_s(num_tokens: int, num_images: int, num_parameters: int, device: torch.device) -> float:
    """Return the seconds for forward, recomputation of the head, and backward: about 8 operations per token and
    parameter."""
    return 8 * num_tokens * num_parameters / _FLOPS[device.type] + num_images * _IMAGE_S


def network_s(size_bytes: int) -> float:
    """Return the seconds to sum so many bytes over machines."""
    return 2 * size_bytes / _NETWORK_BYTES_PER_S


def sampling_s(size_bytes: int) -> float:
    """Return the seconds to sample the weights of a new model."""
    return size_bytes / _SAMPLED_BYTES_PER_S


def files_s(size_bytes: int) -> float:
    """Return the seconds to read or write files and make them durable."""
    return size_bytes / _FILE_BYTES_PER_S
