"""Attention over packed rows: each sample attends to itself alone.

In bfloat16 on CUDA `varlen_attn` does it from the samples' bounds, with no mask at all, through
transformers' attention interface. Elsewhere transformers' SDPA does it, with a block mask built from
restarting position ids.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

VARLEN = "tinker_varlen"


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """The name of transformers' attention implementation for the decoder."""
    if device.type != "cuda" or dtype == torch.float32:  # which the kernel does not take
        return "sdpa"
    AttentionInterface.register(VARLEN, _varlen_attention)
    AttentionMaskInterface.register(VARLEN, lambda *args, **kwargs: None)
    return VARLEN


def bounds(name: str, cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """The extra arguments that the implementation of this name needs in the model's forward.

    Named as nothing in transformers is: the vision tower gets them too, and must not take them for its own.
    """
    return {"packed_bounds": cu_seqlens, "packed_longest": max_seqlen} if name == VARLEN else {}


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    packed_bounds: Tensor,
    packed_longest: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D]."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (
        tensor[0].repeat_interleave(repeats, dim=0).transpose(0, 1).contiguous()
        for tensor, repeats in ((query, 1), (key, groups), (value, groups))
    )
    out = varlen_attn(
        query,
        key,
        value,
        packed_bounds,
        packed_bounds,
        packed_longest,
        packed_longest,
        scale=scaling,
        window_size=(-1, 0),
    )
    assert isinstance(out, Tensor)
    return out[None], None
