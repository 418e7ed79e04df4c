"""Attention as it is defined, in float32, for what no kernel here has.

T tokens, H query heads, G key heads, D values of a head
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_attention(
    qkv: Sequence[Tensor], mask: Tensor | None, scale: float, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """Attend: query [1, H, T, D]; key and value [1, G, T, D]; returns [1, T, H, D]. A token sees those for which `mask`
    [1, 1, T, T] is true; without one itself and all before it.

    softcap  scores become softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118, section 2)
    sinks_H  a further score of each head, without a value (gpt-oss)
    """
    query, key, value = qkv
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (tensor.to(wide).repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
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
