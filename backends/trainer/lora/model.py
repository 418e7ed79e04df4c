"""A client's LoRA model: layer-stacked adapters, their optimizer, and the state of their gradient.

Several ranks of a machine share float32 masters and moments: each has a shard of every layer-stacked tensor
(`shards.py`), and steps it; several machines step the same, with the same sum of their gradients. Every rank also has
a working copy of the whole adapter in the base's precision, which microbatches load, and until the next optim_step a
whole gradient of its own. On a machine's only rank the masters are the working copy.

L matrices of A or of B, r rank of the model, I inputs and O outputs of a matrix
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor, nn

from tinker_server.api_schemas.adapter_names import EXPERT_MATRICES
from tinker_server.api_schemas.divided_linears import DividedLinear, to_header
from tinker_server.api_schemas.training import AdamParams, Layout, Trainable
from tinker_server.backends.families.family import LoraFlag
from tinker_server.backends.formats.stacked_adapters import TargetModules
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer import shards
from tinker_server.backends.trainer.distributed import (
    World,
    agreed,
    from_rank_zero,
    on_rank_zero,
    sum_on_rank_zero,
    total_norm,
    whole_gradients,
)
from tinker_server.backends.trainer.lora.experts import ExpertAdapters
from tinker_server.backends.trainer.lora.linear import LinearAdapters
from tinker_server.backends.trainer.optimizer import (
    MOMENTS,
    GradientState,
    all_finite,
    keeping_state,
    move,
    prepare_step,
    step_on_device,
)

_STEP_COUNT_BYTES = torch.float32.itemsize
"""What torch keeps of a tensor beside its moments."""


@dataclass(frozen=True)
class Group:
    """Matrices of equal name and shape, in the order of their layers and of the experts of a layer."""

    flag: LoraFlag
    names: tuple[str, ...]
    """Names of the adapter's tensors in files: of each matrix, or of those of a layer's experts."""
    targets: tuple[LinearAdapters | ExpertAdapters, ...]
    """Target modules: a matrix each, or some of its rows, or the matrices of a layer's experts."""
    target_names: tuple[str, ...]
    """The engine's names of the target modules: a linear's own, and an adapter for all experts of a layer."""
    positions: tuple[int, ...]
    """Index of each name among all that take LoRA, in the model's own order."""
    layout: Layout | None = None
    """The layout whose models have these adapters; None: of both."""
    num_matrices: tuple[int, int] | None = None
    """Matrices of A, and of B, in the tensors of each name, if these have three dimensions."""
    expert_matrix: str | None = None
    """PEFT's name of this matrix of an expert, if the tensors have three dimensions."""
    divided: tuple[str, DividedLinear] | None = None
    """The linear of which the adapters are a part, by the last part of its name."""

    @property
    def lengths(self) -> tuple[int, int]:
        """L of A, and of B."""
        a, b = self.num_matrices or (1, 1)
        return len(self.names) * a, len(self.names) * b

    def by_name(self, stack_LrN: Tensor, half: int) -> Iterable[Tensor]:
        """Split a stacked A (`half` is 0) or B (1) into a part for each name."""
        return stack_LrN if self.num_matrices is None else stack_LrN.split(self.num_matrices[half])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Stack what `by_name` gave."""
        return torch.stack(list(parts)) if self.num_matrices is None else torch.cat(list(parts))

    @property
    def matrix_shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.targets[0].matrix_shape


@dataclass(frozen=True)
class StackedAdapter:
    """A model's layer-stacked adapter of a group of matrices, as microbatches load it. `grad` is this rank's gradient
    since the last optim_step, at least float32."""

    group: Group
    a_LrI: nn.Parameter
    b_LrO: nn.Parameter
    """B, transposed."""


@dataclass(frozen=True)
class OptimState:
    """Copies of all that an optim_step changes on this rank."""

    weights: list[Tensor]
    moments: dict[Tensor, dict[str, Tensor]]


class LoraModel:
    """A client's model: its adapters, their gradients, and its optimizer."""

    def __init__(self, config: Trainable, stacks: Sequence[StackedAdapter], world: World, *, fused: bool) -> None:
        """`stacks` are zeros; `fused`: torch's one-kernel AdamW, on CUDA. Adam's settings come with every
        optim_step."""
        self.config = config
        self.stacks = tuple(stacks)
        self._world = world
        self._is_shared = world.machine.size > 1
        self._weights = [half for stack in self.stacks for half in (stack.a_LrI, stack.b_LrO)]
        self.parameters = [self._zero_shard(weight) for weight in self._weights] if self._is_shared else self._weights
        """The masters: this rank's shard [S] of every A and B; on an only rank A [L, r, I] and B [L, r, O] themselves.
        """
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused)
        self.gradient: GradientState = "none"

    def _zero_shard(self, weight: nn.Parameter) -> nn.Parameter:
        size = shards.shard_size(weight.numel(), self._world)
        return nn.Parameter(torch.zeros(size, dtype=weight.grad_dtype, device=weight.device))

    def initialise_a(self, sample: Callable[[torch.Size], Tensor]) -> None:
        """Set every A to what `sample` gives for [r, I], in the base's own order of modules, so that grouping does not
        change the numbers."""
        places = [
            (position, index, number)
            for index, stack in enumerate(self.stacks)
            for number, position in enumerate(stack.group.positions)
        ]
        for _, index, number in sorted(places, key=itemgetter(0)):
            stack = self.stacks[index]
            count = stack.group.lengths[0] // len(stack.group.names)
            for matrix in range(number * count, (number + 1) * count):
                a_rI = stack.a_LrI.data[matrix]
                fresh_rI = sample(a_rI.shape)
                a_rI.copy_(fresh_rI)
                if self._is_shared:
                    master_S = self.parameters[2 * index].data
                    shards.copy_own(master_S, matrix * fresh_rI.numel(), fresh_rI, self._world)

    @property
    def size_bytes(self) -> int:
        """Bytes of the masters on all ranks of a machine together, without padding."""
        return sum(one.numel() * master.itemsize for one, master in zip(self._weights, self.parameters, strict=True))

    @property
    def training_bytes(self) -> int:
        """Device memory of this rank for masters, two moments, a whole gradient and, with several ranks, the working
        copy, in bytes."""
        masters = (1 + len(MOMENTS)) * sum(parameter.nbytes for parameter in self.parameters)
        return masters + self.size_bytes + (sum(weight.nbytes for weight in self._weights) if self._is_shared else 0)

    @property
    def missing_bytes(self) -> int:
        """Memory that it will take on this rank beside microbatches and has not taken yet, in bytes: a whole gradient,
        and its shards of two moments."""
        pairs = zip(self._weights, self.parameters, strict=True)
        missing = sum(one.numel() * master.itemsize for one, master in pairs if one.grad is None)
        if not self.optimizer.state:
            missing += sum(len(MOMENTS) * parameter.nbytes + _STEP_COUNT_BYTES for parameter in self.parameters)
        return missing

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Views of the working copy, A [r, I] and B [O, r], by their name in a PEFT file; those of experts that share
        factors in one, [1, r, I] and [E, O, r] or [E, r, I] and [1, O, r]."""
        return self.name_tensors([(stack.a_LrI.data, stack.b_LrO.data) for stack in self.stacks])

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Views of this rank's accumulated gradients, named and shaped as `tensors`; empty if there are none."""
        return self.name_tensors([(stack.a_LrI.grad, stack.b_LrO.grad) for stack in self.stacks])

    def name_tensors(self, halves: Sequence[tuple[Tensor | None, Tensor | None]]) -> dict[str, Tensor]:
        """Name the parts of (A, B) per stacked adapter as `tensors`, in the model's own order."""
        matrices: list[tuple[int, str, Tensor, Tensor]] = []
        for stack, (a_LrI, b_LrO) in zip(self.stacks, halves, strict=True):
            if a_LrI is not None and b_LrO is not None:
                group = stack.group
                halves_of_name = (group.by_name(half, index) for index, half in enumerate((a_LrI, b_LrO)))
                matrices += zip(group.positions, group.names, *halves_of_name, strict=True)
        parts = {}
        for _, name, a, b in sorted(matrices, key=lambda matrix: matrix[0]):
            parts[f"base_model.model.{name}.lora_A.weight"] = a
            parts[f"base_model.model.{name}.lora_B.weight"] = b.mT
        return parts

    @property
    def target_modules(self) -> list[TargetModules]:
        """The target modules of every stacked adapter, named as in the engine."""
        return [
            [
                (f"base_model.model.{name}", target.num_experts if isinstance(target, ExpertAdapters) else None)
                for target, name in zip(stack.group.targets, stack.group.target_names, strict=True)
            ]
            for stack in self.stacks
        ]

    @property
    def file_metadata(self) -> dict[str, str]:
        """What the header of a file says of the names of `tensors`."""
        groups = [stack.group for stack in self.stacks if stack.group.expert_matrix is not None]
        matrices = {group.names[0].rpartition(".")[2]: group.expert_matrix for group in groups}
        return ({EXPERT_MATRICES: json.dumps(matrices)} if matrices else {}) | to_header(self.divided_linears)

    @property
    def divided_linears(self) -> dict[str, DividedLinear]:
        """Linears of whose rows the model has adapters in parts, by the last parts of their names."""
        return dict(stack.group.divided for stack in self.stacks if stack.group.divided is not None)

    def stack(self, index: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """Stack what `name_tensors` gave, on its own device: the whole tensor of which `parameters[index]` is a
        shard."""
        group = self.stacks[index // 2].group
        names = [f"base_model.model.{name}" for name in group.names]
        if index % 2:
            return group.join([tensors[f"{name}.lora_B.weight"].mT for name in names])
        return group.join([tensors[f"{name}.lora_A.weight"] for name in names])

    def halves(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return the whole A [L, r, I] and B [L, r, O] of every stacked adapter, at least as precise as `dtype`: the
        working copy, or else the masters, gathered for rank 0 alone. All ranks call it."""
        halves = [weight.data for weight in self._weights]
        if self._is_shared and torch.promote_types(halves[0].dtype, dtype) != halves[0].dtype:
            halves = [self._gather(one.data, index) for index, one in enumerate(self.parameters)]
        return list(zip(halves[::2], halves[1::2], strict=True))

    def masters(self) -> dict[str, Tensor]:
        """Return all masters, named and shaped as `tensors`: rank 0's alone, and views where it is the only rank. All
        ranks call it."""
        return self._gather_named([parameter.data for parameter in self.parameters])

    def _gather_named(self, own: Sequence[Tensor]) -> dict[str, Tensor]:
        wholes = [self._gather(one, index) for index, one in enumerate(own)]
        return self.name_tensors(list(zip(wholes[::2], wholes[1::2], strict=True))) if self._world.rank == 0 else {}

    def _gather(self, own: Tensor, index: int) -> Tensor:
        return shards.gather_to_rank_zero(own, self._weights[index].shape, self._world)

    def move(self, device: torch.device) -> None:
        """Move working copy, masters, gradient and moments to a device. If it has no room, some may have moved."""
        move((*self._weights, *self.parameters), self.optimizer, device)

    def clear_gradient(self) -> None:
        """Drop the gradient, as after a step."""
        for parameter in (*self._weights, *self.parameters):
            parameter.grad = None
        self.gradient = "none"

    def sum_gradient(self) -> Tensor:
        """Sum the gradient over ranks, each its shards, and return the L2 norm [] of the whole. All ranks fail, or
        none."""
        if self._is_shared:
            sums = agreed(lambda: [torch.empty_like(parameter.data) for parameter in self.parameters], self._world)
            shards.reduce_scatter([one.grad for one in self._weights], sums, self._world)
            for weight, master, own_sum in zip(self._weights, self.parameters, sums, strict=True):
                weight.grad, master.grad = None, own_sum
        if self._world.num_machines > 1:
            shards.sum_across(whole_gradients(self.parameters, self._world), self._world)
        return total_norm([p.grad for p in self.parameters if p.grad is not None], self._world)

    def move_gradient(self) -> None:
        """Move the sum over ranks of the accumulated gradient to rank 0. All ranks fail, or none."""
        sum_on_rank_zero(self._weights, self._world)

    def set_gradient(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's accumulated gradient to tensors that `gradients` gave."""
        for index, weight in enumerate(self._weights):
            weight.grad = self.stack(index, tensors).to(weight.device, weight.grad_dtype)

    def take(self, state: OptimState) -> None:
        """Set weights and optimizer to what `prepare_state` gave, with no gradient. All ranks fail, and change nothing,
        or none."""
        share = self._prepare_sharing(state.weights)
        self.clear_gradient()
        share()
        with torch.no_grad():
            for parameter, weights in zip(self.parameters, state.weights, strict=True):
                parameter.copy_(weights)
        self.optimizer.state.clear()
        self.optimizer.state.update(state.moments)

    def _prepare_sharing(self, masters: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that sets the working copy, if it is not the masters themselves. All ranks fail, or
        none."""
        if not self._is_shared:
            return lambda: None
        working_copy = [weight.data for weight in self._weights]
        return shards.prepare_all_gather([master.detach() for master in masters], working_copy, self._world)

    def prepare_step(self, adam: AdamParams, norm: Tensor) -> Callable[[], None]:
        """Clip the gradient, try the step, and return a function that takes it. All ranks fail, or none.

        Raises InvalidInput if a weight or a moment of Adam's would not be finite on any rank, BackendFailed if
        machines compute different weights.
        """
        compares = self._world.num_machines > 1
        with keeping_state(self.optimizer):
            sums = agreed(lambda: prepare_step(self.optimizer, adam, norm, sums_bits=compares), self._world)
            if compares:
                shards.require_equal_on_machines(torch.stack(sums), self._world)
            share = self._prepare_sharing(self.parameters)

        def step() -> None:
            agreed(self.optimizer.step, self._world)
            share()

        return step

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return Adam's state by `<adapter tensor>:<its name in torch>`, as `masters` gives those; empty before the
        first step."""
        flat: dict[str, Tensor] = {}
        if self.optimizer.state:
            states = [self.optimizer.state[parameter] for parameter in self.parameters]
            for key in MOMENTS:
                moments = self._gather_named([state[key] for state in states])
                flat |= {f"{name}:{key}": moment for name, moment in moments.items()}
                flat |= {f"{name}:step": states[0]["step"].clone() for name in moments}
        return flat

    def prepare_state(self, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> OptimState:
        """Prepare the saved tensors of rank 0, as `take` takes them; what the others pass is ignored. All ranks fail,
        or none.

        Raises InvalidInput if they are of another LoRA shape, or not finite.
        """
        on_rank_zero(lambda: self._check(weights, optimizer_state), self._world)
        first = f"{next(iter(self.tensors))}:step"
        counts = {"step": optimizer_state[first]} if self._world.rank == 0 and optimizer_state else {}
        counts = from_rank_zero(counts, self._world)
        own = self._scatter(weights)
        if not counts:
            return OptimState(own, {})
        average, square = (self._scatter(_of_kind(optimizer_state, key)) for key in MOMENTS)

        def of_torch(parameter: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> dict[str, Tensor]:
            step = step_on_device(self.optimizer, counts["step"], parameter)
            return {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

        def moments() -> dict[Tensor, dict[str, Tensor]]:
            triples = zip(self.parameters, average, square, strict=True)
            return {parameter: of_torch(parameter, *pair) for parameter, *pair in triples}

        return OptimState(own, agreed(moments, self._world))

    def _scatter(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this rank's shards of rank 0's tensors, which `name_tensors` gave."""
        own = []
        for index, parameter in enumerate(self.parameters):
            whole = on_rank_zero(partial(self.stack, index, tensors), self._world)
            own.append(shards.scatter_from_rank_zero(whole, parameter, self._world))
        return own

    def _check(self, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if saved tensors are not this model's, or not finite."""
        self._check_shapes(weights)
        if not all_finite([*weights.values(), *optimizer_state.values()]):
            raise InvalidInput("load_weights: the checkpoint holds NaN or infinity")
        keys = [f"{name}:{key}" for name in self.tensors for key in (*MOMENTS, "step")] if optimizer_state else []
        if missing := [key for key in keys if key not in optimizer_state]:
            raise InvalidInput(
                f"load_weights: the checkpoint's optimizer has no {missing[0].rpartition(':')[2]} of some tensors"
            )

    def _check_shapes(self, weights: Mapping[str, Tensor]) -> None:
        """Raise InvalidInput if shapes differ from the adapters'. Names were compared when the file was read."""
        for name, tensor in self.tensors.items():
            if weights[name].shape != tensor.shape:
                raise InvalidInput(
                    f"load_weights: {name} has shape {tuple(weights[name].shape)}, this model's {tuple(tensor.shape)}:"
                    " the LoRA ranks differ"
                )


def _of_kind(optimizer_state: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """Return a moment of Adam's by adapter tensor."""
    suffix = f":{key}"
    return {name.removesuffix(suffix): one for name, one in optimizer_state.items() if name.endswith(suffix)}
