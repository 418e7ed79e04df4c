"""Files of a LoRA model. Rank 0 alone reads and writes whole tensors, so that ranks cannot see different files.

A failure is raised on every rank and leaves the model as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinker_server.api_schemas.adapter_names import layout_of
from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.protocol import ADAPTER_FILE
from tinker_server.backends.trainer import checkpoint_files
from tinker_server.backends.trainer.distributed import World, gather_objects, on_rank_zero
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.lora.saved_adapter import read_adapter
from tinker_server.backends.trainer.optimizer import GradientState


class LoraFiles:
    """Saves and loads models, on all ranks together."""

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
        """Save the adapter alone, not durable yet: with `for_elsewhere` in float32 and under the names of `tensors`,
        else as the engine beside the trainer loads it.

        Raises InvalidInput if the adapter or its scores are not finite.
        """

        dtype = torch.float32 if for_elsewhere else self._dtype
        checkpoint_files.require_finite(model.parameters, self._world)
        wholes = model.halves(dtype)

        def write(aside: Path) -> None:
            load_check.check_finite()
            halves = host_halves(wholes, dtype)
            if for_elsewhere:
                tensors = model.name_tensors([(a_LrI, b_LOr.mT) for a_LrI, b_LOr in halves])
                metadata = load_check.to_metadata() | model.file_metadata
                checkpoint_files.write_adapter(aside, tensors, model.config, self._base_model, metadata)
            else:
                stacks = [(targets, *half) for targets, half in zip(model.target_modules, halves, strict=True)]
                checkpoint_files.write_stacked(aside, stacks, model.config, self._base_model, load_check)

        checkpoint_files.write_on_rank_zero(directory, write, self._world, durable=False)

    def save_state(self, model: LoraModel, directory: Path) -> None:
        """Save adapter and optimizer. Raises InvalidInput if the adapter is not finite."""
        checkpoint_files.require_finite(model.parameters, self._world)
        weights, moments = model.masters(), model.optimizer_state()

        def write(aside: Path) -> None:
            checkpoint_files.write_adapter(aside, weights, model.config, self._base_model, model.file_metadata)
            checkpoint_files.write_optimizer(aside, moments)

        checkpoint_files.write_on_rank_zero(directory, write, self._world)

    def with_layout_in(self, config: Trainable, directory: Path) -> Trainable:
        """Return the config of a model that loads the weights in a directory: with the layout that their file tells.
        All ranks call it."""

        def read() -> Layout | None:
            try:
                with safe_open(directory / ADAPTER_FILE, "pt") as file:
                    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
                    return layout_of(shapes, config.rank, file.metadata() or {})
            except (OSError, SafetensorError):
                return None  # reading the tensors says what is wrong

        own = on_rank_zero(read, self._world)
        found = gather_objects(own, self._world)[0]
        return config if found is None else config.model_copy(update={"layout": found})

    def load_state(self, model: LoraModel, directory: Path, *, with_optimizer: bool) -> None:
        """Load a saved adapter; the gradient is cleared, and without its state the optimizer starts afresh."""

        def read() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            weights = read_adapter(
                directory, model.tensors, has_tower=model.config.train_vision, divided=model.divided_linears
            )
            return weights, checkpoint_files.read_optimizer(directory) if with_optimizer else {}

        weights, moments = on_rank_zero(read, self._world) or ({}, {})
        model.take(model.prepare_state(weights, moments))

    def begin_snapshot(self, model: LoraModel, directory: Path) -> None:
        """Copy adapter, optimizer and the accumulated gradient; rank 0's thread writes the copy."""
        if model.gradient == "whole":
            model.move_gradient()  # or the next step would count it again
        checkpoint_files.require_finite(model.parameters, self._world)
        wholes = (model.masters(), model.optimizer_state())

        def copy() -> Callable[[Path], None]:
            config, metadata, state = model.config, model.file_metadata, model.gradient
            # What was gathered from several ranks is a copy already.
            weights, moments = wholes if self._world.machine.size > 1 else map(_copy, wholes)
            gradient = _copy(model.gradients)

            def write(aside: Path) -> None:
                checkpoint_files.write_adapter(aside, weights, config, self._base_model, metadata)
                checkpoint_files.write_optimizer(aside, moments)
                checkpoint_files.write_gradient(aside, gradient, state)

            return write

        write = on_rank_zero(copy, self._world)
        if write is not None:
            self._snapshots.begin(directory, write)

    def load_snapshot(self, model: LoraModel, directory: Path) -> None:
        """Load a snapshot; rank 0 gets the gradient, which is the sum over ranks."""
        self.load_state(model, directory, with_optimizer=True)

        def read() -> GradientState:
            gradient, state = checkpoint_files.read_gradient(directory)
            if gradient:
                model.set_gradient(gradient)
            return state

        state = on_rank_zero(read, self._world) or "none"
        model.gradient = gather_objects(state, self._world)[0]


def host_halves(halves: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Copy layer-stacked adapters, A [L, r, I] and B [L, r, O], to host memory, laid out as files have them: A
    [L, r, I] and B [L, O, r].

    A few large copies instead of two per linear; the device has rounded and transposed them before.
    """
    copies = []
    for a_LrI, b_LrO in halves:
        rounded_a_LrI, b_LOr = a_LrI.to(dtype), b_LrO.to(dtype).transpose(1, 2).contiguous()
        copies.append((_on_host(rounded_a_LrI), _on_host(b_LOr)))
    if halves[0][0].is_cuda:
        torch.cuda.synchronize()
    return copies


def _on_host(tensor: Tensor) -> Tensor:
    """Copy from a GPU to pinned memory; the copy may still be under way."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy to CPU memory that later operations do not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
