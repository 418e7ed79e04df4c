"""Token ids that stand for an image's contents are never drawn, on both of vLLM's model runners.

A logit bias would take them out too, but out of the log probabilities as well: every other token would seem
likelier than the trainer finds it, by -log(1 - their probability); 0.003 nats in a random model of 384 tokens.
So they are hidden from the draw alone. Requests with top_k or top_p, whose log probabilities are renormalised
over what is kept, get the bias besides (`requests.py`), so that what is kept holds none.

N rows, V vocabulary
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample import sampler as second_sampler


@contextlib.contextmanager
def _hidden(logits_NV: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, those columns are minus infinity."""
    kept = logits_NV.index_select(1, columns)
    logits_NV.index_fill_(1, columns, float("-inf"))
    try:
        yield
    finally:
        logits_NV.index_copy_(1, columns, kept)


def on_first_runner(sampler: Any, ids: Tensor) -> None:
    """Changes vLLM's Sampler of the V1 runner (CPU). `ids` is int64, on the device."""
    greedy, ops = sampler.greedy_sample, sampler.topk_topp_sampler
    draw = ops.forward

    def greedy_sample(logits_NV: Tensor) -> Tensor:
        with _hidden(logits_NV, ids):
            token_ids_N: Tensor = greedy(logits_NV)
        return token_ids_N

    def forward(
        logits_NV: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs_NV = apply_top_k_top_p(logits_NV.clone(), k, p).log_softmax(-1, dtype=torch.float32)
        with _hidden(logits_NV, ids):
            token_ids_N, _ = draw(logits_NV, generators, k, p)
        return token_ids_N, logprobs_NV

    sampler.greedy_sample, ops.forward = greedy_sample, forward


def on_second_runner(ids: Tensor) -> None:
    """Changes the function by which the V2 runner (CUDA) draws, greedily too. `ids` is int64, on the device."""
    draw: Callable[..., Tensor] = second_sampler.gumbel_sample

    def gumbel_sample(logits_NV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _hidden(logits_NV, ids):
            return draw(logits_NV, *args, **kwargs)

    second_sampler.gumbel_sample = gumbel_sample
