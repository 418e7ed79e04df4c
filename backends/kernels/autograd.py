"""The context of autograd functions, and when they must be operators of torch.library."""

from typing import Protocol

import torch
from torch import Tensor


class Context(Protocol):
    """Carries from forward to backward."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that forward saved, in its order."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save inputs and outputs. Called once, in forward."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Name the inputs that forward has changed in place."""


def needs_operator(x: Tensor) -> bool:
    """Return whether a function of x must be called as an operator of torch.library: on CUDA and in compiled code. On a
    CPU the dispatch of an operator with lists of tensors takes longer than a small product."""
    return x.is_cuda or torch.compiler.is_compiling()
