"""What a base's rows, steps and files ask of what is trained on it: adapters of many models, or one model's all."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from api_schemas.training import AdamParams, Trainable
from backends.formats.load_check import Canary
from backends.trainer.checkpoint_files import GradientState
from backends.trainer.distributed import World


class TrainedModel(Protocol):
    """One model's tensors."""

    @property
    def config(self) -> Trainable:
        """What was asked for."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Float32, with their gradients."""


class TrainedWeights(Protocol):
    """Makes models on a base, and has it compute with those of a row. Models are what `create` gave."""

    def create(self, config: Trainable) -> Any:
        """A fresh model. Raises InvalidInput."""

    def load(self, models: Sequence[Any]) -> Tensor:
        """Have the base compute with these, with gradients of 0: [models, R], the scales of a token of each model."""

    def blank(self, num_tokens: int) -> Tensor:
        """[T, R] scales of tokens of no model, after `load([])`."""

    def use(self, scales_TR: Tensor) -> None:
        """The next forward is of a row whose tokens have these scales."""

    def in_tower(self, scales_R: Tensor) -> AbstractContextManager[None]:
        """Inside, the vision tower computes for the one model with these scales."""

    @property
    def gathered(self) -> list[Tensor]:
        """The gradients of the rows since `load`."""

    def collect(self, models: Sequence[Any]) -> None:
        """Add the gradients of the rows since `load` to each model's own: once."""

    def discard(self) -> None:
        """Forget the gradients since `load`: of a row that failed."""


class AnyTenant(Protocol):
    """A model of a client, with its optimizer."""

    adapter: Any
    """A TrainedModel."""
    optimizer: torch.optim.AdamW
    gradient: GradientState

    @property
    def missing_bytes(self) -> int:
        """What it will take of the device's memory beside rows, and has not taken yet."""

    def clear_gradient(self) -> None:
        """As after a step."""

    def sum_gradient(self, world: World) -> Tensor:
        """[] L2 norm of the gradient, of which every rank then has the sum over ranks. All ranks fail, or none."""

    def before_step(self, adam: AdamParams, norm: Tensor) -> Any:
        """What `restore` takes. Raises InvalidInput where it is known already that `step` would."""

    def step(self, adam: AdamParams, norm: Tensor) -> None:
        """One step of torch.optim.AdamW; `norm` is the whole gradient's. Raises InvalidInput for what is then not
        finite, and must be undone."""

    def restore(self, snapshot: Any) -> None:
        """Everything that a step changes is as it was."""


class AnyFiles(Protocol):
    """What the ranks save and load together; whatever fails, fails on all, and leaves the tenant as it was."""

    def save_adapter(self, tenant: Any, directory: Path, canary: Canary, *, for_elsewhere: bool) -> None:
        """What an engine loads, or anybody where it is `for_elsewhere`. Raises InvalidInput where it, or how it scores,
        is not finite."""

    def save_state(self, tenant: Any, directory: Path) -> None:
        """Weights and optimizer. Raises InvalidInput where the weights are not finite."""

    def load_state(self, tenant: Any, directory: Path, *, with_optimizer: bool) -> None:
        """Read a saved state; the gradient is cleared."""

    def begin_snapshot(self, tenant: Any, directory: Path) -> None:
        """Copy weights, optimizer and gradient, and have rank 0's thread write the copy."""

    def written(self, directory: Path) -> Future[None]:
        """A snapshot that was begun: done when it is there."""

    def load_all(self, tenant: Any, directory: Path) -> None:
        """What a snapshot is of."""
