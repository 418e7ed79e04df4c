"""Context parallelism: ranks compute consecutive slices of one packed microbatch's tokens.

Attention exchanges tokens for heads (`kernels/exchange.py`); all else in a decoder goes token by token. Losses see the
whole microbatch: its log probabilities are gathered on every rank.

T tokens of the microbatch, S of a rank's slice, K targets of a token, R summed ranks of the microbatch's models
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tinker_server.backends.kernels.autograd import Context
from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.packing import Microbatch

One = TypeVar("One")
_LEAST_TOKENS = 2
"""Of a slice: code compiled for any number of tokens is recompiled for one."""


def slice_of(num_tokens: int, context: World) -> slice:
    """Return the tokens of this rank's slice of a microbatch; the last slices may reach beyond its end."""
    size = max(_LEAST_TOKENS, -(-num_tokens // context.size))
    return slice(context.rank * size, (context.rank + 1) * size)


def slice_tokens(batch: Microbatch, scales_TR: Tensor, context: World) -> tuple[Microbatch, Tensor]:
    """Return this rank's slice of a microbatch, padded to be as long as all others, and the scales of its tokens.

    Lengths stay those of the whole, of which attention sees all tokens; padding is one more sample. Images without a
    token in the slice are left out.
    """
    assert batch.places_NK is None, "slices have whole samples"
    num_tokens = len(batch.targets_TK)
    tokens = slice_of(num_tokens, context)
    padding = (tokens.stop - tokens.start) * context.size - num_tokens
    bounds, bounds_host = batch.cu_seqlens, batch.cu_seqlens_host
    if padding:
        end = torch.tensor([num_tokens + padding], dtype=bounds_host.dtype)
        bounds, bounds_host = torch.cat([bounds, to_device(end, bounds.device)]), torch.cat([bounds_host, end])
    whole = batch.feature_tokens()
    parts = [slice(*np.searchsorted(one_N, (tokens.start, tokens.stop)).tolist()) for one_N in whole]
    here = [index for index, part in enumerate(parts) if part.start < part.stop]
    experts = batch.experts_LTK
    own = replace(
        batch,
        cu_seqlens=bounds,
        cu_seqlens_host=bounds_host,
        model_inputs={name: _cut(one, -1, tokens) for name, one in batch.model_inputs.items()},
        targets_TK=_cut(batch.targets_TK, 0, tokens),
        max_seqlen=max(batch.max_seqlen, padding),
        images=_chosen(batch.images, here),
        tower_scales=_chosen(batch.tower_scales, here) if batch.tower_scales else (),
        feature_tokens=partial(_chosen, whole, here),
        feature_parts=_chosen(parts, here),
        experts_LTK=None if experts is None else _cut(experts, 1, tokens),
    )
    return own, _cut(scales_TR, 0, tokens)


def gather_tokens(own_SK: Tensor, num_tokens: int, context: World) -> Tensor:
    """All-gather [T, K] of all slices, on every rank.

    Every rank must make the same of it: the gradient of a rank's own slice is then its own part of the whole's.
    """
    whole_TK = cast(Tensor, _Gathered.apply(own_SK, context))  # type: ignore[no-untyped-call]
    return whole_TK[:num_tokens]


class _GatheredContext(Context, Protocol):
    tokens: slice


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatheredContext, own_SK: Tensor, context: World) -> Tensor:
        size = len(own_SK)
        ctx.tokens = slice(context.rank * size, (context.rank + 1) * size)
        whole_TK = own_SK.new_empty(context.size * size, own_SK.shape[1])
        dist.all_gather(list(whole_TK.split(size)), own_SK.contiguous(), group=context.group)
        return whole_TK

    @staticmethod
    def backward(ctx: _GatheredContext, grad_TK: Tensor) -> tuple[Tensor, None]:
        return grad_TK[ctx.tokens], None


def _cut(tensor: Tensor, dim: int, tokens: slice) -> Tensor:
    """Copy the tokens of a dimension; those beyond its end are 0."""
    num_tokens, size = tensor.shape[dim], tokens.stop - tokens.start
    begin, end = min(tokens.start, num_tokens), min(tokens.stop, num_tokens)
    shape = list(tensor.shape)
    shape[dim] = size
    # Memory of its own: code compiled for a tensor is recompiled for a view of another.
    own = tensor.new_zeros(shape)
    own.narrow(dim, 0, end - begin).copy_(tensor.narrow(dim, begin, end - begin))
    return own


def _chosen(values: Sequence[One], indices: Sequence[int]) -> list[One]:
    return [values[index] for index in indices]
