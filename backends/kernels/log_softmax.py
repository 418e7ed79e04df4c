"""Log-sum-exp and probabilities of logits, each in one pass over them.

T tokens, V vocabulary
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def normaliser(logits_TV: Tensor) -> Tensor:
    """Return the log-sum-exp [T, 1], nats (summed as it goes: Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    num_tokens, width = logits_TV.shape
    lse_T1 = logits_TV.new_empty(num_tokens, 1)
    _normaliser[num_tokens,](logits_TV, lse_T1, width, BLOCK=_BLOCK, num_warps=8)
    return lse_T1


def probabilities(logits_TV: Tensor, lse_T1: Tensor, weight_T1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, V] in `dtype`: each token's probabilities times minus its weight."""
    num_tokens, width = logits_TV.shape
    result_TV = torch.empty_like(logits_TV, dtype=dtype)
    grid = num_tokens, triton.cdiv(width, _BLOCK)
    _probabilities[grid](logits_TV, lse_T1.contiguous(), weight_T1.contiguous(), result_TV, width, BLOCK=_BLOCK)
    return result_TV


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normaliser(logits, lse, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + row * width + index, mask=index < width, other=float("-inf"))
        higher = tl.maximum(largest, value, propagate_nan=tl.PropagateNan.ALL)
        # Before anything is read, exp(-inf - -inf) would be NaN.
        total = total * tl.where(largest == higher, 1.0, tl.exp(largest - higher))
        total += tl.where(value == float("-inf"), 0.0, tl.exp(value - higher))
        largest = higher
    highest = tl.max(largest, 0)
    sum_of_row = tl.sum(total * tl.exp(largest - highest), 0)
    tl.store(lse + row, highest + tl.log(sum_of_row))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _probabilities(logits, lse, weights, result, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: PLR0913
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < width
    value = tl.load(logits + row * width + index, mask=inside, other=0.0)
    found = -tl.exp(value - tl.load(lse + row)) * tl.load(weights + row)
    tl.store(result + row * width + index, found.to(result.dtype.element_ty), mask=inside)
