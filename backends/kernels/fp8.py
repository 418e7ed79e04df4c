"""Dequantise fp8 in blocks (`formats/block_fp8.py`) as a kernel, which reads a byte and writes a number: in plain
torch a matrix passes through memory five times, twice in float32. Multiply by such a matrix without writing it at all,
which is faster for few rows: there a product takes as long as reading its weights.

M rows, N outputs, K inputs, I and J blocks of them
"""

import triton
import triton.language as tl
from torch import Tensor

from tinker_server.backends.kernels.cards import choices_on

_ROWS = 32
"""Rows of a block that a program computes."""
_LEAST_ROWS, _MOST_ROWS, _FEW_ROWS = 16, 128, 32
"""Rows that a program multiplies, and up to which four warps multiply them as fast as eight."""
MUCH_KIB = 160
"""Shared memory of a program in which the largest tiles fit."""
_FILLING = 16384
"""Outputs of which each program can take 128 in place of 64, and all multiprocessors have one."""


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


def product_sizes(num_rows: int, num_outputs: int, shared_memory_kib: int) -> tuple[int, int, int, int]:
    """Return a program's rows, outputs, stages and warps."""
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, triton.next_power_of_2(num_rows)))
    is_wide = num_rows > _MOST_ROWS or (rows > _FEW_ROWS and num_outputs >= _FILLING)
    outputs, stages = (128, 3) if is_wide else (64, 4)
    if rows == _MOST_ROWS and shared_memory_kib < MUCH_KIB:
        stages -= 1
    return rows, outputs, stages, 4 if rows <= _FEW_ROWS else 8


def product(x_MK: Tensor, weight_NK: Tensor, scale_IJ: Tensor, block: int, found_MN: Tensor) -> None:
    """Write x W^T to `found_MN`, whose rows may have a gap between them. W is rounded to the type of x as `dequantise`
    does, and sums are in float32."""
    assert x_MK.is_contiguous() and weight_NK.is_contiguous() and scale_IJ.is_contiguous() and block % 128 == 0
    assert found_MN.stride(1) == 1
    (num_rows, num_inputs), num_outputs = x_MK.shape, len(weight_NK)
    kib = choices_on(x_MK.device).shared_memory_kib
    rows, outputs, stages, warps = product_sizes(num_rows, num_outputs, kib)
    # Programs of the same outputs stand side by side, so that the second finds the weights in the cache.
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, outputs))
    sizes = {"ROWS": rows, "OUTPUTS": outputs, "BLOCK": block}
    how = {"num_stages": stages, "num_warps": warps}
    strides = scale_IJ.shape[1], found_MN.stride(0)
    _product[grid](x_MK, weight_NK, scale_IJ, found_MN, num_rows, num_outputs, num_inputs, *strides, **sizes, **how)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def wait_for_sums(total):  # type: ignore[no-untyped-def]
    """Return sums in float32 once the tensor cores have written them.

    Else products of dequantised weights are in flight when the next weights are computed, and these get the registers
    that tensor cores still read (Triton 3.6): numbers were wrong, or infinite, where many programs shared the card. To
    read a sum is to wait for it; until then, the products of one step are in flight together.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x,
    weight,
    scale,
    found,
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    found_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = row < num_rows, output < num_outputs
    factors = scale + tl.program_id(1) * OUTPUTS // BLOCK * num_blocks
    # Transposed: tensor cores take their first operand from registers, where the weights are dequantised.
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for number in range(tl.cdiv(num_inputs, BLOCK)):
        inner = number * BLOCK + tl.arange(0, BLOCK)
        is_input = inner < num_inputs
        columns = tl.load(
            x + row[None, :] * num_inputs + inner[:, None], mask=is_row[None, :] & is_input[:, None], other=0.0
        )
        numbers = tl.load(
            weight + output[:, None] * num_inputs + inner[None, :],
            mask=is_output[:, None] & is_input[None, :],
            other=0.0,
        )
        weights = (numbers.to(tl.float32) * tl.load(factors + number)).to(x.dtype.element_ty)
        total = wait_for_sums(tl.dot(weights, columns, total))
    place = found + row[None, :] * found_stride + output[:, None]
    tl.store(place, total.to(found.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
