"""All of a computation in float64, also what the product and transformers write as float32."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from backends.trainer.model import self_test


class _Widening(TorchFunctionMode):
    """Puts float64 in the place of float32 in every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*widened, **named)


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
