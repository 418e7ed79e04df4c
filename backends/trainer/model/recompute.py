"""Activation memory model; picks how many layers to checkpoint so that a microbatch fits.

Measured at start on made-up text, so that it holds for any architecture: a microbatch takes a constant and an amount
per token, less for each checkpointed layer, which saves its input alone. Tokens are a rank's own: where several compute
a microbatch together, those of its slice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.kernels.varlen_attention import LONG

GIB = 2**30
MEASURED_TOKENS = (1024, LONG)
"""Tokens of the microbatches that give the constant and the amount per token: a short sample and a long one."""
LEAST_MEASURED_TOKENS = 128
"""Tokens of the microbatch that is run before it is known what fits."""
MARGIN = 0.05
"""Part of the memory that stays free: fragments, and operations larger than those measured."""


class Recomputation:
    """Checkpoints the first layers: they save their input alone, and recompute the rest in backward."""

    def __init__(self, layers: Sequence[nn.Module], *, offloads: bool = False) -> None:
        """`offloads`: inputs wait in main memory for the backward."""
        self._layers = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
        run = partial(checkpoint, use_reentrant=False)
        for layer in self._layers:
            layer._gradient_checkpointing_func = partial(_offloading, run) if offloads else run

    @property
    def num_layers(self) -> int:
        """Number of layers that can be checkpointed."""
        return len(self._layers)

    def use(self, num_layers: int) -> None:
        """Checkpoint this many layers from the next microbatch on; nothing is recompiled."""
        for index, layer in enumerate(self._layers):
            # transformers requires both; the layer's own modules stay in evaluation mode.
            layer.gradient_checkpointing = layer.training = index < num_layers


def _offloading(run: Callable[..., object], layer: Callable[..., object], *args: object) -> object:
    """Run a checkpointed layer whose inputs wait in main memory. What it saves inside has hooks of its own."""
    with saved_tensors_hooks(_to_main_memory, lambda waiting: to_device(waiting[1], waiting[0])):
        return run(layer, *args)


def _to_main_memory(tensor: Tensor) -> tuple[torch.device, Tensor]:
    waiting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    # On the stream that computes: the next layer's kernels come behind it, and the host waits for nothing.
    return tensor.device, waiting.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class ActivationCosts:
    """Bytes that the activations of a microbatch take."""

    constant: float
    per_token: float
    saved_per_token: float
    """Saved by each checkpointed layer."""
    num_layers: int
    """Layers that can be checkpointed."""

    def layers_for(self, num_tokens: int, free_bytes: float) -> int:
        """Return the number of layers to checkpoint so that a microbatch fits; all of them if that is not enough."""
        missing = self.constant + self.per_token * num_tokens - free_bytes
        if missing <= 0 or self.saved_per_token <= 0:
            return 0
        return min(self.num_layers, math.ceil(missing / (self.saved_per_token * num_tokens)))

    def longest(self, free_bytes: float) -> int:
        """Return the tokens of the largest microbatch that fits at all."""
        return max(0, int((free_bytes - self.constant) / self.least_per_token))

    def leaves_room(self, graph_tokens: int, longest: int, free_bytes: float) -> bool:
        """Return whether a microbatch of `longest` tokens fits beside graphs of microbatches of `graph_tokens`. All
        share one memory, so that the largest counts."""
        graphs_bytes = self.constant + self.per_token * graph_tokens
        return self.longest(free_bytes - graphs_bytes) >= longest

    @property
    def least_per_token(self) -> float:
        """Bytes per token if all layers are checkpointed."""
        return self.per_token - self.saved_per_token * self.num_layers


def measure_costs(
    peak_here: Callable[[int, int], float],
    num_layers: int,
    free_bytes: float,
    largest: Callable[[float], float],
) -> ActivationCosts:
    """Return what microbatches take. `peak_here` runs a microbatch of so many tokens with so many of `num_layers`
    layers checkpointed, and returns the bytes at its peak; none that needs more than `free_bytes` is run. `largest`
    returns the largest of all ranks' values: ranks that share a base wait for each other in each microbatch, and so
    have to run the same, whatever each has free.

    The constant and the amount per token come from microbatches with all layers checkpointed, of which long ones fit
    beside any base that is planned: in few tokens the head's logits and its copied weight, a constant from
    `MEASURED_TOKENS` on, would count as an amount per token.
    """

    def peak(num_tokens: int, recomputing: int) -> float:
        return largest(peak_here(num_tokens, recomputing))

    free_bytes = -largest(-free_bytes)
    of_least = peak(LEAST_MEASURED_TOKENS, num_layers)
    saved_per_token = (peak(LEAST_MEASURED_TOKENS, 0) - of_least) / LEAST_MEASURED_TOKENS
    short, long = MEASURED_TOKENS
    while short > LEAST_MEASURED_TOKENS and of_least * short / LEAST_MEASURED_TOKENS > free_bytes:
        short //= 2
    peaks, num_tokens = {short: peak(short, num_layers)}, short
    per_token = peaks[short] / short
    while num_tokens < long and peaks[num_tokens] + per_token * num_tokens <= free_bytes:
        num_tokens *= 2
        peaks[num_tokens] = peak(num_tokens, num_layers)
        per_token = (peaks[num_tokens] - peaks[short]) / (num_tokens - short)
    while num_tokens > short and peaks[num_tokens] + saved_per_token * num_tokens > free_bytes:
        num_tokens //= 2
    if peaks[num_tokens] + saved_per_token * num_tokens <= free_bytes:
        saved_per_token = (peak(num_tokens, 0) - peaks[num_tokens]) / num_tokens
    saved_per_token = max(0.0, saved_per_token)
    return ActivationCosts(
        constant=max(0.0, peaks[short] - per_token * short),
        per_token=per_token + saved_per_token,
        saved_per_token=saved_per_token / max(1, num_layers),
        num_layers=num_layers,
    )


class Memory:
    """The memory of one GPU, which microbatches share with weights, adapters and optimizers."""

    def __init__(
        self,
        layers: Recomputation,
        run: Callable[[int], None],
        device: torch.device,
        limit_bytes: int,
        largest: Callable[[float], float],
    ) -> None:
        """`run` runs forward and backward of made-up text of so many tokens; its code is compiled already. `largest`
        is that of `measure_costs`."""
        self.graphs_bytes = 0
        """Reserved for graphs, which compute other microbatches than those planned here."""
        self.models_bytes = 0
        """Reserved for what models will still take."""
        self.recomputes = False
        """True if layers of the next microbatch are checkpointed."""
        self._device = device
        self._limit_bytes = limit_bytes
        self._recomputation = layers
        self._costs = self._measure(run, largest)

    def _measure(self, run: Callable[[int], None], largest: Callable[[float], float]) -> ActivationCosts:
        def peak(num_tokens: int, recomputing: int) -> float:
            self._recomputation.use(recomputing)
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            run(num_tokens)
            return torch.cuda.max_memory_allocated(self._device) - before

        return measure_costs(peak, self._recomputation.num_layers, self._free_bytes, largest)

    @property
    def _free_bytes(self) -> float:
        reserved_bytes = self.graphs_bytes + self.models_bytes
        return self._limit_bytes * (1 - MARGIN) - reserved_bytes - torch.cuda.memory_allocated(self._device)

    def fitting_tokens(self, freed_bytes: float = 0) -> int:
        """Return the tokens of the largest microbatch that fits now, or once so many bytes are freed."""
        return self._costs.longest(self._free_bytes + freed_bytes)

    def tokens_in(self, part: float) -> int:
        """Return the tokens of the largest microbatch that takes this part of all memory without checkpointing."""
        return max(0, int((part * self._limit_bytes - self._costs.constant) / self._costs.per_token))

    def tokens_as_large_as(self, size_bytes: int) -> float:
        """Return the tokens, with all layers checkpointed, that take so many bytes."""
        return size_bytes / self._costs.least_per_token

    def layers_for(self, num_tokens: int) -> int:
        """Return how many layers to checkpoint so that a microbatch of this many tokens fits now."""
        return self._costs.layers_for(num_tokens, self._free_bytes)

    def leaves_room(self, graph_tokens: int, longest: int) -> bool:
        """Return whether a microbatch of `longest` tokens fits beside a graph of so many tokens."""
        return self._costs.leaves_room(graph_tokens, longest, self._free_bytes + self.graphs_bytes)

    def prepare_least(self) -> None:
        """Checkpoint all layers, and empty the allocator's cache."""
        self.prepare(self._costs.num_layers)
        torch.cuda.empty_cache()

    def prepare(self, num_layers: int) -> None:
        """Checkpoint this many layers from the next microbatch on."""
        self.recomputes = num_layers > 0
        self._recomputation.use(num_layers)

    def describe(self) -> str:
        """Describe the costs to the operator, in one line."""
        costs = self._costs
        return (
            f"a training microbatch takes {costs.constant / GIB:.1f} GiB and {costs.per_token / 2**20:.2f} MiB a token,"
            f" {costs.least_per_token / 2**20:.2f} if all layers recompute; {self._free_bytes / GIB:.1f} GiB are"
            f" free, for at most {self.fitting_tokens()} tokens"
        )
