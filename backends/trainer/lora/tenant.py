"""One tenant: its adapter, its optimizer, and how whole its gradient is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from api_schemas.training import AdamParams
from backends.protocol import InvalidInput
from backends.trainer.checkpoint_files import GradientState
from backends.trainer.distributed import World, agreed, sum_gradients
from backends.trainer.lora.adapters import Adapter, check_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of what Adam keeps of a tensor, beside the number of steps."""


@dataclass(frozen=True)
class Snapshot:
    """Copies of all that an optim_step changes."""

    weights: list[Tensor]
    moments: dict[Tensor, dict[str, Tensor]]


class Tenant:
    """A model of a client. Its gradient stands at the adapter's tensors, in their `grad`."""

    def __init__(self, adapter: Adapter, *, fused: bool) -> None:
        """`fused`: torch's one-kernel AdamW, on CUDA. What Adam needs comes with every optim_step."""
        self.adapter = adapter
        self.optimizer = torch.optim.AdamW(adapter.parameters, fused=fused)
        self.gradient: GradientState = "none"

    missing_bytes = 0
    """What it will take of the device's memory beside rows, and has not taken yet; little."""

    def clear_gradient(self) -> None:
        """As after a step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradient = "none"

    def sum_gradient(self, world: World) -> Tensor:
        """[] L2 norm of the gradient, of which every rank then has the sum over ranks. All ranks fail, or none."""
        sum_gradients(self.adapter.parameters, world)
        gradients = [p.grad for p in self.adapter.parameters if p.grad is not None]
        return agreed(lambda: torch.nn.utils.get_total_norm(gradients), world)

    def before_step(self, adam: AdamParams, norm: Tensor) -> Snapshot:
        """What `restore` takes: whether a step may be taken shows after it."""
        moments = {p: {key: value.clone() for key, value in of.items()} for p, of in self.optimizer.state.items()}
        return Snapshot([p.detach().clone() for p in self.adapter.parameters], moments)

    def restore(self, snapshot: Snapshot) -> None:
        """Everything that a step changes is as it was, to the bit."""
        with torch.no_grad():
            for parameter, weights in zip(self.adapter.parameters, snapshot.weights, strict=True):
                parameter.copy_(weights)
        self.optimizer.state.clear()
        self.optimizer.state.update(snapshot.moments)

    def step(self, adam: AdamParams, norm: Tensor) -> None:
        """One step of torch.optim.AdamW; `norm` is `gradient_norm()`. Raises InvalidInput where a weight, or
        what Adam keeps, is not finite after it: then it must be undone."""
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.adapter.parameters, adam.grad_clip_norm, norm)
        set_adam(self.optimizer, adam)
        if not self._stepped_finitely():
            raise not_finite(adam, norm)

    def _stepped_finitely(self) -> bool:
        try:
            self.optimizer.step()
        except RuntimeError as error:  # on the CPU, for a size of step beyond float32
            if "without overflow" not in str(error):
                raise
            return False
        kept = [value for of_parameter in self.optimizer.state.values() for value in of_parameter.values()]
        return all_finite([*self.adapter.parameters, *kept])

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's state by `<adapter tensor>:<its name in torch>`; empty before the first step."""
        state = self.optimizer.state
        flat: dict[str, Tensor] = {}
        if state:
            pairs = [(state[stack.a_LrI], state[stack.b_LrO]) for stack in self.adapter.stacks]
            for key in MOMENTS:
                moments = self.adapter.named([(of_a[key], of_b[key]) for of_a, of_b in pairs])
                flat |= {f"{name}:{key}": moment for name, moment in moments.items()}
                flat |= {f"{name}:step": pairs[0][0]["step"].clone() for name in moments}
        return flat

    def prepared(self, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor]) -> Snapshot:
        """Saved tensors as `restore` takes them, on the adapter's device. Raises InvalidInput where they are of
        another LoRA shape, or not finite."""
        check_tensors(weights, self.adapter, "load_weights")
        if not all_finite([*weights.values(), *optimizer_state.values()]):
            raise InvalidInput("load_weights: the checkpoint holds NaN or infinity")
        return Snapshot(self.adapter.stacked(weights), self._moments(optimizer_state))

    def _moments(self, flat: dict[str, Tensor]) -> dict[Tensor, dict[str, Tensor]]:
        """What `optimizer_state` gave, by parameter."""
        if not flat:
            return {}
        names = list(self.adapter.tensors)
        if missing := [key for name in names for key in (*MOMENTS, "step") if f"{name}:{key}" not in flat]:
            raise InvalidInput(f"load_weights: the checkpoint's optimizer has no {missing[0]} of some tensors")
        # torch keeps the step count of an unfused Adam on the CPU, of a fused one on the device.
        step, fused = flat[f"{names[0]}:step"], self.optimizer.defaults["fused"]
        average, square = (self.adapter.stacked({name: flat[f"{name}:{key}"] for name in names}) for key in MOMENTS)
        return {
            parameter: {
                "step": step.clone().to(parameter.device if fused else "cpu"),
                "exp_avg": exp_avg,
                "exp_avg_sq": exp_avg_sq,
            }
            for parameter, exp_avg, exp_avg_sq in zip(self.adapter.parameters, average, square, strict=True)
        }


def set_adam(optimizer: torch.optim.AdamW, adam: AdamParams) -> None:
    """Every optim_step brings its own."""
    for group in optimizer.param_groups:
        group.update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )


def not_finite(adam: AdamParams, norm: Tensor) -> InvalidInput:
    """What is said of a step that must not be taken; `norm` is the gradient's."""
    return InvalidInput(
        f"the step makes weights that are not finite (learning_rate {adam.learning_rate:g}, eps {adam.eps:g},"
        f" gradient norm {norm.item():g}); the gradient was cleared and the weights are unchanged"
    )


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether no cell is NaN or infinite. A largest magnitude is asked for: sums of finite cells may overflow."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in (one for one in tensors if one.numel()):
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    largest = [torch.nn.utils.get_total_norm(group, float("inf")) for group in by_device.values()]
    return all(bool(one.isfinite()) for one in largest)
