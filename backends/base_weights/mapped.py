"""Map a base's weights from the process that holds them, and compare them with the files. Imports no vLLM: that would
switch off the trainer's fastest attention."""

import logging
import math
import pickle
import random
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinker_server.backends.base_weights.divided import StandIns
from tinker_server.backends.base_weights.name_map import Part, View
from tinker_server.backends.base_weights.shared_memory import SharedTensor
from tinker_server.backends.formats import mxfp4
from tinker_server.backends.formats.base_files import weight_files
from tinker_server.backends.formats.block_fp8 import BLOCK, SCALE, dequantised, halves, packed, packed_bytes, round_up
from tinker_server.backends.formats.fp8_at_load import Origin, find_origins, quantise
from tinker_server.backends.formats.model_files import tensor_layouts
from tinker_server.backends.formats.packed import byte_shape
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
T = TypeVar("T")
GET_VIEWS = {"cmd": "get_views"}
"""A request to the holder, answered with `tensors` and `views`."""
Handle = SharedTensor | tuple[Callable[..., Tensor], tuple[object, ...]]
"""A tensor of the holder's: in shared memory, or as torch sends a GPU's tensor."""
_LENGTH = struct.Struct("!Q")
"""The length of a message, as vLLM's weight cache sends it."""
_TIMEOUT_S = 300.0
_SMALL = 1 << 20
"""Numbers of a tensor that is no matrix of a layer."""
_SAMPLED = 1 << 14
"""Numbers of the largest tensor that is compared whole."""
_ROWS = 4
"""Rows of each block that is compared."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorInFile(Protocol):
    """A tensor whose parts are read when they are indexed."""

    def get_shape(self) -> list[int]:
        """Return the sizes of its dimensions."""

    def get_dtype(self) -> str:
        """Return its type, as the file names it."""

    def __getitem__(self, index: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Read a part."""


class _File(Protocol):
    """An opened safetensors file."""

    def get_slice(self, name: str) -> TensorInFile:
        """Return a tensor that is not read yet."""


@dataclass(frozen=True)
class InFp8:
    """A tensor in fp8, dequantised when it is read."""

    weight: TensorInFile
    scale: TensorInFile
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        """Return the sizes of its dimensions."""
        return self.weight.get_shape()

    def get_dtype(self) -> str:
        """Return the type that it has when it is read, as a file names it."""
        return _NAMES[self.dtype]

    def __getitem__(self, index: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Read a part."""
        if index is Ellipsis:
            return dequantised(self.weight[...], self.scale[...], self.dtype)
        # Rows of a part of a stack: those of their blocks that come before are dequantised too.
        *stacked, rows = index
        first = rows.start // BLOCK
        weight = self.weight[(*stacked, slice(first * BLOCK, rows.stop))]
        scale = self.scale[(*stacked, slice(first, -(-rows.stop // BLOCK)))]
        return dequantised(weight, scale, self.dtype)[..., rows.start - first * BLOCK :, :]


class Files:
    """The tensors of a model's safetensors files, by name: packed, if they are of `staying`, which names a stack in
    MXFP4 by what is before the endings of its two tensors; others in fp8 as if they were in `dtype`. Matrices of
    `staying` that files without quantisation have are quantised; they stand in the place of the tensors that have
    them."""

    def __init__(self, directory: Path, dtype: torch.dtype, staying: Collection[str] = ()) -> None:
        self._dtype, self._staying = dtype, staying
        self._opened = ExitStack()
        self._by_name: dict[str, _File] = {}
        for path in weight_files(directory):
            file = self._opened.enter_context(safe_open(path, "pt"))
            self._by_name |= dict.fromkeys(file.keys(), file)
        self._in_mxfp4 = [name for name in staying if f"{name}{mxfp4.BLOCKS}" in self._by_name]
        self._origins = find_origins(tensor_layouts(directory), sorted(staying)) if staying else {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def layouts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each tensor of a type that models compute in. A layer's experts stand side by side:
        vLLM makes the names of a layer's experts once for each row of them."""
        found = {}
        for name in self.names():
            if name in self._staying:
                found[name] = byte_shape(self._shape(name)), torch.uint8
            elif (kind := (tensor := self.slice(name)).get_dtype()) in _DTYPES:
                found[name] = tuple(tensor.get_shape()), _DTYPES[kind]
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a tensor that stays packed."""
        if (origin := self._origins.get(name)) is not None:
            return origin.shape
        shape = self._halves(name)[0].get_shape()
        return (*shape[:2], shape[2] * mxfp4.BLOCK) if name in self._in_mxfp4 else tuple(shape)

    def names(self) -> list[str]:
        """Return all names but those of scales."""
        hidden = {origin.tensor for origin in self._origins.values()}
        hidden |= {f"{name}{ending}" for name in self._in_mxfp4 for ending in (mxfp4.BLOCKS, mxfp4.SCALES)}
        own = [name for name in self._by_name if not name.endswith(SCALE) and name not in hidden]
        return [*own, *self._origins, *self._in_mxfp4]

    def slice(self, name: str) -> TensorInFile:
        """Return a tensor whose parts are read when they are indexed."""
        if f"{name}{SCALE}" in self._by_name:
            return InFp8(*self._halves(name), self._dtype)
        return self._by_name[name].get_slice(name)

    def _halves(self, name: str) -> tuple[TensorInFile, TensorInFile]:
        names = (name, f"{name}{SCALE}")
        if name in self._in_mxfp4:
            names = (f"{name}{mxfp4.BLOCKS}", f"{name}{mxfp4.SCALES}")
        numbers, scales = (self._by_name[half].get_slice(half) for half in names)
        return numbers, scales

    def tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        if (origin := self._origins.get(name)) is not None:
            return packed(*quantise(origin.read(self.slice(origin.tensor))))
        if name not in self._staying:
            return self.slice(name)[...]
        both = (half[...] for half in self._halves(name))
        return mxfp4.pack(*both) if name in self._in_mxfp4 else packed(*both)

    def require_same_packed(self, name: str, view: Tensor) -> None:
        """Raise BackendFailed unless numbers and scales of a packed tensor are, in some blocks, those of the files."""
        shape = self._shape(name)
        if (origin := self._origins.get(name)) is not None:
            _require_same_quantised(name, *halves(view, *shape), origin, self.slice(origin.tensor))
            return
        numbers, scales = self._halves(name)
        if name in self._in_mxfp4:
            held_numbers, held_scales = mxfp4.halves(view, shape[2])
            held_numbers = held_numbers.unflatten(-1, (-1, mxfp4.BLOCK // 2))
        else:
            held_numbers, held_scales = halves(view, *shape)
        require_same(name, held_numbers, numbers.get_shape(), numbers)
        require_same(f"{name}, scales", held_scales, scales.get_shape(), scales)

    def require_same_part_packed(self, name: str, view: Tensor, part: Part) -> None:
        """Raise BackendFailed unless a rank's part of the bytes of a matrix in fp8 is, in some blocks, that of the
        files: of numbers or of scales."""
        num_rows, num_columns = self._shape(name)
        begin_of_numbers = packed_bytes(num_rows, num_columns) - round_up(num_rows * num_columns)
        are_scales = part.begin[0] < begin_of_numbers
        width = 4 * -(-num_columns // BLOCK) if are_scales else num_columns
        first_row, first_column = divmod(part.begin[0] - (0 if are_scales else begin_of_numbers), width)
        for index in _blocks(name, view):
            (rows,) = index or (slice(0, len(view)),)
            begin, end = first_row + rows.start, first_row + rows.stop
            read = self._read_fp8(name, begin, end, are_scales=are_scales)
            found = read.contiguous().view(torch.uint8)[:, first_column : first_column + view.shape[1]]
            _require_bits(name, view[rows], found, index)

    def _read_fp8(self, name: str, begin: int, end: int, *, are_scales: bool) -> Tensor:
        """Read rows of a matrix in fp8, or the scales, in float32, of rows of its blocks."""
        if (origin := self._origins.get(name)) is None:
            numbers, scales = self._halves(name)
            return scales[begin:end,].float() if are_scales else numbers[begin:end,]
        first, last = (begin, end) if are_scales else (begin // BLOCK, -(-end // BLOCK))
        numbers_NK, scales_IJ = quantise(origin.read(self.slice(origin.tensor), first * BLOCK, last * BLOCK))
        return scales_IJ if are_scales else numbers_NK[begin - first * BLOCK : end - first * BLOCK]


@dataclass(frozen=True)
class _Held:
    """What a holder has of a model's files."""

    tensors: Mapping[str, Tensor]
    """The engine's, by its names."""
    views: Mapping[str, View]
    """Where it has the files' tensors that it has whole, by their names."""
    divided: Mapping[str, View]
    """Where an undivided engine would have those that ranks have between them."""
    parts: Mapping[str, Sequence[Part]]
    """The parts of them that are here."""


def map_views(base_socket: Path, device: torch.device) -> dict[str, Tensor]:
    """Ask the holder for its weights; return each tensor of the files that is whole among them, by its name there.

    They share the holder's memory, and must not be written to. Raises BackendFailed.
    """
    held = _ask(base_socket, device)
    return {name: view.of(held.tensors[view.tensor]) for name, view in held.views.items()}


def _ask(base_socket: Path, device: torch.device) -> _Held:
    """Ask a holder for what it has, and map that."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(str(base_socket))
            request = pickle.dumps(GET_VIEWS)
            connection.sendall(_LENGTH.pack(len(request)) + request)
            with connection.makefile("rb") as stream:
                (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                answer = pickle.loads(stream.read(length))  # from our own process, in the user's own directory
    except (OSError, struct.error, EOFError) as error:
        raise BackendFailed(f"the process that holds the weights does not answer at {base_socket}: {error}") from None
    if answer["status"] != "ok":
        raise BackendFailed(f"the process that holds the weights gives none: {answer['message']}")
    tensors = {name: _map(shared, device) for name, shared in answer["tensors"].items()}
    return _Held(tensors, answer["views"], answer["divided"], answer["parts"])


def _map(shared: Handle, device: torch.device) -> Tensor:
    if isinstance(shared, SharedTensor):
        return shared.map()
    rebuild, args = shared
    # torch's seventh argument is the number of the GPU, which another process may count otherwise.
    return rebuild(*args[:6], device.index, *args[7:])


@dataclass(frozen=True)
class BaseTensors:
    """All tensors of a model's files, by name."""

    mapped: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    """Read into memory of this process."""
    stand_ins: StandIns
    """For those that ranks have between them."""

    def all(self) -> dict[str, Tensor]:
        """Return every tensor, or its stand-in."""
        return {**self.mapped, **self.own, **self.stand_ins.tensors()}

    def without_copies(self) -> "JoinedViews":
        """Return the mode in which what is mapped, or stood in for, is not copied."""
        return JoinedViews({**self.mapped, **self.stand_ins.tensors()})

    @cached_property
    def storages(self) -> set[int]:
        """Addresses of what is mapped."""
        return {_storage(one) for one in self.mapped.values()}

    def has_mapped(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in mapped memory."""
        return _storage(tensor) in self.storages


def alone(value: T) -> list[T]:
    """Return the values of all ranks that map a copy of a base, if it is one."""
    return [value]


@dataclass(frozen=True)
class Source:
    """A model's files, and what holds their tensors for this rank."""

    directory: Path
    base_socket: Path
    device: torch.device
    dtype: torch.dtype
    staying: Collection[str] = ()
    """Names of the tensors that stay packed."""


def map_tensors(source: Source, exchange: Callable[[object], list[Any]] = alone) -> BaseTensors:
    """Return all tensors of the model's files, mapped where the holder has them, else read into own memory.

    `exchange` returns the values of all ranks that have the base between them: all map the same. Raises BackendFailed
    where a sample of what is mapped is not what the files say: numbers would be wrong.
    """
    held = _ask(source.base_socket, source.device)
    with Files(source.directory, source.dtype, source.staying) as files:
        layouts = files.layouts()

        def is_good(name: str, tensor: str) -> bool:
            return name in layouts and _is_as_good(held.tensors[tensor], layouts[name], source.dtype)

        views = {name: view for name, view in held.views.items() if is_good(name, view.tensor)}
        parts = {
            name: found for name, found in held.parts.items() if all(is_good(name, part.view.tensor) for part in found)
        }
        everyones: list[tuple[set[str], Mapping[str, Sequence[Part]]]] = exchange((set(views), parts))
        whole = set.intersection(*(of_rank for of_rank, _ in everyones))
        divided = set.intersection(*(set(of_rank) for _, of_rank in everyones))
        # A rank may have nothing of a tensor; where no rank has, all of them make something else of it.
        divided = {name for name in divided if any(of_rank[name] for _, of_rank in everyones)}
        mapped, own = {}, {}
        for name in files.names():
            if name in whole:
                mapped[name] = views[name].of(held.tensors[views[name].tensor])
                _require_held(files, name, mapped[name], None, stays=name in source.staying)
            elif name in divided:
                for part in parts[name]:
                    view = part.view.of(held.tensors[part.view.tensor])
                    _require_held(files, name, view, part, stays=name in source.staying)
            else:
                log.info("%s: the trainer keeps its own copy of %s", source.directory, name)
                own[name] = files.tensor(name)
    of_ranks = [found for _, found in everyones]
    return BaseTensors(mapped, own, StandIns({n: held.divided[n] for n in sorted(divided)}, of_ranks, held.tensors))


def _require_held(files: Files, name: str, view: Tensor, part: Part | None, *, stays: bool) -> None:
    """Raise BackendFailed unless a held tensor, or a part of it, is in some blocks what the files have."""
    if part is None and stays:
        files.require_same_packed(name, view)
    elif part is None:
        file = files.slice(name)
        require_same(name, view, file.get_shape(), file)
    elif stays:
        files.require_same_part_packed(name, view, part)
    else:
        require_same(name, view, part.view.shape, _PartInFile(files.slice(name), part.index))


@dataclass(frozen=True)
class _PartInFile:
    """A part of a tensor, of which parts are read."""

    whole: TensorInFile
    place: tuple[slice, ...]

    def get_shape(self) -> list[int]:
        """Return the sizes of its dimensions."""
        return [place.stop - place.start for place in self.place]

    def get_dtype(self) -> str:
        """Return its type, as the file names it."""
        return self.whole.get_dtype()

    def __getitem__(self, index: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Read a part of the part."""
        inner = () if index is Ellipsis else index
        moved = [slice(at.start + one.start, at.start + one.stop) for at, one in zip(self.place, inner, strict=False)]
        rows = self.whole[(*moved, *self.place[len(inner) :])[:-1]] if len(self.place) > 1 else self.whole[...]
        return rows[..., self.place[-1]]


def _is_as_good(held: Tensor, layout: tuple[tuple[int, ...], torch.dtype], dtype: torch.dtype) -> bool:
    """Return whether the trainer may have a tensor of this layout as the engine has it. A small tensor, which it may
    keep more exactly than its matrices, only if nothing was rounded."""
    shape, file_dtype = layout
    is_exact = torch.promote_types(held.dtype, file_dtype) == held.dtype
    return is_exact or (held.dtype == dtype and math.prod(shape) > _SMALL)


def require_same(name: str, view: Tensor, shape: Sequence[int], file: TensorInFile) -> None:
    """Raise BackendFailed unless blocks of rows of a mapped tensor are bitwise those of the file."""
    if tuple(view.shape) != tuple(shape):
        raise BackendFailed(f"{name} has shape {tuple(view.shape)} where it is held, and {tuple(shape)} in the files")
    for index in _blocks(name, view):
        _require_bits(name, view[index], file[index] if index else file[...], index)


def _require_bits(name: str, view: Tensor, read: Tensor, index: tuple[slice, ...]) -> None:
    wanted, got = read.to(view.dtype).contiguous(), view.contiguous().cpu()
    if not torch.equal(got.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)):
        raise BackendFailed(
            f"{name}: the shared copy differs from the file at {index or 'every index'}, because the engine stores"
            " another layout. Start with --base-copies 2"
        )


def _require_same_quantised(
    name: str, numbers_NK: Tensor, scales_IJ: Tensor, origin: Origin, file: TensorInFile
) -> None:
    """Raise BackendFailed unless blocks of held numbers, with their scales, are what the files are quantised to: each
    is quantised once."""
    for index in _blocks(name, numbers_NK):
        (rows,) = index or (slice(0, len(numbers_NK)),)
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        whole = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        numbers, scales = quantise(origin.read(file, whole.start, whole.stop))
        _require_bits(name, numbers_NK[whole], numbers, index)
        _require_bits(f"{name}, scales", scales_IJ[blocks], scales, index)


def _blocks(name: str, view: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield parts to compare: the first and the last rows of the first and the last matrix, and some between."""
    if view.numel() <= _SAMPLED or view.dim() < 2:
        yield ()
        return
    *stacked, rows, _ = view.shape
    chosen = random.Random(name)
    between = [chosen.randrange(size) for size in stacked], chosen.randrange(rows)
    for matrix, row in (([0] * len(stacked), 0), between, ([size - 1 for size in stacked], rows - _ROWS)):
        begin = max(0, min(row, rows - _ROWS))
        yield (*(slice(at, at + 1) for at in matrix), slice(begin, begin + _ROWS))


class JoinedViews(TorchDispatchMode):
    """While it is active, neighbours in mapped memory are stacked and concatenated by a view of all, not by a copy; and
    mapped tensors stay on their device."""

    def __init__(self, mapped: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {_storage(one) for one in mapped.values()}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run the operator."""
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.stack.default, aten.cat.default) and self.has(args[0][0]):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            joined = (join_stacked if func is aten.stack.default else join_concatenated)(args[0], dim)
            if joined is not None:
                return joined
        if func is aten._to_copy.default and self.has(args[0]) and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0].as_strided(args[0].shape, args[0].stride(), args[0].storage_offset())
        return func(*args, **kwargs)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is mapped."""
        return not tensor.is_meta and _storage(tensor) in self._storages


def join_stacked(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return torch.stack of tensors that are equally far apart in memory, as a view; None if they are not."""
    first, *others = tensors
    steps = {
        int(after.storage_offset()) - int(before.storage_offset())
        for before, after in zip(tensors, others, strict=False)
    }
    if not others or not _alike(tensors) or len(steps) != 1 or min(steps) < 1:
        return None
    at = dim % (first.dim() + 1)
    shape, stride = list(first.shape), list(first.stride())
    shape.insert(at, len(tensors))
    stride.insert(at, steps.pop())
    return first.as_strided(shape, stride, first.storage_offset())


def join_concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return torch.cat of tensors that follow each other in memory, as a view; None if they do not."""
    first, *others = tensors
    at = dim % first.dim()
    if not others or not _alike(tensors, but=at):
        return None
    offset = first.storage_offset()
    for before, after in zip(tensors, others, strict=False):
        offset += before.shape[at] * before.stride(at)
        if after.storage_offset() != offset:
            return None
    shape = list(first.shape)
    shape[at] = sum(tensor.shape[at] for tensor in tensors)
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _alike(tensors: Sequence[Tensor], but: int | None = None) -> bool:
    """Return whether all are in one storage and have one layout, but for the size of one dimension."""
    layouts = {
        (
            _storage(tensor),
            tensor.dtype,
            tensor.stride(),
            tuple(size for dim, size in enumerate(tensor.shape) if dim != but),
        )
        for tensor in tensors
    }
    return len(layouts) == 1


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is the same for all that share it."""
    return tensor.untyped_storage().data_ptr()
