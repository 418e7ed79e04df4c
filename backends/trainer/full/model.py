"""The one model of a base that trains all its weights. Its tensors are this rank's shards."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from api_schemas.training import AdamParams, Trainable
from backends.trainer.distributed import World, agreed, total_norm
from backends.trainer.optimizer import MOMENTS, keeping_state, move, prepare_step, step_on_device
from backends.trainer.trained_weights import GradientState


class FullModel:
    """A `TrainedModel`: float32 masters of what it trains, their gradients in `grad`, and the optimizer."""

    def __init__(self, config: Trainable, masters: Mapping[str, nn.Parameter], world: World, *, fused: bool) -> None:
        """`masters` are by the parameter's name in the base; `fused`: torch's one-kernel AdamW, on CUDA."""
        self.config = config
        self.masters = masters
        self._world = world
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused)
        self.gradient: GradientState = "none"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The masters in the base's own order."""
        return list(self.masters.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the masters on all ranks together."""
        return self._world.size * sum(parameter.nbytes for parameter in self.parameters)

    @property
    def training_bytes(self) -> int:
        """Device memory of this rank for masters, a gradient, and two moments, in bytes."""
        return (2 + len(MOMENTS)) * sum(parameter.nbytes for parameter in self.parameters)

    @property
    def missing_bytes(self) -> int:
        """Device memory that it will take beside microbatches and has not taken yet, in bytes: a microbatch's gradient,
        at most as wide as a master, a gradient of its own, and two moments."""
        size_bytes = sum(parameter.nbytes for parameter in self.parameters)
        has_gradient = self.gradient != "none"
        return size_bytes * (1 + (not has_gradient) + (0 if self.optimizer.state else len(MOMENTS)))

    def move(self, device: torch.device) -> None:
        """Move masters, gradient and moments to a device. If it has no room, some may have moved."""
        move(self.parameters, self.optimizer, device)

    def clear_gradient(self) -> None:
        """Drop the gradient, as after a step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradient = "none"

    def sum_gradient(self) -> Tensor:
        """Return the L2 norm [] of the gradient, whose shards are sums over ranks already."""
        return total_norm([p.grad for p in self.parameters if p.grad is not None], self._world)

    def prepare_step(self, adam: AdamParams, norm: Tensor) -> Callable[[], None]:
        """Clip the gradient, try the step, and return a function that takes it. All ranks fail, or none. Raises
        InvalidInput if a weight or one of Adam's moments would not be finite on any rank."""
        with keeping_state(self.optimizer):
            agreed(lambda: prepare_step(self.optimizer, adam, norm, sums_bits=False), self._world)
        return lambda: agreed(self.optimizer.step, self._world)

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return Adam's state by its name in torch, then by parameter; empty before the first step."""
        state = self.optimizer.state
        kinds = ("step", *MOMENTS) if state else ()
        return {kind: {name: state[one][kind] for name, one in self.masters.items() if one in state} for kind in kinds}

    def take(self, weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
        """Set masters and Adam's state to what was saved, on this rank; without moments Adam starts afresh."""
        self.clear_gradient()
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(weights[name])
        self.optimizer.state.clear()
        for name, step in moments.get("step", {}).items():
            master = self.masters[name]
            self.optimizer.state[master] = {"step": step_on_device(self.optimizer, step, master)} | {
                kind: moments[kind][name] for kind in MOMENTS
            }
