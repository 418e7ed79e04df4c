"""`lora_linear.scaled` as one kernel: of small rows' launches it was a third.

T tokens of a row, R rank columns of its models
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def scale(product_TR: Tensor, scales_TR: Tensor) -> Tensor:
    """`product_TR` * `scales_TR`, [T, R] or [R] for every token, in place; 0 where the scale is 0."""
    assert product_TR.is_contiguous()
    scales_TR = scales_TR.contiguous()
    count, repeats = product_TR.numel(), max(1, scales_TR.numel())
    _scale[triton.cdiv(count, _BLOCK),](product_TR, scales_TR, count, repeats, BLOCK=_BLOCK)
    return product_TR


# For any count: a kernel of its own for each kind would be compiled while the server serves.
@triton.jit(do_not_specialize=["count", "repeats"])  # type: ignore[untyped-decorator, unused-ignore]
def _scale(product, scales, count, repeats, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    factor = tl.load(scales + place % repeats, mask=inside, other=0.0)
    value = tl.load(product + place, mask=inside, other=0.0)
    result = tl.where(factor == 0, 0.0, value.to(factor.dtype) * factor)
    tl.store(product + place, result.to(product.dtype.element_ty), mask=inside)
