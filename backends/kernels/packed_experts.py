"""Multiply (token, expert) pairs by their experts' packed matrices (`formats/packed.py`) as a kernel, which dequantises
a tile of a matrix where it multiplies: no expert's matrix is ever whole in another type.

S (token, expert) pairs, E experts, N outputs, K inputs, I and J blocks of them
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
_FP4_BLOCK = tl.constexpr(32)
"""Numbers of a row in MXFP4 that have one scale; two of them are a byte."""
_LEAST_ROWS, _MOST_ROWS, _FEW_ROWS = 16, 128, 32
"""Rows that a program multiplies, and up to which four warps multiply them as fast as eight."""


@dataclass(frozen=True)
class SortedPairs:
    """Pairs whose rows are in the experts' order."""

    ends_E: Tensor
    """int32: the end of each expert's rows."""


@dataclass(frozen=True)
class AlignedPairs:
    """Pairs by their numbers, sorted and filled up to whole tiles, as vLLM's kernels have them."""

    numbers: Tensor
    """int32, `rows` for each tile; pairs that are none have a number beyond all others."""
    experts: Tensor
    """int32, of each tile."""
    count: Tensor
    """int32 [1], of the numbers that are set."""
    rows: int
    num_choices: int
    """Pairs that have the same row of x."""
    weights_S: Tensor | None
    """float32, by which each pair's result is multiplied before it is rounded."""


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the rows that a program multiplies, by the mean of an expert."""
    mean: int = triton.next_power_of_2(num_pairs // num_experts)
    return max(_LEAST_ROWS, min(_MOST_ROWS, mean))


def product_by_expert(  # noqa: PLR0913
    x_SK: Tensor,
    halves: tuple[Tensor, Tensor],
    pairs: SortedPairs | AlignedPairs,
    found_SN: Tensor,
    *,
    bias_EN: Tensor | None = None,
    is_transposed: bool = False,
) -> None:
    """Write each pair's x W^T, or x W if `is_transposed`, to its row of `found_SN`. `halves` are the numbers of all
    experts' W, in fp8 or two in a byte, and the scales of their blocks: of 128 by 128, or in MXFP4 of 32 of a row.

    W is rounded to the type of x as `dequantised` does, and sums, with the expert's bias, are in float32.
    """
    numbers_ENK, num_pairs, num_inputs, num_outputs = halves[0], len(found_SN), x_SK.shape[1], found_SN.shape[1]
    num_experts, is_fp4 = len(numbers_ENK), numbers_ENK.dtype == torch.uint8
    rows_of_w, columns = (num_inputs, num_outputs) if is_transposed else (num_outputs, num_inputs)
    assert x_SK.stride(1) == 1 and found_SN.stride(1) == 1
    assert numbers_ENK.shape[1:] == (rows_of_w, columns // 2 if is_fp4 else columns)
    strides = [tensor.stride(dim) for tensor in halves for dim in range(3)]
    assert not is_fp4 or (strides[2] == strides[5] == 1 and columns % 32 == 0)
    strides += [0, 0] if bias_EN is None else bias_EN.stride()
    places: tuple[Tensor | None, ...]
    if isinstance(pairs, SortedPairs):
        rows, places, num_choices = tile_rows(num_pairs, num_experts), (pairs.ends_E, None, None, None, None), 1
        num_tiles = triton.cdiv(num_pairs, rows) + num_experts
    else:
        rows, num_choices = pairs.rows, pairs.num_choices
        places = None, pairs.numbers, pairs.experts, pairs.count, pairs.weights_S
        num_tiles = min(len(pairs.numbers) // rows, num_pairs)  # each tile has a pair
    outputs, stages = (128, 3) if rows == _MOST_ROWS else (64, 4)
    grid = (num_tiles * triton.cdiv(num_outputs, outputs),)
    sizes = {"ROWS": rows, "OUTPUTS": outputs, "BLOCK": _BLOCK, "EXPERTS": triton.next_power_of_2(num_experts)}
    how = {"num_stages": stages, "num_warps": 4 if rows <= _FEW_ROWS else 8}
    counts = num_pairs, num_experts, num_outputs, num_inputs, num_choices
    _product_by_expert[grid](
        x_SK, *halves, bias_EN, found_SN, *places, *counts, x_SK.stride(0), found_SN.stride(0), *strides,
        IS_TRANSPOSED=is_transposed, IS_FP4=is_fp4, **sizes, **how,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fp4_numbers(code):  # type: ignore[no-untyped-def]
    """Return twice the numbers of four bits, in float32: 0, 1, 2, 3, 4, 6, 8, 12, and the same with a sign."""
    code = code.to(tl.int32)
    part = code & 7
    size = tl.where(part < 2, part, (2 + (part & 1)) << (tl.maximum(part >> 1, 1) - 1))
    return tl.where(code > 7, -size, size).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tile(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    weight,
    scale,
    first_row,
    first_column,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    row_scale_stride,
    column_scale_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FP4: tl.constexpr,
):
    """Return [ROWS, COLUMNS] of an expert's matrix, dequantised in float32; 0 beyond it."""
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    if IS_FP4:
        half = (first_column // 2 + tl.arange(0, COLUMNS // 2))[None, :]
        is_inside = (row < num_rows) & (half < num_columns // 2)
        both = tl.load(weight + row * row_stride + half, mask=is_inside, other=0)
        group = (first_column // _FP4_BLOCK + tl.arange(0, COLUMNS // _FP4_BLOCK))[None, :]
        is_inside = (row < num_rows) & (group < num_columns // _FP4_BLOCK)
        power = tl.load(scale + row * row_scale_stride + group, mask=is_inside, other=0).to(tl.int32)
        # Half of the scale, since numbers are twice theirs: 2^(power - 128), whose bits below 2^-126 are a fraction.
        factor = tl.where(power > 1, (power - 1) << 23, (1 << 21) << tl.minimum(power, 1)).to(tl.float32, bitcast=True)
        factor = tl.broadcast_to(factor[:, :, None], (ROWS, COLUMNS // _FP4_BLOCK, _FP4_BLOCK // 2))
        factor = tl.reshape(factor, (ROWS, COLUMNS // 2))
        return tl.interleave(_fp4_numbers(both & 15) * factor, _fp4_numbers(both >> 4) * factor)
    column = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    factor = tl.load(scale + first_row // BLOCK * row_scale_stride + first_column // BLOCK * column_scale_stride)
    place = weight + row * row_stride + column * column_stride
    return tl.load(place, mask=(row < num_rows) & (column < num_columns), other=0.0).to(tl.float32) * factor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product_by_expert(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    x,
    weight,
    scale,
    bias,
    found,
    ends,
    pair_numbers,
    tile_experts,
    num_set,
    pair_weights,
    num_pairs,
    num_experts,
    num_outputs,
    num_inputs,
    num_choices,
    x_stride,
    found_stride,
    expert_stride,
    row_stride,
    column_stride,
    expert_scale_stride,
    row_scale_stride,
    column_scale_stride,
    expert_bias_stride,
    bias_stride,
    IS_TRANSPOSED: tl.constexpr,
    IS_FP4: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    # Programs of the same rows stand side by side, so that all but the first find them in the cache.
    num_columns = tl.cdiv(num_outputs, OUTPUTS)
    tile, column = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    if ends is not None:
        each = tl.arange(0, EXPERTS)
        end = tl.load(ends + each, mask=each < num_experts, other=0)
        begin = tl.load(ends + each - 1, mask=(each > 0) & (each < num_experts), other=0)
        tiles = (end - begin + ROWS - 1) // ROWS
        tiles_end = tl.cumsum(tiles, 0)
        expert = tl.sum((tiles_end <= tile).to(tl.int32), 0)
        is_own = each == expert
        row = tl.sum(tl.where(is_own, begin + (tile - tiles_end + tiles) * ROWS, 0), 0) + tl.arange(0, ROWS)
        is_row = row < tl.sum(tl.where(is_own, end, 0), 0)
        is_tile = expert < num_experts
    else:
        is_tile = tile * ROWS < tl.load(num_set)
        expert = tl.load(tile_experts + tile)
        row = tl.load(pair_numbers + tile * ROWS + tl.arange(0, ROWS))
        is_row = row < num_pairs
    if not is_tile:
        return
    row = row.to(tl.int64)
    x_row = x + (row // num_choices) * x_stride
    output = (column * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_output = output < num_outputs
    weight += expert.to(tl.int64) * expert_stride
    scale += expert.to(tl.int64) * expert_scale_stride
    # x W^T is transposed: tensor cores take their first operand from registers, where the weights are dequantised.
    total = tl.zeros((ROWS, OUTPUTS) if IS_TRANSPOSED else (OUTPUTS, ROWS), tl.float32)
    for number in range(tl.cdiv(num_inputs, BLOCK)):
        first = number * BLOCK
        inner = first + tl.arange(0, BLOCK)
        is_input = inner < num_inputs
        if IS_TRANSPOSED:
            left = tl.load(x_row[:, None] + inner[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            right = _tile(
                weight, scale, first, column * OUTPUTS, num_inputs, num_outputs, row_stride, column_stride,
                row_scale_stride, column_scale_stride, BLOCK, OUTPUTS, BLOCK, IS_FP4,
            ).to(x.dtype.element_ty)  # fmt: skip
        else:
            right = tl.load(x_row[None, :] + inner[:, None], mask=is_row[None, :] & is_input[:, None], other=0.0)
            left = _tile(
                weight, scale, column * OUTPUTS, first, num_outputs, num_inputs, row_stride, column_stride,
                row_scale_stride, column_scale_stride, OUTPUTS, BLOCK, BLOCK, IS_FP4,
            ).to(x.dtype.element_ty)  # fmt: skip
        total = tl.dot(left, right, total)
    if not IS_TRANSPOSED:
        total = tl.trans(total)
    if bias is not None:
        own_bias = bias + expert.to(tl.int64) * expert_bias_stride + output * bias_stride
        total += tl.load(own_bias, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if pair_weights is not None:
        total *= tl.load(pair_weights + row, mask=is_row, other=0.0)[:, None]
    place = found + row[:, None] * found_stride + output[None, :]
    tl.store(place, total.to(found.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
