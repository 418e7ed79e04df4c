"""The type of what torch's autograd hands to a function's forward and backward."""

from typing import Protocol

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
