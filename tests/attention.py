"""References for the attention of packed rows."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def one_by_one(qkv: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    """[T, H, D]: causal attention of each sample alone, by torch's own, of query [T, H, D], key and value [T, G, D]."""
    parts = []
    for query, key, value in zip(*(tensor.split(lengths) for tensor in qkv), strict=True):
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def masked_softmax(qkv: list[Tensor], grad_THD: Tensor, lengths: list[int], scale: float) -> list[Tensor]:
    """Output [T, H, D], log-sum-exp [H, T], and the gradients of query, key and value, all in float32.

    Written out as it is defined, sample by sample and key head by key head, with no attention kernel and no autograd.
    """
    floats = [tensor.detach().float() for tensor in (*qkv, grad_THD)]
    found = [torch.zeros_like(tensor) for tensor in (floats[0], *floats[:3])]
    lse_HT = floats[0].new_zeros(floats[0].shape[1], len(floats[0]))
    group = floats[0].shape[1] // floats[1].shape[1]
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for begin, end in pairwise(bounds):
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=lse_HT.device).triu(1)
        for key_head in range(floats[1].shape[1]):
            heads = slice(key_head * group, (key_head + 1) * group)
            query_HTD, grad_HTD = (one[begin:end, heads].transpose(0, 1) for one in (floats[0], floats[3]))
            key_TD, value_TD = (one[begin:end, key_head] for one in floats[1:3])
            scores_HTT = (scale * query_HTD @ key_TD.T).masked_fill_(hidden, -torch.inf)
            lse_HT[heads, begin:end] = scores_HTT.logsumexp(-1)
            weights_HTT = scores_HTT.softmax(-1)
            del scores_HTT
            out_HTD = weights_HTT @ value_TD
            grad_scores_HTT = grad_HTD @ value_TD.T
            grad_scores_HTT.sub_((grad_HTD * out_HTD).sum(-1, keepdim=True)).mul_(weights_HTT).mul_(scale)
            found[0][begin:end, heads] = out_HTD.transpose(0, 1)
            found[1][begin:end, heads] = (grad_scores_HTT @ key_TD).transpose(0, 1)
            found[2][begin:end, key_head] = (grad_scores_HTT.mT @ query_HTD).sum(0)
            found[3][begin:end, key_head] = (weights_HTT.mT @ grad_HTD).sum(0)
    return [found[0], lse_HT, *found[1:]]
