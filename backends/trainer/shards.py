"""Shards of tensors on a trainer's ranks: a tensor is flattened, padded with zeros and cut into equal contiguous parts.

The ranks of a machine have a tensor between them, and each of several machines has all of it: so nothing crosses the
network to be gathered, and what one machine has memory for, several have. Transfers pass through buffers of bounded
size: few collectives, and no second copy of everything. A buffer's memory is the only thing that a transfer allocates,
and ranks agree on it before the first collective. Knows no model.

N ranks of a machine, S numbers of a rank's shard of a tensor, W columns of a buffer
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.distributed import World, agreed

_BUFFER_BYTES, _ACROSS_BYTES = 256 << 20, 64 << 20
"""Largest buffer of all ranks' columns, and of what is summed over machines: past some 10 MiB a collective runs at the
speed of its links."""
# torch 2.13 has new names for both, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_size(num_elements: int, world: World) -> int:
    """Return S for a tensor of so many numbers, padding included; the same on every rank."""
    return -(-num_elements // world.machine.size)


def copy_own(shard_S: Tensor, begin: int, values: Tensor, world: World) -> None:
    """Copy the part of `values` that belongs to this rank. `begin`: their offset in the flattened tensor."""
    first = world.machine.rank * len(shard_S)
    low, high = max(begin, first), min(begin + values.numel(), first + len(shard_S))
    if low < high:
        shard_S[low - first : high - first].copy_(values.flatten()[low - begin : high - begin])


def reduce_scatter(tensors: Sequence[Tensor | None], shards: Sequence[Tensor], world: World) -> None:
    """Set every shard [S] to this rank's part of a tensor's sum over the machine's ranks. A missing tensor counts as
    zeros.

    All are of the same precision. All ranks fail, or none.
    """
    machine = world.machine
    buckets = _buckets([len(shard) for shard in shards], shards[0].dtype, machine)
    sent_NW, received_W = agreed(lambda: _buffers(buckets, shards[0], machine), world)
    for bucket in buckets:
        sent_NW.zero_()
        for columns in bucket:
            tensor = tensors[columns.tensor]
            if tensor is not None:
                for of_tensor, of_buffer in _views(tensor, columns, sent_NW):
                    of_buffer.copy_(of_tensor)
        _reduce_scatter(received_W, sent_NW.view(-1), group=machine.group)  # gloo takes no stack
        for columns in bucket:
            shards[columns.tensor][columns.of_shard].copy_(received_W[columns.of_buffer])


def sum_across(tensors: Sequence[Tensor], world: World) -> None:
    """Set every tensor to its sum over machines, of the ranks at this rank's place on each, which travels in
    `world.across_dtype`. The sum is bitwise the same on all of them. All ranks fail, or none."""
    if world.num_machines == 1:
        return
    dtype = world.across_dtype
    width = min(max(tensor.numel() for tensor in tensors), max(1, _ACROSS_BYTES // dtype.itemsize))
    buffer = agreed(lambda: torch.empty(width, dtype=dtype, device=tensors[0].device), world)
    for part in (part for tensor in tensors for part in tensor.view(-1).split(width)):
        sent = buffer[: len(part)].copy_(part)
        dist.all_reduce(sent, group=world.across.group)
        part.copy_(sent)


def require_equal_on_machines(checksums_N: Tensor, world: World) -> None:
    """Raise BackendFailed on all ranks unless every machine has computed the same checksums of its weights."""
    of_machines = [torch.empty_like(checksums_N) for _ in range(world.num_machines)]
    dist.all_gather(of_machines, checksums_N, group=world.across.group)

    def require() -> None:
        if not all(torch.equal(of_machine, checksums_N) for of_machine in of_machines):
            raise BackendFailed(
                "the machines of the trainer have computed different weights in one step: let only machines of one kind"
                " of processor and GPU join"
            )

    agreed(require, world)


def prepare_all_gather(shards: Sequence[Tensor], tensors: Sequence[Tensor], world: World) -> Callable[[], None]:
    """Return a function that sets every whole tensor on every rank from the shards [S] of its machine, rounded to the
    precision of `tensors`, which is the same for all.

    The memory that the function needs is allocated here: all ranks fail, or none.
    """
    machine = world.machine
    buckets = _buckets([len(shard) for shard in shards], tensors[0].dtype, machine)
    received_NW, sent_W = agreed(lambda: _buffers(buckets, tensors[0], machine), world)

    def gather() -> None:
        for bucket in buckets:
            for columns in bucket:
                sent_W[columns.of_buffer].copy_(shards[columns.tensor][columns.of_shard])
            _all_gather(received_NW.view(-1), sent_W, group=machine.group)
            for columns in bucket:
                for of_tensor, of_buffer in _views(tensors[columns.tensor], columns, received_NW):
                    of_tensor.copy_(of_buffer)

    return gather


def gather_to_rank_zero(shard: Tensor, shape: torch.Size, world: World) -> Tensor:
    """Gather a whole tensor in rank 0's host memory, from its machine alone; the other ranks get an empty tensor. The
    only rank of a machine returns the tensor itself. All ranks fail, or none."""
    machine = world.machine
    if machine.size == 1:
        return shard
    is_first, takes_part = world.rank == 0, world.across.rank == 0
    buckets = _buckets([len(shard)], shard.dtype, machine)

    def allocate() -> tuple[Tensor, Tensor, Tensor]:
        whole = torch.empty(shape if is_first else 0, dtype=shard.dtype)
        return whole, *_buffers(buckets, shard, machine)

    whole, received_NW, sent_W = agreed(allocate, world)
    for (columns,) in buckets:
        sent_W[columns.of_buffer].copy_(shard[columns.of_shard])
        if takes_part:
            dist.gather(sent_W, list(received_NW) if is_first else None, group=machine.group, group_dst=0)

        def empty_buffer(columns: _Columns = columns) -> None:
            if is_first:
                for tensor_part, buffer_part in _views(whole, columns, received_NW):
                    tensor_part.copy_(buffer_part)

        agreed(empty_buffer, world)
    return whole


def scatter_from_rank_zero(whole: Tensor | None, like: Tensor, world: World) -> Tensor:
    """Return this rank's shard of rank 0's tensor, with memory of its own and of the size, precision and device of
    `like`; what the others pass is ignored. It crosses the network once to each other machine. All ranks fail, or
    none."""
    if world.machine.size > 1:
        shard = _scatter_on_first_machine(whole, like, world)
    else:

        def copy() -> Tensor:
            return torch.empty_like(like.detach()) if whole is None else whole.to(like.device, like.dtype, copy=True)

        shard = agreed(copy, world)
    if world.num_machines > 1:
        dist.broadcast(shard, group=world.across.group, group_src=0)
    return shard


def _scatter_on_first_machine(whole: Tensor | None, like: Tensor, world: World) -> Tensor:
    """Return the shard of each rank of rank 0's machine; on other machines, memory for it."""
    machine, is_first, takes_part = world.machine, world.rank == 0, world.across.rank == 0
    buckets = _buckets([len(like)], like.dtype, machine)

    def allocate() -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(like.detach()), *_buffers(buckets, like, machine)

    shard, sent_NW, received_W = agreed(allocate, world)
    for (columns,) in buckets:

        def fill_buffer(columns: _Columns = columns) -> None:
            sent_NW.zero_()
            if whole is not None and is_first:
                for tensor_part, buffer_part in _views(whole, columns, sent_NW):
                    buffer_part.copy_(tensor_part)

        agreed(fill_buffer, world)
        if takes_part:
            dist.scatter(received_W, list(sent_NW) if is_first else None, group=machine.group, group_src=0)
        shard[columns.of_shard].copy_(received_W[columns.of_buffer])
    return shard


@dataclass(frozen=True)
class _Columns:
    """Columns that a buffer has of a tensor: the same numbers of every rank's shard."""

    tensor: int
    """Index of the tensor."""
    size: int
    """S of the tensor."""
    of_shard: slice
    of_buffer: slice


def _buckets(sizes: Sequence[int], dtype: torch.dtype, world: World) -> list[list[_Columns]]:
    """Divide the columns of shards of these sizes among as few buffers as hold them."""
    width = min(sum(sizes), max(1, _BUFFER_BYTES // (world.size * dtype.itemsize)))
    buckets: list[list[_Columns]] = [[]]
    end = 0
    for tensor, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if end == width:
                buckets.append([])
                end = 0
            count = min(size - begin, width - end)
            buckets[-1].append(_Columns(tensor, size, slice(begin, begin + count), slice(end, end + count)))
            begin, end = begin + count, end + count
    return buckets


def _buffers(buckets: Sequence[Sequence[_Columns]], like: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """Allocate [N, W] and [W] for the widest bucket, in the precision of `like`; unused columns are 0."""
    width = max(bucket[-1].of_buffer.stop for bucket in buckets)
    return (
        torch.zeros(world.size, width, dtype=like.dtype, device=like.device),
        torch.zeros(width, dtype=like.dtype, device=like.device),
    )


def _views(tensor: Tensor, columns: _Columns, buffer_NW: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of equal shape that hold the columns in a whole tensor, which has no padding, and in a buffer."""
    flat = tensor.view(-1)
    num_full, _ = divmod(len(flat), columns.size)
    last = flat[num_full * columns.size :][columns.of_shard]
    if num_full:
        yield (
            flat[: num_full * columns.size].view(num_full, columns.size)[:, columns.of_shard],
            buffer_NW[:num_full, columns.of_buffer],
        )
    if len(last):
        yield last, buffer_NW[num_full, columns.of_buffer][: len(last)]
