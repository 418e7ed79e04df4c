"""Attention of the Qwen vision towers on CUDA, in 16 bits: all images of a pass at once, whatever their sizes.

By transformers each image, or each window of one, is a call of SDPA of its own in every layer, and the rotation of
queries and keys twelve more: of a tower's time a third.

P patches, E the tower's width, D that of a head
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from backends.families.tower_patches import tower_patch


def use_varlen(tower: PreTrainedModel) -> None:
    """Have a tower's layers compute so, where the kernel takes what they compute with: FlashAttention 2
    (arXiv:2307.08691), not causal."""
    weight = next(tower.parameters())
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
        for block in tower.blocks:
            tower_patch(block.attn, "forward").replace(partial(_attend, block.attn), on=block.attn)


def _attend(
    attention: Any,
    hidden_PE: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    position_embeddings: tuple[Tensor, Tensor],
    **other: object,
) -> Tensor:
    """[P, E], as the forward of transformers' own; cosines and sines [P, D]."""
    from backends.kernels.rotary import rotate

    qkv = rotate(attention.qkv(hidden_PE), *position_embeddings)
    query, key, value = qkv.view(len(hidden_PE), 3, attention.num_heads, -1).unbind(1)
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = varlen_attn(query, key, value, *bounds, scale=attention.scaling)
    assert isinstance(out, Tensor)
    result: Tensor = attention.proj(out.flatten(1))
    return result
