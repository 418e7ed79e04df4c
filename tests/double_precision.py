"""All of a computation in float64, also what the product and transformers write as float32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tinker_server.backends.trainer.model import self_test

_OF_BYTES = (torch.frombuffer, torch.asarray, torch.Tensor.view)
"""Functions whose dtype says what bytes of a file are."""


class _Widening(TorchFunctionMode):
    """Puts float64 in the place of float32 in every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _OF_BYTES:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch._grouped_mm:
            return _grouped_mm(*args, **(kwargs or {}))
        widened = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*widened, **named)


def _grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor, **_: object) -> Tensor:
    """Return torch's grouped product, which has no float64: of the rows [T, I] of each expert with its matrix
    [E, I, O], or, for two matrices [R, T] and [T, N], the product [E, R, N] of each expert's part of T."""
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if right.dim() == 2:
        return torch.stack([left[:, group] @ right[group] for group in groups])
    parts = [left[group] @ matrix for group, matrix in zip(groups, right, strict=True)]
    return torch.cat([*parts, left.new_zeros(len(left) - ends[-1], right.shape[-1])])


def _from_numpy(array: np.ndarray) -> Tensor:
    return _own_from_numpy(array.astype(np.float64) if array.dtype == np.float32 else array)


_own_from_numpy = torch.from_numpy


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, tensors are made and computed in float64, those of files and arrays in float32 included."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "from_numpy", _from_numpy)
            patch.setitem(self_test._TOLERANCE, torch.float64, (1e-9, 1e-9))
            yield
    finally:
        torch.set_default_dtype(torch.float32)
