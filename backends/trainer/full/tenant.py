"""The one tenant of a base that trains all its weights. Its tensors are this rank's rows."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from api_schemas.training import AdamParams
from backends.protocol import InvalidInput
from backends.trainer.checkpoint_files import GradientState
from backends.trainer.distributed import World, agreed
from backends.trainer.full.weights import FullModel
from backends.trainer.lora.tenant import MOMENTS, all_finite, not_finite, set_adam


class FullTenant:
    """Masters, their gradients in `grad`, and the optimizer."""

    def __init__(self, adapter: FullModel, *, fused: bool) -> None:
        """`fused`: torch's one-kernel AdamW, on CUDA."""
        self.adapter = adapter
        self.optimizer = torch.optim.AdamW(adapter.parameters, fused=fused)
        self.gradient: GradientState = "none"

    @property
    def missing_bytes(self) -> int:
        """What it will take of the device's memory beside rows: the row's gradient, at most as wide as a master, a
        gradient of its own and two moments; less what it has already."""
        size_bytes = sum(one.nbytes for one in self.adapter.parameters)
        has_gradient = self.gradient != "none"
        return size_bytes * (1 + (not has_gradient) + (0 if self.optimizer.state else len(MOMENTS)))

    def clear_gradient(self) -> None:
        """As after a step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradient = "none"

    def sum_gradient(self, world: World) -> Tensor:
        """[] L2 norm of the gradient, whose rows are sums over ranks already."""

        def own() -> Tensor:
            return torch.nn.utils.get_total_norm([p.grad for p in self.adapter.parameters if p.grad is not None])

        norm = agreed(own, world)
        if world.size == 1:
            return norm
        square = norm.double() ** 2
        dist.all_reduce(square)
        return square.sqrt().to(norm.dtype)

    def before_step(self, adam: AdamParams, norm: Tensor) -> None:
        """Clip the gradient, and take the step of a copy of each tensor in turn: copies of all of them would want
        half as much memory again. Raises InvalidInput where a weight, or what Adam keeps, is not finite then."""
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.adapter.parameters, adam.grad_clip_norm, norm)
        set_adam(self.optimizer, adam)
        if not all(self._would_be_finite(one) for one in self.adapter.parameters if one.grad is not None):
            raise not_finite(adam, norm)

    def _would_be_finite(self, parameter: nn.Parameter) -> bool:
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad = parameter.grad
        optimizer = torch.optim.AdamW([copy])
        optimizer.param_groups[0].update(
            {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        )
        if parameter in self.optimizer.state:
            optimizer.state[copy] = {key: one.clone() for key, one in self.optimizer.state[parameter].items()}
        try:
            optimizer.step()
        except RuntimeError as error:  # on the CPU, for a size of step beyond float32
            if "without overflow" not in str(error):
                raise
            return False
        return all_finite([copy, *optimizer.state[copy].values()])

    def step(self, adam: AdamParams, norm: Tensor) -> None:
        """What `before_step` has prepared."""
        self.optimizer.step()

    def restore(self, snapshot: None) -> None:
        """There is nothing to restore from: the process ends, and the model is restored from disk."""
        raise SystemExit("a step that had been found possible failed: the weights may be half of one")

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """What Adam keeps, by its name in torch, then by parameter; empty before the first step."""
        state = self.optimizer.state
        kinds = ("step", *MOMENTS) if state else ()
        return {
            kind: {name: state[one][kind] for name, one in self.adapter.masters.items() if one in state}
            for kind in kinds
        }

    def take(self, weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
        """Become what `state_tensors` and the masters gave, on this rank; no moments: Adam starts afresh."""
        self.clear_gradient()
        with torch.no_grad():
            for name, master in self.adapter.masters.items():
                master.copy_(weights[name])
        self.optimizer.state.clear()
        fused = self.optimizer.defaults["fused"]
        for name, step in moments.get("step", {}).items():
            master = self.adapter.masters[name]
            # torch keeps the step count of an unfused Adam on the CPU, of a fused one on the device.
            self.optimizer.state[master] = {"step": step.clone().to(master.device if fused else "cpu")} | {
                kind: moments[kind][name] for kind in MOMENTS
            }


def require_finite(tensors: list[Tensor], text: str) -> None:
    """Raises InvalidInput with this text where a cell is NaN or infinite."""
    if not all_finite(tensors):
        raise InvalidInput(text)
