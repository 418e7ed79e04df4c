"""The part of attention in which an image's tokens see those behind them, merged with the causal part.

With m the log-sum-exp of a token's causal scores and n that of its scores of later tokens of its image, the log-sum-exp
of all is l = log(exp(m) + exp(n)), and the output is the causal one times exp(m - l) plus, for each later token, its
value times exp(score - l). Backward of both parts needs the whole output and l, and nothing else of the other part: the
gradient of a score s is exp(s - l) (dO V^T - sum(dO O)).

Scores are computed in float32: an image of 256 tokens has few of them.

T tokens of a microbatch, I images, F tokens of an image, H query heads, G key heads, D values of a head
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_AT_ONCE = 8
"""Images whose scores are held at once: 64 MiB for 32 heads and 256 tokens."""


def add_later_tokens(
    causal: tuple[Tensor, Tensor], qkv: Sequence[Tensor], images_IF: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return [T, H, D], and the log-sum-exp of the scores [H, T], nats, from those of causal attention. `images_IF` are
    indices of tokens, each image's in order."""
    out_THD, lse_HT = (tensor.clone() for tensor in causal)
    for image_IF in images_IF.split(_AT_ONCE):
        query, key, value, out_IHFD = _of_images([*qkv, out_THD], image_IF)
        scores_IHFF, lse_IHF = _later_scores(query, key, scale), lse_HT[:, image_IF].transpose(0, 1)
        whole_IHF = torch.logaddexp(lse_IHF, scores_IHFF.logsumexp(-1))
        later_IHFD = (scores_IHFF - whole_IHF[..., None]).exp() @ value
        merged_IHFD = out_IHFD * (lse_IHF - whole_IHF).exp()[..., None] + later_IHFD
        out_THD[image_IF] = merged_IHFD.transpose(1, 2).to(out_THD.dtype)
        lse_HT[:, image_IF] = whole_IHF.transpose(0, 1).to(lse_HT.dtype)
    return out_THD, lse_HT


def add_later_gradients(
    gradients: Sequence[Tensor], grad_THD: Tensor, saved: Sequence[Tensor], images_IF: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, from those of the causal part, which was given the whole output and
    its log-sum-exp; `saved` are query, key and value with these two."""
    *tensors, lse_HT = saved
    summed = tuple(gradient.clone() for gradient in gradients)
    for image_IF in images_IF.split(_AT_ONCE):
        query, key, value, out, grad = _of_images([*tensors, grad_THD], image_IF)
        scores_IHFF, lse_IHF = _later_scores(query, key, scale), lse_HT[:, image_IF].transpose(0, 1)
        weights_IHFF = (scores_IHFF - lse_IHF[..., None]).exp()
        of_weights_IHFF = grad @ value.mT - (grad * out).sum(-1, keepdim=True)
        of_scores_IHFF = scale * weights_IHFF * of_weights_IHFF
        parts = (of_scores_IHFF @ key, of_scores_IHFF.mT @ query, weights_IHFF.mT @ grad)
        for total, part_IHFD in zip(summed, parts, strict=True):
            of_head = part_IHFD.unflatten(1, (total.shape[1], -1)).sum(2).transpose(1, 2)  # heads share a key
            total[image_IF] = (total[image_IF] + of_head).to(total.dtype)
    return summed


def _of_images(tensors: Sequence[Tensor], image_IF: Tensor) -> Iterator[Tensor]:
    """Return [I, H, F, D] in float32 or wider of each tensor; those of keys are repeated for the heads that share
    them."""
    num_heads = tensors[0].shape[1]
    for tensor in tensors:
        wide = tensor[image_IF].transpose(1, 2).to(torch.promote_types(tensor.dtype, torch.float32))
        yield wide.repeat_interleave(num_heads // wide.shape[1], 1)


def _later_scores(query_IHFD: Tensor, key_IHFD: Tensor, scale: float) -> Tensor:
    """Return [I, H, F, F], minus infinity where a token is not behind the query's."""
    scores_IHFF = scale * query_IHFD @ key_IHFD.mT
    is_before_FF = torch.ones(scores_IHFF.shape[-2:], dtype=torch.bool, device=scores_IHFF.device).tril()
    return scores_IHFF.masked_fill(is_before_FF, -torch.inf)
