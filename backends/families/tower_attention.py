"""Attention of a vision tower on CUDA, in 16 bits: all images of a pass at once, whatever their sizes.

By transformers' SDPA each image, or each window of one, is a call of its own in every layer.
"""

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

_VARLEN = "tinker_flash_tower"
"""transformers gives the images' bounds to what has `flash` in its name, and else a part of the row at a time."""


def use_varlen(tower: PreTrainedModel) -> None:
    """Have a tower's layers compute so, where the kernel takes what they compute with: FlashAttention 2
    (arXiv:2307.08691), not causal."""
    weight = next(tower.parameters())
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
        AttentionInterface.register(_VARLEN, _varlen)
        tower.config._attn_implementation = _VARLEN


def _varlen(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **other: object,
) -> tuple[Tensor, None]:
    """query, key and value [1, heads, P, D], P patches; returns [1, P, heads, D]."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    out = varlen_attn(query, key, value, *bounds, scale=scaling)
    assert isinstance(out, Tensor)
    return out[None], None
