"""Attention as it is defined, in float32: for what no kernel here has, and to compare a kernel's windows with.

T tokens, H query heads, G key heads, D values of a head
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(
    qkv: Sequence[Tensor], mask: Tensor | None, scale: float, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """query [1, H, T, D]; key and value [1, G, T, D]; returns [1, T, H, D]. A token sees those for which `mask`
    [1, 1, T, T] is true; without one itself and all before it.

    softcap  scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118, section 2)
    sinks_H  one more score of each head, without a value (gpt-oss)
    """
    query, key, value = qkv
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (one.to(wide).repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scores = scale * query.to(wide) @ key.mT
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(wide)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).to(query.dtype).transpose(1, 2)


def windowed_attention(
    qkv: list[Tensor], grad_THD: Tensor, scale: float, window: int | None, image: slice | None = None
) -> list[Tensor]:
    """Output [T, H, D] of one sample whose tokens see `window` tokens each, and those of `image` each other, and the
    gradients of query, key and value, for the output's gradient. Without autograd, which is off inside an operator."""
    query_HTD, key_GTD, value_GTD, grad_HTD = (one.float().transpose(0, 1) for one in (*qkv, grad_THD))
    group = len(query_HTD) // len(key_GTD)
    key_HTD, value_HTD = (one.repeat_interleave(group, 0) for one in (key_GTD, value_GTD))
    position_T = torch.arange(query_HTD.shape[1], device=query_HTD.device)
    behind_TT = position_T[:, None] - position_T
    is_hidden_TT = behind_TT < 0 if window is None else (behind_TT < 0) | (behind_TT >= window)
    if image is not None:
        is_hidden_TT[image, image] = False
    weights_HTT = (scale * query_HTD @ key_HTD.mT).masked_fill(is_hidden_TT, -torch.inf).softmax(-1)
    out_HTD = weights_HTT @ value_HTD
    grad_weights_HTT = grad_HTD @ value_HTD.mT - (grad_HTD * out_HTD).sum(-1, keepdim=True)
    grad_scores_HTT = scale * weights_HTT * grad_weights_HTT
    of_keys = (grad_scores_HTT.mT @ query_HTD, weights_HTT.mT @ grad_HTD)
    grad_key_GTD, grad_value_GTD = (one.unflatten(0, (-1, group)).sum(1) for one in of_keys)
    return [one.transpose(0, 1) for one in (out_HTD, grad_scores_HTT @ key_HTD, grad_key_GTD, grad_value_GTD)]
