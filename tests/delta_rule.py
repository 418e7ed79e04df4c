"""A reference for the part of the delta rule's backward that gives the gradients of queries and keys."""

import torch
from torch import Tensor

from tinker_server.backends.kernels.delta_rule import CHUNK


def of_queries_and_keys(
    tensors: tuple[Tensor, ...], bounds: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `delta_rule_gradients.of_queries_and_keys` does, in plain torch, in the type of the sums: float64 for
    float64, else float32. Scores are rounded to the type of the queries."""
    *of_tokens, states, of_states = tensors
    query_THK = of_tokens[0]
    (num_tokens, num_heads, size), scale = query_THK.shape, query_THK.shape[-1] ** -0.5
    wide = torch.promote_types(query_THK.dtype, torch.float32)
    sample_R, number_R = indices.unbind(1)
    place_C = torch.arange(CHUNK, device=bounds.device)
    token_RC = (bounds[sample_R] + number_R * CHUNK)[:, None] + place_C
    is_token_RC = token_RC < bounds[sample_R + 1][:, None]
    token_RC = torch.where(is_token_RC, token_RC, num_tokens)
    found = [query_THK.new_zeros(num_tokens + 1, num_heads, *shape, dtype=wide) for shape in ((size,),) * 3 + ((),)]
    padded = [torch.cat([one, one.new_zeros(1, *one.shape[1:])]).to(wide) for one in of_tokens]
    q, k, v, g, do, dv = (one[token_RC].transpose(1, 2) for one in padded)  # [R, H, C, ...]
    h, dh = states.to(wide), of_states.to(wide)
    last_R1 = (is_token_RC.sum(1, keepdim=True) - 1).clamp(min=0)
    last_RH1 = g.gather(2, last_R1[:, None].expand(-1, num_heads, -1))
    seen_R1CC = (is_token_RC[:, :, None] & (place_C[:, None] >= place_C))[:, None]
    scores = (do @ v.mT) * (g[..., :, None] - g[..., None, :]).exp2() * scale
    scores = scores.masked_fill(~seen_R1CC, 0).to(query_THK.dtype).to(wide)
    of_query = (do @ h.mT) * g.exp2()[..., None] * scale + scores @ k
    of_key = (v @ dh.mT) * (last_RH1 - g).exp2().masked_fill(~is_token_RC[:, None], 0)[..., None]
    of_last = (h * dh).sum((2, 3)) * last_RH1[..., 0].exp2() + (of_key * k).sum((2, 3))
    of_key = of_key + scores.mT @ q
    of_passed = (of_query * q).sum(-1) - (of_key * k).sum(-1)
    of_passed = of_passed.scatter_add(2, last_R1[:, None].expand(-1, num_heads, -1), of_last[..., None])
    for total, part in zip(found, (of_query, of_key, -(dv @ h.mT), of_passed), strict=True):
        total[token_RC] = part.transpose(1, 2)
    return found[0][:-1], found[1][:-1], found[2][:-1], found[3][:-1]
