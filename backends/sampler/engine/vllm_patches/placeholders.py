"""Token ids that stand for an image's contents are never sampled, by either of vLLM's model runners.

A logit bias would take them out too, but out of the log probabilities as well: every other token would seem likelier
than the trainer finds it, by -log(1 - their probability); 0.003 nats in a random model of 384 tokens. So they are
hidden from the draw alone. Requests with top_k or top_p, whose log probabilities are renormalised over what is kept,
get the bias besides (`requests.py`), so that no placeholder is kept.

N rows, V vocabulary
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from tinker_server.backends.sampler.engine.vllm_patches import targets


@contextlib.contextmanager
def _hidden(logits_NV: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, these columns are minus infinity."""
    before = logits_NV.index_select(1, columns)
    logits_NV.index_fill_(1, columns, float("-inf"))
    try:
        yield
    finally:
        logits_NV.index_copy_(1, columns, before)


def hide_from_v1(sampler: Sampler, ids: Tensor) -> None:
    """Change the sampler of the V1 model runner (CPU). `ids` is int64, on the device."""
    ops = sampler.topk_topp_sampler

    def greedy_sample(logits_NV: Tensor) -> Tensor:
        with _hidden(logits_NV, ids):
            return greedy(logits_NV)

    def forward(
        logits_NV: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs_NV = apply_top_k_top_p(logits_NV.clone(), k, p).log_softmax(-1, dtype=torch.float32)
        with _hidden(logits_NV, ids):
            token_ids_N, _ = sample(logits_NV, generators, k, p)
        return token_ids_N, logprobs_NV

    greedy = targets.V1_GREEDY.replace(greedy_sample, on=sampler)
    sample = targets.V1_RANDOM.replace(forward, on=ops, attribute="forward")


def patch_v2_draws(ids: Tensor) -> None:
    """Change the function by which the V2 model runner (CUDA) draws, greedily too. `ids` is int64, on the device.

    Given NaN logits, as of a diverged adapter, it draws tokens beyond the vocabulary, and their embedding ends the
    engine for everybody. They are clamped; their log probability stays NaN, and is reported by name.
    """

    def gumbel_sample(logits_NV: Tensor, *args: object, **kwargs: object) -> Tensor:
        with _hidden(logits_NV, ids) if len(ids) else contextlib.nullcontext():
            return draw(logits_NV, *args, **kwargs).clamp_(0, logits_NV.shape[1] - 1)

    draw = targets.V2_GUMBEL.replace(gumbel_sample)
