"""What attention of a packed row is held against."""

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
