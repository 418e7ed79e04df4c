"""Dequantise fp8 in blocks (`formats/block_fp8.py`) as one kernel, which reads a byte and writes a number: in plain
torch a matrix passes through memory five times, twice in float32.

N outputs, K inputs, I and J blocks of them
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32
"""Rows of a block that one program computes."""


def dequantise(weight_NK: Tensor, scale_IJ: Tensor, block: int, found_NK: Tensor) -> Tensor:
    """Write each number times the scale of its block to `found_NK`, multiplied in float32 and rounded once."""
    assert weight_NK.is_contiguous() and scale_IJ.is_contiguous() and found_NK.is_contiguous() and block % _ROWS == 0
    num_outputs, num_inputs = weight_NK.shape
    grid = (triton.cdiv(num_outputs, _ROWS), triton.cdiv(num_inputs, block))
    _dequantise[grid](
        weight_NK, scale_IJ, found_NK, num_outputs, num_inputs, scale_IJ.shape[1], ROWS=_ROWS, BLOCK=block
    )
    return found_NK


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _dequantise(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    weight, scale, found, num_outputs, num_inputs, num_blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_outputs) & (column < num_inputs)
    index = row.to(tl.int64) * num_inputs + column
    factor = tl.load(scale + tl.program_id(0) * ROWS // BLOCK * num_blocks + tl.program_id(1))
    number = tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + index, (number * factor).to(found.dtype.element_ty), mask=inside)
