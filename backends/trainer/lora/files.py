"""Files of a LoRA model. Rank 0 alone reads and writes, so that ranks cannot see different files.

A failure is raised on every rank and leaves the model as it was.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from backends.formats.load_check import LoadCheck
from backends.protocol import InvalidInput
from backends.trainer import checkpoint_files
from backends.trainer.distributed import World, agreed, from_rank_zero, gather_objects, on_rank_zero, sum_gradients
from backends.trainer.lora.model import LoraModel
from backends.trainer.optimizer import all_finite
from backends.trainer.trained_weights import GradientState


class LoraFiles:
    """`ModelFiles` of LoRA models."""

    def __init__(
        self, base_model: str, dtype: torch.dtype, world: World, snapshots: checkpoint_files.SnapshotWriter
    ) -> None:
        """`dtype` is the base's, and the engine's."""
        self._base_model = base_model
        self._dtype = dtype
        self._world = world
        self._snapshots = snapshots

    def save_sampler_weights(
        self, model: LoraModel, directory: Path, load_check: LoadCheck, *, for_elsewhere: bool
    ) -> None:
        """Save the adapter alone, not durable yet: with `for_elsewhere` in float32 and as PEFT and vLLM load it, else
        as the engine beside the trainer does.

        Raises InvalidInput if the adapter or its scores are not finite.
        """

        def write(aside: Path) -> None:
            load_check.check_finite()
            if for_elsewhere:
                halves = [(a_LrI, b_LOr.mT) for a_LrI, b_LOr in host_halves(model, torch.float32)]
                tensors = model.named(halves)
                checkpoint_files.write_adapter(aside, tensors, model.config, self._base_model, load_check)
            else:
                halves = host_halves(model, self._dtype)
                stacks = [(targets, *half) for targets, half in zip(model.target_modules, halves, strict=True)]
                checkpoint_files.write_stacked(aside, stacks, model.config, self._base_model, load_check)

        self._write(model, directory, write, durable=False)

    def save_state(self, model: LoraModel, directory: Path) -> None:
        """Save adapter and optimizer. Raises InvalidInput if the adapter is not finite."""

        def write(aside: Path) -> None:
            checkpoint_files.write_adapter(aside, model.tensors, model.config, self._base_model)
            checkpoint_files.write_optimizer(aside, model.optimizer_state())

        self._write(model, directory, write)

    def load_state(self, model: LoraModel, directory: Path, *, with_optimizer: bool) -> None:
        """Load a saved state; the gradient is cleared, and without its state the optimizer starts afresh."""
        weights = self._read(lambda: checkpoint_files.read_adapter(directory))
        moments = self._read(lambda: checkpoint_files.read_optimizer(directory)) if with_optimizer else {}
        prepared = agreed(lambda: model.prepared(weights, moments), self._world)
        model.clear_gradient()
        model.restore(prepared)

    def begin_snapshot(self, model: LoraModel, directory: Path) -> None:
        """Copy adapter, optimizer and the accumulated gradient; rank 0's thread writes the copy."""
        if model.gradient == "whole":
            sum_gradients(model.parameters, self._world)
            if self._world.rank != 0:  # or the next step would count it again
                model.optimizer.zero_grad(set_to_none=True)

        def copy() -> Callable[[Path], None]:
            self._require_finite(model)
            config, state = model.config, model.gradient
            parts = (model.tensors, model.optimizer_state(), model.gradients)
            weights, moments, gradient = (_copied(part) for part in parts)

            def write(aside: Path) -> None:
                checkpoint_files.write_adapter(aside, weights, config, self._base_model)
                checkpoint_files.write_optimizer(aside, moments)
                checkpoint_files.write_gradient(aside, gradient, state)

            return write

        write = on_rank_zero(copy, self._world)
        if write is not None:
            self._snapshots.begin(directory, write)

    def load_snapshot(self, model: LoraModel, directory: Path) -> None:
        """Load a snapshot; rank 0 gets the gradient, which is the sum over ranks."""
        self.load_state(model, directory, with_optimizer=True)

        def read() -> tuple[list[Tensor], GradientState]:
            gradient, state = checkpoint_files.read_gradient(directory)
            return model.stacked(gradient) if gradient else [], state

        gradient, state = on_rank_zero(read, self._world) or ([], "none")
        for parameter, one in zip(model.parameters, gradient, strict=bool(gradient)):
            parameter.grad = one
        model.gradient = gather_objects(state, self._world)[0]

    def _write(self, model: LoraModel, directory: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
        def write_finite() -> None:
            self._require_finite(model)
            checkpoint_files.write_directory(directory, write, durable=durable)

        on_rank_zero(write_finite, self._world)

    def _require_finite(self, model: LoraModel) -> None:
        if not all_finite(list(model.parameters)):
            raise InvalidInput("the model's weights hold NaN or infinity and cannot be saved")

    def _read(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        return from_rank_zero(on_rank_zero(read, self._world) or {}, self._world)


def host_halves(model: LoraModel, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Copy layer-stacked adapters to host memory, laid out as files have them: A [L, r, I] and B [L, O, r].

    A few large copies instead of two per linear; the device has rounded and transposed them before.
    """
    halves = []
    for stack in model.stacks:
        a_LrI, b_LOr = stack.a_LrI.data.to(dtype), stack.b_LrO.data.to(dtype).transpose(1, 2).contiguous()
        halves.append((_on_host(a_LrI), _on_host(b_LOr)))
    if model.stacks[0].a_LrI.is_cuda:
        torch.cuda.synchronize()
    return halves


def _on_host(tensor: Tensor) -> Tensor:
    """Copy from a GPU to pinned memory; the copy may still be under way."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy to CPU memory that later operations do not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
