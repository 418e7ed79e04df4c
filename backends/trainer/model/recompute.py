"""How much memory a row's activations take, and how many layers compute theirs again so that the row fits.

Measured at start on rows of made-up text, so that it holds for any architecture: what a row takes is a constant and
so much per token, less for each layer that keeps its input alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from backends.kernels.varlen_attention import LONG

GIB = 2**30
MEASURED_TOKENS = (1024, LONG)
"""Of the two rows that tell the constant and the part per token: a short sample and a long one."""
MARGIN = 0.05
"""Part of the memory that is left free: fragments, and operations larger than those measured."""


class Recomputation:
    """Lets the first layers keep their input alone, and compute the rest again in backward."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
        for layer in self._layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    @property
    def num_layers(self) -> int:
        """How many can."""
        return len(self._layers)

    def use(self, num_layers: int) -> None:
        """From the next row on so many layers do; nothing is compiled again."""
        for index, layer in enumerate(self._layers):
            # transformers asks for both; the layer's own modules stay as they are in evaluation.
            layer.gradient_checkpointing = layer.training = index < num_layers


@dataclass(frozen=True)
class ActivationCosts:
    """What a row of a number of tokens takes, in bytes."""

    constant: float
    per_token: float
    saved_per_token: float
    """By each layer that computes again."""
    num_layers: int
    """That can compute again."""

    def layers_for(self, num_tokens: int, free_bytes: float) -> int:
        """How many layers must compute again for a row to fit; all of them where that is not enough."""
        missing = self.constant + self.per_token * num_tokens - free_bytes
        if missing <= 0 or self.saved_per_token <= 0:
            return 0
        return min(self.num_layers, math.ceil(missing / (self.saved_per_token * num_tokens)))

    def longest(self, free_bytes: float) -> int:
        """Tokens of the largest row that fits at all."""
        return max(0, int((free_bytes - self.constant) / self.least_per_token))

    @property
    def least_per_token(self) -> float:
        """Where all layers compute again."""
        return self.per_token - self.saved_per_token * self.num_layers


class Memory:
    """The memory of one GPU that rows share with weights, adapters and optimizers."""

    def __init__(
        self, layers: Sequence[nn.Module], run_row: Callable[[int], None], device: torch.device, limit_bytes: int
    ) -> None:
        """`run_row` runs forward and backward of made-up text of so many tokens; what it compiles is compiled."""
        self.set_aside_bytes = 0
        """Reserved for other rows than those that are planned."""
        self.recomputes = False
        """Whether layers of the next row compute again."""
        self._device = device
        self._limit_bytes = limit_bytes
        self._recomputation = Recomputation(layers)
        self._costs = self._measure(run_row)

    def _measure(self, run_row: Callable[[int], None]) -> ActivationCosts:
        num_layers = self._recomputation.num_layers

        def peak(num_tokens: int, recomputing: int) -> float:
            self._recomputation.use(recomputing)
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            run_row(num_tokens)
            return torch.cuda.max_memory_allocated(self._device) - before

        short, long = MEASURED_TOKENS
        of_short, of_long, of_least = peak(short, 0), peak(long, 0), peak(long, num_layers)
        per_token = (of_long - of_short) / (long - short)
        return ActivationCosts(
            constant=max(0.0, of_short - per_token * short),
            per_token=per_token,
            saved_per_token=max(0.0, of_long - of_least) / (long * max(1, num_layers)),
            num_layers=num_layers,
        )

    @property
    def _free_bytes(self) -> float:
        return self._limit_bytes * (1 - MARGIN) - self.set_aside_bytes - torch.cuda.memory_allocated(self._device)

    @property
    def longest_row(self) -> int:
        """Tokens of the largest row that fits now."""
        return self._costs.longest(self._free_bytes)

    def tokens_in(self, part: float) -> int:
        """Of the largest row that takes this part of all memory while no layer computes again."""
        return max(0, int((part * self._limit_bytes - self._costs.constant) / self._costs.per_token))

    def prepare(self, num_tokens: int) -> None:
        """Have as many layers compute again as a row of so many tokens needs."""
        self._recompute(self._costs.layers_for(num_tokens, self._free_bytes))

    def prepare_least(self) -> None:
        """Have all layers compute again, and give back what is kept for later."""
        self._recompute(self._costs.num_layers)
        torch.cuda.empty_cache()

    def _recompute(self, num_layers: int) -> None:
        self.recomputes = num_layers > 0
        self._recomputation.use(num_layers)

    def describe(self) -> str:
        """For the operator, in one line."""
        costs = self._costs
        return (
            f"a row of training takes {costs.constant / GIB:.1f} GiB and {costs.per_token / 2**20:.2f} MiB a token,"
            f" {costs.least_per_token / 2**20:.2f} where all layers compute again; {self._free_bytes / GIB:.1f} GiB are"
            f" free, for at most {self.longest_row} tokens"
        )
