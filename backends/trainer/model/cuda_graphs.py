"""CUDA graphs for small text microbatches, which are launch-bound.

A graph is captured for a number of tokens and samples and a summed rank; a smaller microbatch is padded with samples
of no request, which have no gradient. Capturing, at first use, takes about a second.

T tokens of a microbatch, K = 1 target of a token, R summed ranks of its models
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from tinker_server.api_schemas.training import Layout
from tinker_server.backends.kernels.varlen_attention import LONG
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.model.packing import Microbatch
from tinker_server.backends.trainer.model.router_replay import UNKNOWN
from tinker_server.backends.trainer.model.token_logprobs import Scorer

log = logging.getLogger(__name__)
TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Tokens of a graph. Above, launching takes less time than computing, on an H200 and a model of 4 billion
parameters."""
_FEW_SAMPLES = 64
_TOKENS_PER_SAMPLE, _MANY_IN = 8, 2048
"""A graph takes up to 64 samples, padding included, or in 2,048 tokens or fewer one for every 8 of them. For each
possible sample attention launches blocks for all tokens of the microbatch: one of 4,096 tokens with room for 512
samples took 380 ms on an H200, 150 of them for this."""
_WARM_UPS = 2
_CLOSE, _CLOSE_PART = 0.1, 0.02
"""Bound of the mean difference between a graph's and eager log probabilities: nats, and part of their mean magnitude.
Microbatches of different lengths were seen to differ by 0.016 nats, by 0.04 in a mixture of experts; wrong kernels by
1.2."""

_Key = tuple[int, int, int, frozenset[Layout]]
"""Tokens, summed rank and samples of a graph, and its models' layouts."""


class Graphs:
    """Run microbatches through the scorer by graphs, with a gradient or without: one graph serves both. Graphs hold
    their tensors: a few GiB."""

    def __init__(self, scorer: Scorer, device: torch.device, max_tokens: int = TOKENS[-1]) -> None:
        """`max_tokens` of a microbatch: larger graphs would hold too much memory."""
        self._scorer = scorer
        self._sizes = [size for size in TOKENS if size <= max(max_tokens, TOKENS[0])]
        self._graphs: dict[_Key, _Graph] = {}
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._pool = torch.cuda.graph_pool_handle()
        """One for all graphs: no two are ever in use at once."""
        self.memory_bytes = 0
        """Bytes that the captured graphs hold, and torch does not count as allocated."""

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest graph."""
        return self._sizes[-1]

    def test(self, batch: Microbatch) -> None:
        """Capture a graph and compare it with the scorer on the graph's own padded microbatch. Raises BackendFailed."""
        scales_TR = self._scorer.weights.blank(len(batch.targets_TK))
        self(batch, scales_TR)
        graph = next(iter(self._graphs.values()))
        replayed_TK = graph.forward(batch, scales_TR).clone()
        # With a gradient, too: without one, other kernels are compiled, which round differently.
        computed_TK = self._scorer(graph.batch, graph.scales_TR).detach()[: len(replayed_TK)]
        if not torch.equal(replayed_TK, computed_TK):
            raise BackendFailed("captured kernels give other log probabilities than eager ones")

    def takes(self, batch: Microbatch, scales_TR: Tensor, has_room: Callable[[int], bool]) -> bool:
        """Return whether a graph can compute this microbatch: one that is there, or one for whose tokens the memory has
        room."""
        size = self._size(batch)
        return (
            size is not None
            and not batch.images
            and batch.places_NK is None
            and batch.max_seqlen < LONG  # above, attention has a faster kernel, which must know the lengths
            and batch.targets_TK.shape[1] == 1
            and (self._key(size, scales_TR) in self._graphs or has_room(size[0]))
        )

    def release(self) -> None:
        """Give the memory of all graphs back; they are captured again when they are next needed."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self.memory_bytes = 0
        torch.cuda.empty_cache()

    def __call__(self, batch: Microbatch, scales_TR: Tensor) -> Tensor:
        """Return [T, 1], as the scorer gives it for the same microbatch padded to the graph's tokens.

        Gradients accumulated since the adapters were loaded are lost if a graph is captured: score before `backward`.
        Raises BackendFailed if the model's kernels cannot be captured, and OutOfMemoryError.
        """
        size = self._size(batch)
        assert size is not None
        key = self._key(size, scales_TR)
        if key not in self._graphs:
            try:
                self._graphs[key] = _Graph(self._scorer, batch, key, self._pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise BackendFailed(f"its kernels cannot be captured ({error})") from error
            # What is reserved besides has grown too, by a model's first gradient.
            segments = torch.cuda.memory_snapshot(self._pool)
            self.memory_bytes = sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
            log.info("captured a graph of %d tokens, summed rank %d, %d samples", *key[:3])
            self._check(self._graphs[key], batch, scales_TR)
        return cast(Tensor, _GraphReplay.apply(self._anchor, self._graphs[key], batch, scales_TR))  # type: ignore[no-untyped-call]

    def _check(self, graph: "_Graph", batch: Microbatch, scales_TR: Tensor) -> None:
        """Raise BackendFailed if a fresh graph scores its first microbatch otherwise than the scorer."""
        replayed_TK = graph.forward(batch, scales_TR).clone()
        # Layers would be compiled anew for a single token.
        like = (batch, scales_TR) if len(replayed_TK) > 1 else (graph.batch, graph.scales_TR)
        computed_TK = self._scorer(*like).detach()[: len(replayed_TK)]
        known = computed_TK.isfinite()  # others: the model itself has diverged
        difference = (replayed_TK - computed_TK)[known].abs().mean()
        if known.any() and not difference < _CLOSE + _CLOSE_PART * computed_TK[known].abs().mean():
            raise BackendFailed(f"captured kernels give log probabilities {difference:.3g} nats from eager ones")

    def _key(self, size: tuple[int, int], scales_TR: Tensor) -> _Key:
        num_tokens, num_samples = size
        return num_tokens, scales_TR.shape[1], num_samples, self._scorer.weights.layouts

    def _size(self, batch: Microbatch) -> tuple[int, int] | None:
        """Return the tokens and samples of the graph that takes this microbatch; None without one."""
        num_tokens = next((size for size in self._sizes if len(batch.targets_TK) <= size), None)
        num_samples = None if num_tokens is None else samples_of_graph(batch, num_tokens)
        return None if num_tokens is None or num_samples is None else (num_tokens, num_samples)


def samples_of_graph(batch: Microbatch, num_tokens: int) -> int | None:
    """Return the samples of the graph of `num_tokens` that takes the microbatch; None if none does."""
    # Padding must belong to a sample: uninitialised memory times a zero gradient can be NaN.
    needed = len(batch.cu_seqlens) - 1 + (len(batch.targets_TK) < num_tokens)
    every = num_tokens // _TOKENS_PER_SAMPLE
    allowed = [min(_FEW_SAMPLES, every)] + ([every] if num_tokens <= _MANY_IN else [])
    return next((most for most in allowed if needed <= most), None)


class _Graph:
    """Forward and backward of microbatches of one size, at fixed addresses."""

    def __init__(self, scorer: Scorer, like: Microbatch, key: _Key, pool: "torch.cuda._POOL_HANDLE") -> None:
        num_tokens, width, num_samples, _ = key
        device = like.targets_TK.device
        zeros = partial(torch.zeros, device=device)
        inputs = {
            name: zeros(*value.shape[:-1], num_tokens, dtype=value.dtype) for name, value in like.model_inputs.items()
        }
        cu_seqlens = torch.full((num_samples + 1,), num_tokens, dtype=torch.int32, device=device)
        cu_seqlens[0] = 0
        unknown = torch.zeros(num_samples + 1, dtype=torch.int32)  # on the host: a graph serves samples of any lengths
        targets_TK = zeros(num_tokens, 1, dtype=torch.int64)
        experts_LTK = None if scorer.router_replay is None else scorer.router_replay.blank(num_tokens)
        self.batch = Microbatch(inputs, [], cu_seqlens, unknown, num_tokens, targets_TK, experts_LTK=experts_LTK)
        self.scales_TR = zeros(num_tokens, width, dtype=torch.float32)
        self.grad_TK = zeros(num_tokens, 1, dtype=torch.float32)
        try:
            self._capture(scorer, pool)
        finally:
            # Capturing added to it. A copy of what was there before would take gigabytes in a mixture of experts.
            scorer.weights.discard()

    @torch.enable_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _capture(self, scorer: Scorer, pool: "torch.cuda._POOL_HANDLE") -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                scorer(self.batch, self.scales_TR).backward(self.grad_TK)
        torch.cuda.current_stream().wait_stream(side)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            output = scorer(self.batch, self.scales_TR)
        with torch.cuda.graph(self._backward, pool=pool):
            output.backward(self.grad_TK)
        self._logprobs_TK = output.detach()

    def forward(self, batch: Microbatch, scales_TR: Tensor) -> Tensor:
        """Return [T, 1], of the microbatch's own tokens; valid until the next call."""
        count, ends = len(batch.targets_TK), len(batch.cu_seqlens)
        for name, value in batch.model_inputs.items():
            self.batch.model_inputs[name].zero_()[..., :count] = value
        self.batch.targets_TK.zero_()[:count] = batch.targets_TK
        self.scales_TR.zero_()[:count] = scales_TR
        if self.batch.experts_LTK is not None:
            self.batch.experts_LTK.fill_(UNKNOWN)
            if batch.experts_LTK is not None:
                self.batch.experts_LTK[:, :count] = batch.experts_LTK
        # The padding is one sample, and others of no token.
        self.batch.cu_seqlens.fill_(len(self.batch.targets_TK))[:ends] = batch.cu_seqlens
        self._forward.replay()
        logprobs_TK: Tensor = self._logprobs_TK[:count]
        return logprobs_TK

    def backward(self, grad_TK: Tensor) -> None:
        """Run the latest forward's backward; it adds to the loaded adapters' gradients."""
        self.grad_TK.zero_()[: len(grad_TK)] = grad_TK
        self._backward.replay()


class _GraphContext(Protocol):
    graph: _Graph


class _GraphReplay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GraphContext, _anchor: Tensor, graph: _Graph, batch: Microbatch, scales_TR: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.forward(batch, scales_TR).clone()

    @staticmethod
    def backward(ctx: _GraphContext, grad_TK: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.graph.backward(grad_TK)
        return torch.zeros((), device=grad_TK.device), None, None, None
