"""`lora/linear.py:scaled` as a kernel: it was a third of the launches of small microbatches.

T tokens of a microbatch, R summed ranks of its models, N = R for each of some linears
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def scale(product_TN: Tensor, scales_TR: Tensor) -> Tensor:
    """Multiply `product_TN` in place by `scales_TR`, [T, R] or [1, R] for every token; 0 where the scale is 0."""
    assert product_TN.is_contiguous()
    scales_TR = scales_TR.contiguous()
    count, width = product_TN.numel(), product_TN.shape[1]
    num_tokens, rank = scales_TR.shape
    stride = rank if num_tokens > 1 else 0
    _scale[triton.cdiv(count, _BLOCK),](product_TN, scales_TR, count, width, rank, stride, BLOCK=_BLOCK)
    return product_TN


# Unspecialised: else a kernel for each kind of count would be compiled while the server serves.
@triton.jit(do_not_specialize=["count", "width", "rank", "stride"])  # type: ignore[untyped-decorator, unused-ignore]
def _scale(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    product, scales, count, width, rank, stride, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    factor = tl.load(scales + index // width * stride + index % width % rank, mask=inside, other=0.0)
    value = tl.load(product + index, mask=inside, other=0.0)
    result = tl.where(factor == 0, 0.0, value.to(factor.dtype) * factor)
    tl.store(product + index, result.to(product.dtype.element_ty), mask=inside)
