"""Find where the engine puts each tensor of a model's files, by watching the engine's own loading on meta tensors.

Query, key and value are row slices of a tensor there, experts are slices of a stack, and some tensors are transposed.
The map is not written down for any kind of model: each copy from a tensor of the files into a tensor of the engine's
is recorded, and copies of a tensor are joined if they form a single view. Of an engine of several ranks, each has parts
of some tensors. Knows neither vLLM nor transformers.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Strides = tuple[int, ...]
Load = Callable[[Iterable[tuple[str, Tensor]]], object]
Layouts = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Sizes and type of each tensor of the files, by its name."""


@dataclass(frozen=True)
class View:
    """A tensor of the files as a view of an engine's tensor."""

    tensor: str
    """Name of the engine's."""
    shape: tuple[int, ...]
    """Shape in the files."""
    stride: Strides
    """In numbers, for each dimension of `shape`."""
    offset: int
    """Numbers from the beginning of the engine's tensor."""
    whole_shape: tuple[int, ...]
    whole_stride: Strides
    """Layout of the engine's tensor when it was loaded."""

    def fits(self, whole: Tensor) -> bool:
        """Return whether the engine's tensor still has the layout that it was loaded in."""
        return whole.shape == self.whole_shape and whole.stride() == self.whole_stride

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of the engine's tensor. Shares its memory."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Part:
    """A part of a tensor of the files, as a view of an engine's tensor: what one of its ranks has of it."""

    begin: tuple[int, ...]
    """Index in the files' tensor of the first number."""
    steps: Strides
    """Numbers of the files' tensor, which is contiguous, from one to the next of each dimension. A part of bytes may
    have more dimensions than they."""
    view: View

    def place_in(self, view: View) -> tuple[Strides, int]:
        """Return strides and offset of the part in the tensor of which the whole tensor of the files is a view."""
        if len(view.shape) == 1:
            return tuple(step * view.stride[0] for step in self.steps), view.offset + self.begin[0] * view.stride[0]
        return view.stride, view.offset + sum(at * step for at, step in zip(self.begin, view.stride, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """The part's place in the files' tensor, if it has as many dimensions."""
        return tuple(slice(at, at + size) for at, size in zip(self.begin, self.view.shape, strict=True))


def trace_loading(load: Load, parameters: Mapping[str, Tensor], files: Layouts) -> dict[str, View]:
    """Return the view for each tensor of the files that `load` copies unchanged into one of `parameters`.

    `load` takes names and tensors of the files, as vLLM's load_weights does, and `parameters` are on the meta device.
    A tensor that is computed with before it is copied or in its place, or whose copies are no single view, is left out.
    """
    found = _trace(load, parameters, files)
    views = {}
    for name, copies in found.copies.items():
        into = copies[0].into
        if all(copy.into == into for copy in copies):
            pairs = [(copy.source, copy.target) for copy in copies]
            view = _join(into, found.sources[name], parameters[into], pairs)
            if view is not None:
                views[name] = view
    return views


def trace_parts(load: Load, parameters: Mapping[str, Tensor], files: Layouts) -> dict[str, list[Part]]:
    """Return, as `trace_loading`, the parts of each tensor of the files that `load` copies into `parameters`, which are
    those of one rank. A tensor of which a copy is no view is left out; a rank may have nothing of some."""
    found = _trace(load, parameters, files)
    parts = {}
    for name, copies in found.copies.items():
        file = found.sources[name]
        of_copies = [_part(copy.into, file, parameters[copy.into], copy.source, copy.target) for copy in copies]
        if all(part is not None for part in of_copies):
            parts[name] = [part for part in of_copies if part is not None]
    return parts


@dataclass(frozen=True)
class _Copy:
    """A copy from a part of a tensor of the files into a part of the parameter `into`."""

    into: str
    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class _Traced:
    """What a loading has copied."""

    sources: Mapping[str, Tensor]
    """The files' tensors."""
    copies: Mapping[str, Sequence[_Copy]]
    """By the files' tensor, but those into parameters that were computed with."""


def _trace(load: Load, parameters: Mapping[str, Tensor], files: Layouts) -> _Traced:
    sources = {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, (shape, dtype) in files.items()}
    targets: dict[int, str] = {}
    for name, parameter in parameters.items():
        targets.setdefault(_storage(parameter), name)  # of tied tensors, the first name
    with _Copies() as traced:
        load(iter(sources.items()))
    names = {_storage(tensor): name for name, tensor in sources.items()}
    copies: dict[str, list[_Copy]] = defaultdict(list)
    computed: set[str] = set()  # as Mamba2's A, minus the exponential of what was copied there before
    for source, target in traced.found:
        if _storage(source) in names and _storage(target) in targets:
            copies[names[_storage(source)]].append(_Copy(targets[_storage(target)], source, target))
        elif _storage(target) in targets:
            computed.add(targets[_storage(target)])
    right = {name: of for name, of in copies.items() if all(copy.into not in computed for copy in of)}
    return _Traced(sources, right)


class _Copies(TorchDispatchMode):
    """Records source and target of every copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator, and record it if it is a copy: torch's hook."""
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if source.numel():
                self.found.append((source, target))
            if source.is_meta:  # a few parameters are made with memory, whatever device is the default
                return target
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _join(name: str, file: Tensor, whole: Tensor, copies: Sequence[Sequence[Tensor]]) -> View | None:
    """Return the one view that all copies of `file` are parts of; None if there is none."""
    if any(source.shape != target.shape for source, target in copies):
        return None  # repeated
    if sum(source.numel() for source, _ in copies) != file.numel():
        return None
    strides: dict[int, int] = {}
    for source, target in copies:
        dims = _dims(file, source, target)
        if dims is None or any(strides.setdefault(dim, step) != step for dim, (_, step) in dims.items()):
            return None
    origins = [(_index(file, int(source.storage_offset())), int(target.storage_offset())) for source, target in copies]
    (first, first_offset), *others = origins
    for index, offset in others:
        moved = {dim: to - begin for dim, (begin, to) in enumerate(zip(first, index, strict=True)) if to != begin}
        rest = offset - first_offset - sum(by * strides[dim] for dim, by in moved.items() if dim in strides)
        unknown = [dim for dim in moved if dim not in strides]
        if len(unknown) == 1 and rest % moved[unknown[0]] == 0:
            strides[unknown[0]] = rest // moved[unknown[0]]
        elif unknown or rest:
            return None
    stride = tuple(strides.get(dim, 1) for dim in range(file.dim()))
    if any(size > 1 and dim not in strides for dim, size in enumerate(file.shape)) or min(stride, default=1) < 1:
        return None
    begin = first_offset - sum(at * step for at, step in zip(first, stride, strict=True)) - int(whole.storage_offset())
    return View(name, tuple(file.shape), stride, begin, tuple(whole.shape), whole.stride()) if begin >= 0 else None


def _part(name: str, file: Tensor, whole: Tensor, source: Tensor, target: Tensor) -> Part | None:
    """Return the part of `file` that a copy has put into `whole`; None if it is no view."""
    begin = _index(file, int(source.storage_offset()))
    offset = int(target.storage_offset()) - int(whole.storage_offset())
    layout = tuple(whole.shape), whole.stride()
    if file.dim() == 1 and source.shape == target.shape:
        return Part(begin, source.stride(), View(name, tuple(source.shape), target.stride(), offset, *layout))
    dims = _dims(file, source, target) if source.shape == target.shape else None
    if dims is None:
        return None
    shape = tuple(dims[dim][0] if dim in dims else 1 for dim in range(file.dim()))
    stride = tuple(dims[dim][1] if dim in dims else 1 for dim in range(file.dim()))
    if math.prod(shape) != source.numel() or min(stride, default=1) < 1:
        return None
    return Part(begin, file.stride(), View(name, shape, stride, offset, *layout))


def _dims(file: Tensor, source: Tensor, target: Tensor) -> dict[int, tuple[int, int]] | None:
    """Return, for each dimension of `file` in which `source` has several numbers, how many, and the target's stride."""
    by_stride = {step: dim for dim, (step, size) in enumerate(zip(file.stride(), file.shape, strict=True)) if size > 1}
    found = {}
    for size, step, target_step in zip(source.shape, source.stride(), target.stride(), strict=True):
        left = size
        while left > 1:  # a dimension of the source may be several of the file
            dim = by_stride.get(step)
            if dim is None:
                return None
            here = math.gcd(left, file.shape[dim]) if left > file.shape[dim] else left
            if left > here and here != file.shape[dim]:
                return None
            found[dim] = here, target_step
            left, step, target_step = left // here, step * here, target_step * here
    return found


def _index(file: Tensor, offset: int) -> tuple[int, ...]:
    """Return the index of the number at an offset of the file's contiguous tensor."""
    index = []
    for step in file.stride():
        index.append(offset // step if step else 0)
        offset -= index[-1] * step
    return tuple(index)
