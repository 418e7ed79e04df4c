"""A tenant's weights in files. Rank 0 alone reads and writes, so that ranks cannot see different files.

Whatever fails, fails on every rank, and leaves the tenant as it was.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from backends.formats.load_check import Canary
from backends.protocol import InvalidInput
from backends.trainer import checkpoint_files
from backends.trainer.distributed import World, agreed, from_rank_zero, gather_objects, sum_gradients, told
from backends.trainer.lora.adapters import Adapter
from backends.trainer.lora.tenant import Tenant, all_finite

T = TypeVar("T")


class WeightFiles:
    """What the ranks save and load together."""

    def __init__(self, base_model: str, dtype: torch.dtype, world: World) -> None:
        """`dtype` is the base's, and the engine's."""
        self._base_model = base_model
        self._dtype = dtype
        self._world = world
        self._aside = ThreadPoolExecutor(1, "snapshots")
        self._snapshots: dict[Path, Future[None]] = {}

    def save_adapter(self, tenant: Tenant, directory: Path, canary: Canary, *, for_elsewhere: bool) -> None:
        """The adapter alone, not durable yet: in float32 and as PEFT and vLLM load it where it is `for_elsewhere`,
        else as the engine beside the trainer has it.

        Raises InvalidInput where it, or how it scores, is not finite.
        """

        def write(aside: Path) -> None:
            canary.check_finite()
            adapter = tenant.adapter
            if for_elsewhere:
                halves = [(a_LrI, b_LOr.mT) for a_LrI, b_LOr in host_halves(adapter, torch.float32)]
                checkpoint_files.write_adapter(aside, adapter.named(halves), adapter.config, self._base_model, canary)
            else:
                halves = host_halves(adapter, self._dtype)
                stacks = [(places, *half) for places, half in zip(adapter.places, halves, strict=True)]
                checkpoint_files.write_stacks(aside, stacks, adapter.config, self._base_model, canary)

        self._write(tenant, directory, write, durable=False)

    def save_state(self, tenant: Tenant, directory: Path) -> None:
        """Adapter and optimizer. Raises InvalidInput where the adapter is not finite."""
        self._write(tenant, directory, lambda aside: self._write_state(tenant, aside))

    def load_state(self, tenant: Tenant, directory: Path, *, with_optimizer: bool) -> None:
        """Read a saved state; the gradient is cleared, and without the optimizer's state that starts afresh."""
        weights = self._read(lambda: checkpoint_files.read_adapter(directory))
        moments = self._read(lambda: checkpoint_files.read_optimizer(directory)) if with_optimizer else {}
        prepared = agreed(lambda: tenant.prepared(weights, moments), self._world)
        tenant.clear_gradient()
        tenant.restore(prepared)

    def begin_snapshot(self, tenant: Tenant, directory: Path) -> None:
        """Copy adapter, optimizer and the gradient accumulated so far, and have rank 0's thread write the copy."""
        if tenant.gradient == "whole":
            sum_gradients(tenant.adapter.parameters, self._world)
            if self._world.rank != 0:  # or it would be counted again by the next step
                tenant.optimizer.zero_grad(set_to_none=True)

        def copy() -> Callable[[Path], None]:
            self._require_finite(tenant)
            config, state = tenant.adapter.config, tenant.gradient
            parts = (tenant.adapter.tensors, tenant.optimizer_state(), tenant.adapter.gradients)
            weights, moments, gradient = (_copied(part) for part in parts)

            def write(aside: Path) -> None:
                checkpoint_files.write_adapter(aside, weights, config, self._base_model)
                checkpoint_files.write_optimizer(aside, moments)
                checkpoint_files.write_gradient(aside, gradient, state)

            return write

        write = agreed(self._on_rank_zero(copy), self._world)
        if write is not None:
            self._snapshots[directory] = self._aside.submit(write_or_tell, directory, write)

    def written(self, directory: Path) -> Future[None]:
        """A snapshot that was begun: done when it is there."""
        return self._snapshots.pop(directory)

    def load_all(self, tenant: Tenant, directory: Path) -> None:
        """What a snapshot is of; rank 0 gets the gradient, which is the sum over ranks."""
        self.load_state(tenant, directory, with_optimizer=True)

        def read() -> tuple[list[Tensor], checkpoint_files.GradientState]:
            gradient, state = checkpoint_files.read_gradient(directory)
            return tenant.adapter.stacked(gradient) if gradient else [], state

        gradient, state = agreed(self._on_rank_zero(read), self._world) or ([], "none")
        for parameter, one in zip(tenant.adapter.parameters, gradient, strict=bool(gradient)):
            parameter.grad = one
        tenant.gradient = gather_objects(state, self._world)[0]

    def _write_state(self, tenant: Tenant, directory: Path) -> None:
        self._write_adapter(tenant, directory)
        checkpoint_files.write_optimizer(directory, tenant.optimizer_state())

    def _write_adapter(self, tenant: Tenant, directory: Path) -> None:
        checkpoint_files.write_adapter(directory, tenant.adapter.tensors, tenant.adapter.config, self._base_model)

    def _write(self, tenant: Tenant, directory: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
        def write_finite() -> None:
            self._require_finite(tenant)
            checkpoint_files.write_directory(directory, write, durable=durable)

        agreed(self._on_rank_zero(write_finite), self._world)

    def _require_finite(self, tenant: Tenant) -> None:
        if not all_finite(list(tenant.adapter.parameters)):
            raise InvalidInput("the model's weights hold NaN or infinity and cannot be saved")

    def _read(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] | None = agreed(self._on_rank_zero(read), self._world)
        return from_rank_zero(tensors or {}, self._world)

    def _on_rank_zero(self, action: Callable[[], T]) -> Callable[[], T | None]:
        return lambda: action() if self._world.rank == 0 else None


def host_halves(adapter: Adapter, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Copies of an adapter's stacks in host memory, laid out as files have them: A [L, r, I] and B [L, O, r].

    A few large copies from the device instead of two for each linear, after it has rounded and transposed them.
    """
    halves = []
    for stack in adapter.stacks:
        a_LrI, b_LOr = stack.a_LrI.data.to(dtype), stack.b_LrO.data.to(dtype).transpose(1, 2).contiguous()
        halves.append((_on_host(a_LrI), _on_host(b_LOr)))
    if adapter.stacks[0].a_LrI.is_cuda:
        torch.cuda.synchronize()
    return halves


def _on_host(tensor: Tensor) -> Tensor:
    """Pinned where it comes from a GPU, whose copy may still be under way."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, in memory of their own: what later operations change, they change elsewhere."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def write_or_tell(directory: Path, write: Callable[[Path], None]) -> None:
    """Raises what the server is to be told where a file cannot be written: the model is not at fault."""
    try:
        checkpoint_files.write_directory(directory, write)
    except Exception as error:
        raise told(error) from error
