"""A client's LoRA model: layer-stacked adapters, their optimizer, and the state of their gradient.

L matrices, r rank of the model, I inputs and O outputs of a matrix
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from api_schemas.training import AdamParams, Trainable
from backends.families.family import LoraFlag
from backends.formats.stacked_adapters import TargetModules
from backends.protocol import InvalidInput
from backends.trainer.distributed import World, agreed, sum_gradients
from backends.trainer.lora.experts import ExpertAdapters
from backends.trainer.lora.linear import LoraLinear
from backends.trainer.optimizer import MOMENTS, all_finite, not_finite, set_adam, step_on_device, take_step
from backends.trainer.trained_weights import GradientState


@dataclass(frozen=True)
class Group:
    """Matrices of equal name and shape, in the order of their layers and of the experts of a layer."""

    flag: LoraFlag
    names: tuple[str, ...]
    """Names of the matrices in a PEFT file."""
    targets: tuple[LoraLinear | ExpertAdapters, ...]
    """Target modules: one matrix each, or those of a layer's experts."""
    target_names: tuple[str, ...]
    """The engine's names of the target modules: a linear's own, and one for all experts of a layer."""
    positions: tuple[int, ...]
    """Index of each matrix among all that take LoRA, in the model's own order."""

    @property
    def matrix_shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.targets[0].matrix_shape


@dataclass(frozen=True)
class StackedAdapter:
    """One model's layer-stacked adapter of a group of matrices."""

    group: Group
    a_LrI: nn.Parameter
    b_LrO: nn.Parameter
    """B, transposed."""


@dataclass(frozen=True)
class OptimState:
    """Copies of all that an optim_step changes."""

    weights: list[Tensor]
    moments: dict[Tensor, dict[str, Tensor]]


class LoraModel:
    """A `TrainedModel`. Its gradient is in the adapters' `grad`."""

    missing_bytes = 0
    """Too little to count."""

    def __init__(self, config: Trainable, stacks: Sequence[StackedAdapter], *, fused: bool) -> None:
        """`fused`: torch's one-kernel AdamW, on CUDA. Adam's settings come with every optim_step."""
        self.config = config
        self.stacks = tuple(stacks)
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused)
        self.gradient: GradientState = "none"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A [L, r, I] and B [L, r, O] of every stacked adapter."""
        return [parameter for stack in self.stacks for parameter in (stack.a_LrI, stack.b_LrO)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters, which are whole on every rank."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Views of all tensors, A [r, I] and B [O, r], by their name in a PEFT file."""
        return self.named([(stack.a_LrI.data, stack.b_LrO.data) for stack in self.stacks])

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Views of the gradients, named and shaped as `tensors`; empty if there are none."""
        return self.named([(stack.a_LrI.grad, stack.b_LrO.grad) for stack in self.stacks])

    def named(self, halves: Sequence[tuple[Tensor | None, Tensor | None]]) -> dict[str, Tensor]:
        """Name each matrix's part of (A, B) per stacked adapter as a PEFT file does, in the model's own order."""
        matrices: list[tuple[int, str, Tensor, Tensor]] = []
        for stack, (a_LrI, b_LrO) in zip(self.stacks, halves, strict=True):
            if a_LrI is not None and b_LrO is not None:
                matrices += zip(stack.group.positions, stack.group.names, a_LrI, b_LrO, strict=True)
        parts = {}
        for _, name, a_rI, b_rO in sorted(matrices, key=lambda matrix: matrix[0]):
            parts[f"base_model.model.{name}.lora_A.weight"] = a_rI
            parts[f"base_model.model.{name}.lora_B.weight"] = b_rO.T
        return parts

    @property
    def target_modules(self) -> list[TargetModules]:
        """The target modules of every stacked adapter, named as in the engine."""
        return [
            [
                (f"base_model.model.{name}", target.num_matrices if isinstance(target, ExpertAdapters) else None)
                for target, name in zip(stack.group.targets, stack.group.target_names, strict=True)
            ]
            for stack in self.stacks
        ]

    def stacked(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Stack what `named` gave again: one tensor for each of `parameters`."""
        stacks = [torch.empty_like(parameter.data) for parameter in self.parameters]
        for name, part in self.named(list(zip(stacks[::2], stacks[1::2], strict=True))).items():
            part.copy_(tensors[name])
        return stacks

    def clear_gradient(self) -> None:
        """Drop the gradient, as after a step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradient = "none"

    def sum_gradient(self, world: World) -> Tensor:
        """Sum the gradient over ranks and return its L2 norm []. All ranks fail, or none."""
        sum_gradients(self.parameters, world)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return agreed(lambda: torch.nn.utils.get_total_norm(gradients), world)

    def before_step(self, adam: AdamParams, norm: Tensor) -> Callable[[], None]:
        """Copy all that the step changes; return what restores it."""
        moments = {p: {key: value.clone() for key, value in of.items()} for p, of in self.optimizer.state.items()}
        return partial(self.restore, OptimState([p.detach().clone() for p in self.parameters], moments))

    def restore(self, state: OptimState) -> None:
        """Set everything that a step changes, bitwise."""
        with torch.no_grad():
            for parameter, weights in zip(self.parameters, state.weights, strict=True):
                parameter.copy_(weights)
        self.optimizer.state.clear()
        self.optimizer.state.update(state.moments)

    def step(self, adam: AdamParams, norm: Tensor) -> None:
        """Take one step of torch.optim.AdamW; `norm` is what `sum_gradient` gave. Raises InvalidInput if a weight or
        one of Adam's moments is then not finite; the step must then be undone."""
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, adam.grad_clip_norm, norm)
        set_adam(self.optimizer, adam)
        if not take_step(self.optimizer) or not all_finite([*self.parameters, *self._state_tensors()]):
            raise not_finite(adam, norm)

    def _state_tensors(self) -> list[Tensor]:
        return [value for of_parameter in self.optimizer.state.values() for value in of_parameter.values()]

    def optimizer_state(self) -> dict[str, Tensor]:
        """Adam's state by `<adapter tensor>:<its name in torch>`; empty before the first step."""
        state = self.optimizer.state
        flat: dict[str, Tensor] = {}
        if state:
            pairs = [(state[stack.a_LrI], state[stack.b_LrO]) for stack in self.stacks]
            for key in MOMENTS:
                moments = self.named([(of_a[key], of_b[key]) for of_a, of_b in pairs])
                flat |= {f"{name}:{key}": moment for name, moment in moments.items()}
                flat |= {f"{name}:step": pairs[0][0]["step"].clone() for name in moments}
        return flat

    def prepared(self, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor]) -> OptimState:
        """Saved tensors as `restore` takes them, on the adapters' device. Raises InvalidInput if they are of another
        LoRA shape, or not finite."""
        self._check_tensors(weights, "load_weights")
        if not all_finite([*weights.values(), *optimizer_state.values()]):
            raise InvalidInput("load_weights: the checkpoint holds NaN or infinity")
        return OptimState(self.stacked(weights), self._moments(optimizer_state))

    def _moments(self, flat: dict[str, Tensor]) -> dict[Tensor, dict[str, Tensor]]:
        """By parameter, what `optimizer_state` gave."""
        if not flat:
            return {}
        names = list(self.tensors)
        if missing := [key for name in names for key in (*MOMENTS, "step") if f"{name}:{key}" not in flat]:
            raise InvalidInput(f"load_weights: the checkpoint's optimizer has no {missing[0]} of some tensors")
        step = flat[f"{names[0]}:step"]
        average, square = (self.stacked({name: flat[f"{name}:{key}"] for name in names}) for key in MOMENTS)
        return {
            parameter: {
                "step": step_on_device(self.optimizer, step, parameter),
                "exp_avg": exp_avg,
                "exp_avg_sq": exp_avg_sq,
            }
            for parameter, exp_avg, exp_avg_sq in zip(self.parameters, average, square, strict=True)
        }

    def _check_tensors(self, source: dict[str, Tensor], where: str) -> None:
        """Raises InvalidInput if names or shapes differ from the adapters'."""
        tensors = self.tensors
        if source.keys() != tensors.keys():
            raise InvalidInput(f"{where}: the checkpoint trains other modules than this model")
        for name, tensor in tensors.items():
            if source[name].shape != tensor.shape:
                raise InvalidInput(
                    f"{where}: {name} has shape {tuple(source[name].shape)}, this model's {tuple(tensor.shape)}:"
                    " the LoRA ranks differ"
                )
