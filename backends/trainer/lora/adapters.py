"""LoRA models on a frozen base: each has adapters of its own rank, and any number of them share a packed microbatch.

Masters are ordinary float32 tensors whatever the base's precision (`model.py` has how ranks share them). A model's
adapters of equal matrices of all layers are a layer-stacked tensor: an optimizer step, a copy or a sum is then a few
operations, not hundreds.

L matrices, r rank of a model, I inputs and O outputs of a matrix, R summed ranks of a microbatch's models
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.families.family import LoraFlag
from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.model_spec import MAX_SUMMED_RANK
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.distributed import ALONE, World, sampling_s
from tinker_server.backends.trainer.lora.linear import ALPHA, TokenScales
from tinker_server.backends.trainer.lora.model import Group, LoraModel, StackedAdapter
from tinker_server.backends.trainer.lora.target_modules import replace_modules


class Adapters:
    """Puts LoRA into a model's linears, makes models, and loads those of a microbatch."""

    def __init__(  # noqa: PLR0913 - three are settings
        self,
        model: PreTrainedModel,
        modules: Mapping[LoraFlag, list[str]],
        max_rank: int,
        world: World = ALONE,
        base_layout: Layout = "own",
        summed_rank: int = MAX_SUMMED_RANK,
    ) -> None:
        """Replace linears and experts in place; before the model is sharded, which goes by its modules.

        `modules` are the full names of those that each of a request's flags trains; `world` shares every model's
        masters. The base alone computes as with models of `base_layout`. On a GPU, memory is taken for models whose
        ranks sum to `summed_rank`, once.
        """
        self._base_layout = base_layout
        self._max_rank = max_rank
        self._world = world
        self._text, self._tower = TokenScales(), TokenScales()
        self._tower.is_off = True
        self._groups = replace_modules(model, modules, self._text, self._tower)
        weight = model.get_output_embeddings().weight
        self._device, self._dtype = weight.device, weight.dtype
        self.gradient_dtype = torch.promote_types(self._dtype, torch.float32)
        self._rank_slices: list[slice] = []
        self._loaded: list[Buffers] = []
        self._buffers: dict[int, Buffers] = {}
        """The largest buffers by group: those of each R begin at the same addresses. On a GPU they stay: compiled code
        and graphs hold their addresses."""
        self._largest_width = 0 if self._device.type == "cpu" else buffer_rank(summed_rank, max_rank)
        self._layouts = frozenset(group.layout for group in self._groups if group.layout is not None)
        self._loaded_as: tuple[int, frozenset[Layout]] | None = None
        model.get_input_embeddings().register_forward_hook(_want_gradient)

    def create(self, config: Trainable, keep_waiting: Callable[[float], None] = lambda seconds: None) -> LoraModel:
        """Make a fresh model: A uniform as in nn.Linear, sampled from `config.seed` in float32, and B zero.

        The same seed gives the same tensors on every device and rank. `keep_waiting` is called with the seconds that
        sampling may take. Raises InvalidInput.
        """
        assert not config.full, "the server refuses models that train all weights"
        if not 1 <= config.rank <= self._max_rank:
            raise InvalidInput(
                f"lora_config.rank is {config.rank}; this server takes 1 to {self._max_rank}"
                " (setting backend.max_lora_rank)"
            )
        flags = [flag for flag in get_args(LoraFlag) if getattr(config, flag)]
        if not flags:
            raise InvalidInput("lora_config: at least one of train_attn, train_mlp, train_unembed must be true")
        for flag in flags:
            if flag == "train_vision" and not self.train_vision:
                raise InvalidInput(
                    "the model trains its vision tower; this server does not (setting backend.train_vision)"
                )
            if not any(group.flag == flag for group in self._groups):
                raise InvalidInput(f"lora_config.{flag}: this model has no modules that it could train")
        groups = [each for each in self._groups if each.flag in flags and each.layout in (None, config.layout)]
        stacks = [self._stack_adapter(group, config.rank) for group in groups]
        model = LoraModel(config, stacks, self._world, fused=self._device.type == "cuda")
        keep_waiting(sampling_s(model.size_bytes))
        _initialise(model)
        return model

    def _stack_adapter(self, group: Group, rank: int) -> StackedAdapter:
        outputs, inputs = group.matrix_shape
        dtype = self.gradient_dtype if self._world.machine.size == 1 else self._dtype
        halves = [
            nn.Parameter(torch.zeros(length, rank, width, dtype=dtype, device=self._device))
            for length, width in zip(group.lengths, (inputs, outputs), strict=True)
        ]
        for half in halves:
            half.grad_dtype = self.gradient_dtype
        return StackedAdapter(group, *halves)

    def load(self, models: Sequence[LoraModel]) -> Tensor:
        """Put the models' adapters side by side, in the base's precision, with gradients of 0.

        Return [models, R], the scales of a token of each model; `use` takes those of a microbatch's tokens. A model
        that is given for several requests is there once.
        """
        different = list(dict.fromkeys(models))
        ends = list(accumulate(model.config.rank for model in different))
        ranks_of = {model: slice(end - model.config.rank, end) for end, model in zip(ends, different, strict=True)}
        self._rank_slices = list(ranks_of.values())
        width = self._buffer_rank(sum(model.config.rank for model in different))
        layouts = self._layouts & (frozenset(model.config.layout for model in models) or {self._base_layout})
        if (width, layouts) != self._loaded_as:
            self._bind(width, layouts)
        for buffers in self._loaded:
            buffers.clear()
        for ranks, stack, buffers in self._slices(models):
            buffers.a_LRI[:, ranks].copy_(stack.a_LrI.data)
            buffers.b_LRO[:, ranks].copy_(stack.b_LrO.data)
        scales = torch.zeros(len(models), width, dtype=self.gradient_dtype)
        for scale_R, model in zip(scales, models, strict=True):
            scale_R[ranks_of[model]] = ALPHA / model.config.rank
        return to_device(scales, self._device)

    def _bind(self, width: int, layouts: frozenset[Layout]) -> None:
        """Have all matrices compute with buffers of rank `width`; of 0 those of other layouts."""
        assert self._device.type == "cpu" or width <= self._largest_width, "compiled code holds the addresses"
        widths = [width if group.layout in (None, *layouts) else 0 for group in self._groups]
        self._buffers |= {  # all of them or, if the memory is full, none
            index: Buffers.zeros(group, max(width, self._largest_width) if width else 0, self._dtype, self._device)
            for index, (group, width) in enumerate(zip(self._groups, widths, strict=True))
            if index not in self._buffers or self._buffers[index].width < width
        }
        self._loaded = [self._buffers[index].narrow(width) for index, width in enumerate(widths)]
        self._loaded_as = width, layouts
        for buffers in self._loaded:
            buffers.bind()

    @property
    def layouts(self) -> frozenset[Layout]:
        """The layouts of the loaded models, where these differ."""
        return frozenset() if self._loaded_as is None else self._loaded_as[1]

    def blank(self, num_tokens: int) -> Tensor:
        """Return the scales [T, R] of tokens of no model, after `load([])`: the base alone."""
        return torch.zeros(num_tokens, self._buffer_rank(0), dtype=self.gradient_dtype, device=self._device)

    def use(self, scales_TR: Tensor) -> None:
        """Set the scales of the next forward's tokens."""
        self._text.scales_TR = scales_TR

    @property
    def train_vision(self) -> bool:
        """True if models may train the vision tower."""
        return any(group.flag == "train_vision" for group in self._groups)

    @contextmanager
    def in_tower(self, scales_R: Tensor) -> Iterator[None]:
        """Inside, the vision tower computes for the one model with these scales; outside, without any adapter."""
        self._tower.scales_TR, self._tower.is_off = scales_R[None], False
        try:
            yield
        finally:
            self._tower.is_off = True

    @property
    def accumulated(self) -> list[Tensor]:
        """The gradients of all loaded adapters, accumulated since `load`."""
        return [gradient for buffers in self._loaded for gradient in (buffers.grad_a_LRI, buffers.grad_b_LRO)]

    def collect(self, models: Sequence[LoraModel]) -> None:
        """Add the gradients accumulated since `load`, which loaded these models, to each model's own, once."""
        for ranks, stack, buffers in self._slices(models):
            for parameter, total in ((stack.a_LrI, buffers.grad_a_LRI), (stack.b_LrO, buffers.grad_b_LRO)):
                part = total[:, ranks]
                parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)

    def discard(self) -> None:
        """Drop the gradients accumulated since `load`, after a failed microbatch."""
        torch._foreach_zero_(self.accumulated)

    def _slices(self, models: Sequence[LoraModel]) -> Iterator[tuple[slice, StackedAdapter, "Buffers"]]:
        by_group = {id(buffers.group): buffers for buffers in self._loaded}
        for ranks, model in zip(self._rank_slices, dict.fromkeys(models), strict=True):
            for stack in model.stacks:
                yield ranks, stack, by_group[id(stack.group)]

    def _buffer_rank(self, rank: int) -> int:
        """Return R for models whose ranks sum to `rank`."""
        return rank if self._device.type == "cpu" else buffer_rank(rank, self._max_rank)


def buffer_rank(summed: int, largest: int) -> int:
    """Return R of the buffers for models whose ranks sum to `summed`, on a GPU that takes models up to a largest rank.

    R is a power of two, and at least 16 or, where the largest rank is above, 32: code and graphs are compiled for each
    R.
    """
    return 1 << (max(summed, 16, min(largest, 32)) - 1).bit_length()


@dataclass(frozen=True)
class Buffers:
    """The tensors that a group's matrices compute with: the loaded models' adapters, and their gradients."""

    group: Group
    a_LRI: Tensor
    b_LRO: Tensor
    grad_a_LRI: Tensor
    grad_b_LRO: Tensor

    @classmethod
    def zeros(cls, group: Group, width: int, dtype: torch.dtype, device: torch.device) -> "Buffers":
        """Make buffers of rank `width` that add nothing."""
        outputs, inputs = group.matrix_shape
        wide = torch.promote_types(dtype, torch.float32)
        of_a, of_b = zip(group.lengths, (inputs, outputs), strict=True)
        return cls(
            group,
            *(
                torch.zeros(length, width, size, dtype=kind, device=device)
                for kind in (dtype, wide)
                for length, size in (of_a, of_b)
            ),
        )

    @property
    def width(self) -> int:
        """R."""
        return self.a_LRI.shape[1]

    def narrow(self, width: int) -> "Buffers":
        """Return buffers of a smaller R in the same memory, from its beginning."""
        parts = ((tensor, tensor.shape[0], tensor.shape[2]) for tensor in self._all())
        return Buffers(
            self.group,
            *(tensor.view(-1)[: count * width * size].view(count, width, size) for tensor, count, size in parts),
        )

    def clear(self) -> None:
        """Set all to 0."""
        torch._foreach_zero_(self._all())

    def bind(self) -> None:
        """Make the group's matrices compute with these."""
        for number, target in enumerate(self.group.targets):
            of_a, of_b = (slice(number * count, (number + 1) * count) for count in target.num_matrices)
            # .data has a version counter of its own: backward adds to one layer's after another's.
            parts = zip(self._all(), (of_a, of_b, of_a, of_b), strict=True)
            target.take(*(tensor[matrices].data for tensor, matrices in parts))

    def _all(self) -> tuple[Tensor, ...]:
        return self.a_LRI, self.b_LRO, self.grad_a_LRI, self.grad_b_LRO


def _want_gradient(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Make the embeddings require a gradient: nothing before the first layer's adapters does, and they would get none.

    Returns a copy, as an input with images is a copy too: code is compiled separately for what a graph begins with.
    """
    return output.requires_grad_().clone() if torch.is_grad_enabled() else output


def _initialise(model: LoraModel) -> None:
    """Sample each A."""
    generator = torch.Generator().manual_seed((model.config.seed or 0) % 2**63)

    def sample(shape: torch.Size) -> Tensor:
        return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)

    model.initialise_a(sample)
