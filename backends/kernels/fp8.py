"""Dequantise fp8 in blocks (`formats/block_fp8.py`) as a kernel, which reads a byte and writes a number: in plain
torch a matrix passes through memory five times, twice in float32. Multiply by such a matrix without writing it at all,
which is faster for few rows: there a product takes as long as reading its weights.

M rows, N outputs, K inputs, I and J blocks of them, S splits of the inputs
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32
"""Rows of a block that a program computes."""
_LEAST_ROWS, _MOST_ROWS, _FEW_ROWS = 16, 128, 32
"""Rows that a program multiplies, and up to which a step has as many inputs as a block."""
_FILLING = 16384
"""Outputs of which each program can take 128 in place of 64, and all multiprocessors have one."""
_PROGRAMS, _LARGE_PROGRAMS = 396, 264
"""Programs that run at once on an H100 or H200, of up to 64 rows and of 128: three or two on each multiprocessor."""
_LEAST_STEPS = 8
"""Steps of a program below which its inputs are not split further."""
_SUMMED = 1024
"""Outputs of a row that a program adds up."""


@dataclass(frozen=True)
class Tiles:
    """What a program of a product computes: the fastest sizes of those measured on Hopper."""

    rows: int
    outputs: int
    inputs: int
    """Of a step."""
    splits: int
    """Programs that have a part of the inputs each. Their sums are added up afterwards."""
    stages: int
    warps: int


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


def tiles(num_rows: int, num_outputs: int, num_inputs: int) -> Tiles:
    """Choose the tiles of a product."""
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, triton.next_power_of_2(num_rows)))
    is_wide = num_outputs >= _FILLING and rows in (_FEW_ROWS, _MOST_ROWS)
    outputs, inputs = 128 if is_wide else 64, 64 if is_wide or rows > _FEW_ROWS else 128
    at_once = _LARGE_PROGRAMS if rows == _MOST_ROWS else _PROGRAMS
    programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs)
    most = max(1, triton.cdiv(num_inputs, inputs) // _LEAST_STEPS)
    stages = 3 if is_wide or (rows == _MOST_ROWS and programs > at_once) else 4
    warps = 8 if is_wide and rows == _MOST_ROWS else 4
    return Tiles(rows, outputs, inputs, min(most, max(1, at_once // programs)), stages, warps)


def product(  # noqa: PLR0913
    x_MK: Tensor, weight_NK: Tensor, scale_IJ: Tensor, block: int, found_MN: Tensor, chosen: Tiles | None = None
) -> None:
    """Write x W^T to `found_MN`, whose rows may have a gap between them. W is rounded to the type of x as `dequantise`
    does, and sums are in float32."""
    assert x_MK.is_contiguous() and weight_NK.is_contiguous() and scale_IJ.is_contiguous() and block % 128 == 0
    assert found_MN.stride(1) == 1
    (num_rows, num_inputs), num_outputs = x_MK.shape, len(weight_NK)
    own = chosen or tiles(num_rows, num_outputs, num_inputs)
    sums_SMN = x_MK.new_empty(own.splits, num_rows, num_outputs, dtype=torch.float32) if own.splits > 1 else found_MN
    # Programs of the same outputs stand side by side, so that the second finds the weights in the cache.
    grid = (triton.cdiv(num_rows, own.rows), triton.cdiv(num_outputs, own.outputs), own.splits)
    sizes = {"ROWS": own.rows, "OUTPUTS": own.outputs, "BLOCK": block, "STEP": own.inputs}
    how = {"num_stages": own.stages, "num_warps": own.warps}
    num_steps = triton.cdiv(triton.cdiv(num_inputs, own.inputs), own.splits)
    counts = num_rows, num_outputs, num_inputs, num_steps
    strides = scale_IJ.shape[1], sums_SMN.stride(-2), sums_SMN.stride(0)
    _product[grid](x_MK, weight_NK, scale_IJ, sums_SMN, *counts, *strides, **sizes, **how)
    if own.splits > 1:
        sums = (num_rows, triton.cdiv(num_outputs, _SUMMED))
        _add_up[sums](sums_SMN, found_MN, num_outputs, found_MN.stride(0), SPLITS=own.splits, OUTPUTS=_SUMMED)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_up(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    sums, found, num_outputs, found_stride, SPLITS: tl.constexpr, OUTPUTS: tl.constexpr
) -> None:
    """Write to a row of `found` the sum over its rows of all splits, in their order."""
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    total = tl.zeros((OUTPUTS,), tl.float32)
    for split in range(SPLITS):
        row = (split * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        total += tl.load(sums + row * num_outputs + output, mask=is_output, other=0.0)
    place = found + tl.program_id(0).to(tl.int64) * found_stride + output
    tl.store(place, total.to(found.dtype.element_ty), mask=is_output)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def wait_for_sums(total):  # type: ignore[no-untyped-def]
    """Return sums in float32 once the tensor cores have written them.

    Else products of dequantised weights are in flight when the next weights are computed, and these get the registers
    that tensor cores still read (Triton 3.6): numbers were wrong, or infinite, where many programs shared the card. To
    read a sum is to wait for it; until then, the products of one step are in flight together.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)


# Not specialised, the numbers that change with the rows do not compile it anew.
@triton.jit(do_not_specialize=["num_rows", "num_steps"])  # type: ignore[untyped-decorator, unused-ignore]
def _product(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x,
    weight,
    scale,
    found,
    num_rows,
    num_outputs,
    num_inputs,
    num_steps,
    num_blocks,
    found_stride,
    split_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = row < num_rows, output < num_outputs
    factors = scale + tl.program_id(1) * OUTPUTS // BLOCK * num_blocks
    # Transposed: tensor cores take their first operand from registers, where the weights are dequantised.
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for number in range(num_steps):
        first = (tl.program_id(2) * num_steps + number) * STEP
        inner = first + tl.arange(0, STEP)
        is_input = inner < num_inputs
        columns = tl.load(
            x + row[None, :] * num_inputs + inner[:, None], mask=is_row[None, :] & is_input[:, None], other=0.0
        )
        numbers = tl.load(
            weight + output[:, None] * num_inputs + inner[None, :],
            mask=is_output[:, None] & is_input[None, :],
            other=0.0,
        )
        factor = tl.load(factors + first // BLOCK, mask=first < num_inputs, other=0.0)
        weights = (numbers.to(tl.float32) * factor).to(x.dtype.element_ty)
        total = wait_for_sums(tl.dot(weights, columns, total))
    place = found + tl.program_id(2).to(tl.int64) * split_stride + row[None, :] * found_stride + output[:, None]
    tl.store(place, total.to(found.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
