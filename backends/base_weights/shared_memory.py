"""Tensors of a process that others map: on the CPU, in place of CUDA's handles.

The memory has no name in any directory: whoever knows the process that made it, and is the same user, may map it, and
it lasts until the last mapping ends. Others map it read-only, so that a write ends the writer instead of changing a
model.
"""

import fcntl
import mmap
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; torch's own allocator gives no less."""
_ADD_SEALS, _SEAL_FUTURE_WRITE = 1033, 16
"""Linux's fcntl: no mapping that is made later may write."""


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in memory that is shared."""

    pid: int
    """The process that made it, which must live when it is mapped."""
    fd: int
    begin: int
    """Byte at which its storage begins."""
    size_bytes: int
    """Bytes of its storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Numbers from the beginning of the storage."""

    def map(self) -> Tensor:
        """Return the tensor, which must not be written to."""
        memory = _memory(self.pid, self.fd)[self.begin : self.begin + self.size_bytes]
        return memory.view(self.dtype).as_strided(self.shape, self.stride, memory_offset(memory, self))


def memory_offset(memory: Tensor, shared: SharedTensor) -> int:
    """Return the offset of a tensor in the storage of all, in numbers of its type."""
    return memory.storage_offset() // shared.dtype.itemsize + shared.offset


@dataclass(frozen=True)
class PickledAsTensor:
    """A tensor that arrives in another process as a mapping of its memory."""

    shared: SharedTensor

    def __reduce__(self) -> tuple[object, ...]:
        """Have it unpickled as the tensor."""
        return SharedTensor.map, (self.shared,)


def share(tensors: Iterable[Tensor]) -> dict[int, SharedTensor]:
    """Move tensors into shared memory; each then has its contents there. Return them by id.

    Tensors that share a storage still do. Nothing of them may be written to afterwards.
    """
    found = list(tensors)
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in found}
    begins, total = {}, 0
    for key, storage in storages.items():
        begins[key] = total
        total += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    fd = os.memfd_create("base-weights", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, max(total, 1))
    shared = {}
    memory = torch.frombuffer(mmap.mmap(fd, max(total, 1)), dtype=torch.uint8)
    for key, storage in storages.items():
        part = memory[begins[key] : begins[key] + storage.nbytes()]
        part.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for one in found:
        key = one.untyped_storage()._cdata
        size_bytes, offset = storages[key].nbytes(), int(one.storage_offset())
        shape, stride = tuple(one.shape), tuple(one.stride())
        shared[id(one)] = SharedTensor(os.getpid(), fd, begins[key], size_bytes, one.dtype, shape, stride, offset)
    for one in found:
        place = shared[id(one)]
        part = memory[place.begin : place.begin + place.size_bytes]
        one.data = part.view(place.dtype).as_strided(place.shape, place.stride, memory_offset(part, place))
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_FUTURE_WRITE)
    return shared


@lru_cache(maxsize=8)
def _memory(pid: int, fd: int) -> Tensor:
    """Return all bytes, mapped read-only."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    try:
        mapping = mmap.mmap(opened, 0, prot=mmap.PROT_READ)
    finally:
        os.close(opened)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that writing to it is undefined: it ends the process
        return torch.frombuffer(mapping, dtype=torch.uint8)
