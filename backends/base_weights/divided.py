"""A base of which each of an engine's ranks holds a part: how a trainer's rank finds its parameters in all parts.

transformers makes the trainer's parameters of the files' tensors: it renames, stacks and concatenates them. So it gets
stand-ins: views of tensors as an undivided engine would have them, in addresses of which none has memory. A
parameter that is a view there tells by its address which tensors of the files it has, and where. Each rank knows which
parts of these its engine has. All parts of a parameter, of all ranks, are what is copied after a gathering.
"""

import mmap
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tinker_server.backends.base_weights.name_map import Part, View
from tinker_server.backends.protocol import BackendFailed

_PAGE = mmap.PAGESIZE
INSTEAD = "start with --base-copies 2"
MOST_PADDING = 30
"""Bytes of a matrix in fp8 that mean nothing: its scales, and its numbers, are filled up to a multiple of 16."""


@dataclass(frozen=True)
class Region:
    """Some numbers of a tensor: of any number of dimensions, whatever the tensor's."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the numbers of a tensor of one dimension. Shares its memory."""
        return flat.as_strided(self.shape, self.stride, int(flat.storage_offset()) + self.offset)

    @property
    def end(self) -> int:
        """The offset behind the last number."""
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class Copy:
    """A copy from what a rank has sent into a whole parameter."""

    rank: int
    block: int
    """Index among what each rank sends."""
    source: Region
    target: Region


@dataclass(frozen=True)
class Divided:
    """A parameter of which each rank has a part."""

    blocks: Sequence[Tensor]
    """What this rank sends to all: one run of numbers of each tensor of the engine that has some of the parameter's.
    Every rank sends as many."""
    copies: Sequence[Copy]
    """How the parameter is made of what all ranks have sent."""
    shape: tuple[int, ...]

    def fill(self, whole: Tensor, gathered: Sequence[Tensor]) -> None:
        """Make the parameter: `whole` is contiguous, and `gathered` has each block of all ranks, in their order."""
        flat = whole.view(-1)
        of_ranks = [
            sent.view(-1).unflatten(0, (-1, block.numel())) for sent, block in zip(gathered, self.blocks, strict=True)
        ]
        for copy in self.copies:
            copy.target.of(flat).copy_(copy.source.of(of_ranks[copy.block][copy.rank]))


class StandIns:
    """Tensors of the files that ranks have between them, as views of addresses without memory."""

    def __init__(
        self, views: Mapping[str, View], parts: Sequence[Mapping[str, Sequence[Part]]], held: Mapping[str, Tensor]
    ) -> None:
        """`views` are those of an undivided engine, `parts` those of each rank, of which some rank has some for each
        view, and `held` has this rank's tensors of the engine."""
        self._views, self._parts, self._held = views, parts, held
        of_ranks = {name: next(part for of_rank in parts for part in of_rank[name]) for name in views}
        dtypes = {view.tensor: held[of_ranks[name].view.tensor].dtype for name, view in views.items()}
        wholes = {view.tensor: view.whole_shape for view in views.values()}
        num_bytes = (torch.Size(wholes[name]).numel() * dtype.itemsize for name, dtype in dtypes.items())
        sizes = [-(-size // _PAGE) * _PAGE for size in num_bytes]
        self._begins = dict(zip(dtypes, accumulate(sizes, initial=0), strict=False))
        self._dtypes = dtypes
        self._memory = _without_memory(sum(sizes))
        self._by_whole: defaultdict[str, list[str]] = defaultdict(list)
        for name, view in views.items():
            self._by_whole[view.tensor].append(name)
        self._found: set[str] = set()
        """Names of the tensors that parameters were found to have."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the stand-in for each tensor, by its name in the files. Nothing may be read of it."""
        found = {}
        for name, view in self._views.items():
            dtype = self._dtypes[view.tensor]
            found[name] = (
                self._memory[self._begins[view.tensor] :]
                .view(dtype)
                .as_strided(view.shape, view.stride, self._begins[view.tensor] // dtype.itemsize + view.offset)
            )
        return found

    def has(self, parameter: Tensor) -> bool:
        """Return whether a parameter is a view of stand-ins."""
        return parameter.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def find(self, parameter: Tensor) -> Divided:
        """Return how a parameter is made, which is a view of stand-ins. Raises BackendFailed if it has other numbers
        than their tensors."""
        begin = int(parameter.storage_offset()) * parameter.itemsize
        whole = max((at, name) for name, at in self._begins.items() if at <= begin)[1]
        if parameter.dtype != self._dtypes[whole]:
            raise BackendFailed(f"{whole} of the engine has another type for the trainer; {INSTEAD}")
        own = Region(tuple(parameter.shape), parameter.stride(), (begin - self._begins[whole]) // parameter.itemsize)
        copies: dict[Region, tuple[int, str, Region]] = {}
        num_files = 0
        for name in self._by_whole[whole]:
            view = self._views[name]
            if not own.offset <= view.offset < own.end:
                continue
            self._found.add(name)
            num_files += 1
            for rank, of_rank in enumerate(self._parts):
                for part in of_rank[name]:
                    # Ranks may have the same numbers, as of key heads.
                    target = _place(own, Region(part.view.shape, *part.place_in(view)), whole)
                    source = Region(part.view.shape, part.view.stride, part.view.offset)
                    copies.setdefault(target, (rank, part.view.tensor, source))
        unfilled = parameter.numel() - sum(map(_count, copies))
        if not 0 <= unfilled <= num_files * (MOST_PADDING if parameter.dtype == torch.uint8 else 0):
            raise BackendFailed(f"the ranks of the engine have not all of {whole} between them; {INSTEAD}")
        return self._plan_sending(tuple(parameter.shape), copies)

    def _plan_sending(self, shape: tuple[int, ...], copies: Mapping[Region, tuple[int, str, Region]]) -> Divided:
        """Have each rank send, of each tensor, the run of numbers that has what any rank has of the parameter there."""
        names = sorted({name for _, name, _ in copies.values()})
        blocks, begins = [], []
        for name in names:
            sources = [source for _, tensor, source in copies.values() if tensor == name]
            begins.append(min(source.offset for source in sources))
            end = max(source.end for source in sources)
            blocks.append(self._held[name].view(-1)[begins[-1] : end])
        found = []
        for target, (rank, name, source) in copies.items():
            block = names.index(name)
            found.append(Copy(rank, block, replace(source, offset=source.offset - begins[block]), target))
        return Divided(blocks, merge(found), shape)

    def require_all_found(self, source: str) -> None:
        """Raise BackendFailed if no parameter is a view of some tensor: the trainer computes with what it makes of
        them, and there was nothing to read."""
        if left := sorted(self._views.keys() - self._found):
            raise BackendFailed(f"{source}: the trainer has {left[0]} otherwise than the engine; {INSTEAD}")


def merge(copies: Sequence[Copy]) -> list[Copy]:
    """Return the same copies as fewer: those that are equally far apart in both tensors, as of experts, become a copy
    of a dimension more."""
    alike: defaultdict[tuple[object, ...], list[Copy]] = defaultdict(list)
    for copy in copies:
        strides = copy.source.stride, copy.target.stride
        alike[copy.rank, copy.block, copy.source.shape, *strides].append(copy)
    in_order = (sorted(group, key=lambda copy: copy.target.offset) for group in alike.values())
    return [copy for group in in_order for copy in _merge_alike(group)]


def _merge_alike(copies: Sequence[Copy]) -> list[Copy]:
    steps = {
        (after.source.offset - before.source.offset, after.target.offset - before.target.offset)
        for before, after in pairwise(copies)
    }
    if len(steps) != 1:
        return list(copies)
    ((source_step, target_step),) = steps
    if source_step < 1:
        return list(copies)
    first = copies[0]

    def stack(region: Region, step: int) -> Region:
        return Region((len(copies), *region.shape), (step, *region.stride), region.offset)

    return [replace(first, source=stack(first.source, source_step), target=stack(first.target, target_step))]


def _place(own: Region, part: Region, whole: str) -> Region:
    """Return a part of a tensor as a region of a contiguous copy of `own`, which has it. Raises BackendFailed if it
    has not, or not in order."""
    contiguous = torch.empty(own.shape, device="meta").stride()
    if contiguous == own.stride:
        place = replace(part, offset=part.offset - own.offset)
        if place.offset < 0 or place.end > _count(own):
            raise BackendFailed(f"{whole} of the engine is no parameter of the trainer; {INSTEAD}")
        return place
    to = {step: dim for dim, (size, step) in enumerate(zip(own.shape, own.stride, strict=True)) if size > 1}
    left, offset = part.offset - own.offset, 0
    for step in sorted(to, reverse=True):
        at, left = divmod(left, step)
        offset += at * contiguous[to[step]]
    steps = []
    for size, step in zip(part.shape, part.stride, strict=True):
        if size > 1 and step not in to:
            raise BackendFailed(f"{whole} of the engine has its numbers in another order than the trainer; {INSTEAD}")
        steps.append(contiguous[to[step]] if size > 1 else 1)
    place = Region(part.shape, tuple(steps), offset)
    if left or place.end > _count(own):
        raise BackendFailed(f"{whole} of the engine is no parameter of the trainer; {INSTEAD}")
    return place


def _count(region: Region) -> int:
    return torch.Size(region.shape).numel()


def _without_memory(size_bytes: int) -> Tensor:
    """Return bytes that have addresses alone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that writing to it is undefined: it ends the process
        return torch.frombuffer(
            mmap.mmap(-1, max(size_bytes, _PAGE), flags=flags, prot=mmap.PROT_READ), dtype=torch.uint8
        )
