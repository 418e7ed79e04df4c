"""Protocols that LoRA adapters and full weights implement: one model, the weights a base computes with, the files."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from api_schemas.training import AdamParams, Layout, Trainable
from backends.formats.load_check import LoadCheck

GradientState = Literal["none", "whole", "incomplete"]
"""State of what was accumulated since the last optim_step; incomplete: a part of it failed."""


class TrainedModel(Protocol):
    """A client's model: its weights, their gradients, and its optimizer."""

    config: Trainable
    """The client's request."""
    optimizer: torch.optim.AdamW
    gradient: GradientState

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's part of the weights in float32, which the optimizer steps."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole model's parameters."""

    @property
    def training_bytes(self) -> int:
        """Device memory of this rank that it takes once it has been trained: weights, gradient, moments, in bytes."""

    @property
    def missing_bytes(self) -> int:
        """Device memory that it will take beside microbatches and has not taken yet, in bytes."""

    def move(self, device: torch.device) -> None:
        """Move weights, gradient and moments to a device. If it has no room, some may have moved."""

    def clear_gradient(self) -> None:
        """Drop the gradient, as after a step."""

    def sum_gradient(self) -> Tensor:
        """Sum the gradient over ranks, each its part, and return the L2 norm [] of the whole. All ranks fail, or
        none."""

    def prepare_step(self, adam: AdamParams, norm: Tensor) -> Callable[[], None]:
        """Try one step of torch.optim.AdamW, change nothing but the gradient, and return a function that takes the
        step; `norm` is that of the whole gradient.

        All ranks fail, or none. Raises InvalidInput if the result would not be finite. All memory is allocated here;
        if the function still fails, weights may be half of a step.
        """


M = TypeVar("M", bound=TrainedModel)
M_contra = TypeVar("M_contra", bound=TrainedModel, contravariant=True)


class TrainedWeights(Protocol[M]):
    """Creates models on a base, and makes the base compute with those of a microbatch."""

    base_is_frozen: bool
    """True if the base's own parameters want no gradient."""
    token_multiple: int
    """Packed microbatches are padded to a multiple of this many tokens."""

    def create(self, config: Trainable) -> M:
        """Make a fresh model. Raises InvalidInput."""

    def load(self, models: Sequence[M]) -> Tensor:
        """Make the base compute with these models, with gradients of 0. Return [models, R], the scales of a token of
        each model."""

    def blank(self, num_tokens: int) -> Tensor:
        """Return the scales [T, R] of tokens of no model, after `load([])`."""

    def use(self, scales_TR: Tensor) -> None:
        """Set the scales of the next forward's tokens."""

    def in_tower(self, scales_R: Tensor) -> AbstractContextManager[None]:
        """Inside, the vision tower computes for the one model with these scales."""

    @property
    def layouts(self) -> frozenset[Layout]:
        """The layouts of the loaded models, where these differ: each mix of them computes otherwise."""

    @property
    def accumulated(self) -> list[Tensor]:
        """The gradients accumulated since `load`."""

    def collect(self, models: Sequence[M]) -> None:
        """Add the gradients accumulated since `load` to each model's own, once."""

    def discard(self) -> None:
        """Drop the gradients accumulated since `load`, after a failed microbatch."""


class ModelFiles(Protocol[M_contra]):
    """Saves and loads models on all ranks together. A failure is raised on every rank and leaves the model as it
    was."""

    def save_sampler_weights(
        self, model: M_contra, directory: Path, load_check: LoadCheck, *, for_elsewhere: bool
    ) -> None:
        """Save what an engine loads, or with `for_elsewhere` what anybody loads. Raises InvalidInput if the weights or
        their scores are not finite."""

    def save_state(self, model: M_contra, directory: Path) -> None:
        """Save weights and optimizer. Raises InvalidInput if the weights are not finite."""

    def load_state(self, model: M_contra, directory: Path, *, with_optimizer: bool) -> None:
        """Load a saved state; the gradient is cleared, and without its state the optimizer starts afresh."""

    def begin_snapshot(self, model: M_contra, directory: Path) -> None:
        """Copy weights, optimizer and gradient, and begin to write the copy on rank 0."""

    def load_snapshot(self, model: M_contra, directory: Path) -> None:
        """Load weights, optimizer and gradient of a snapshot."""
