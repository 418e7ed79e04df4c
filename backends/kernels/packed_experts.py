"""Multiply (token, expert) pairs by their experts' packed matrices (`formats/packed.py`) as a kernel, which dequantises
a tile of a matrix where it multiplies: no expert's matrix is ever whole in another type.

S (token, expert) pairs, E experts, N outputs, K inputs, I and J blocks of them
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinker_server.backends.kernels.cards import choices_on
from tinker_server.backends.kernels.fp8 import wait_for_sums

_FP8_BLOCK = tl.constexpr(128)
"""Rows and columns of a block in fp8 that has one scale."""
_FP4_BLOCK = tl.constexpr(32)
"""Numbers of a row in MXFP4 that have one scale; two of them are a byte."""
_LEAST_ROWS, _MOST_ROWS, _FEW_ROWS = 16, 128, 32
"""Rows that a program multiplies, and up to which four warps multiply them as fast as eight."""
_MOST_SORTED_ROWS = 256
_MUCH_KIB = 160
"""Shared memory of a program in which the largest tiles fit."""
_CONVERSION = """
    and.b32 number, {bytes}, {bits};
    mul.lo.u32 number, number, {shifts};
    and.b32 number, number, 0x81C081C0;
    fma.rn.bf16x2 number, number, scale, zero;
    fma.rn.bf16x2 {found}, number, {factors}, zero;"""
_LOWER, _UPPER = {"bits": "0x000F000F", "shifts": "0x1040"}, {"bits": "0x00F000F0", "shifts": "0x0104"}
_FOUR_BYTES = tl.constexpr(
    """{
    .reg .b32 low, high, number, scale, zero;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    mov.b32 scale, 0x7E807E80;
    mov.b32 zero, 0x80008000;"""
    + _CONVERSION.format(found="$0", bytes="low", factors="$5", **_LOWER)
    + _CONVERSION.format(found="$1", bytes="high", factors="$6", **_LOWER)
    + _CONVERSION.format(found="$2", bytes="low", factors="$5", **_UPPER)
    + _CONVERSION.format(found="$3", bytes="high", factors="$6", **_UPPER)
    + "\n    }"
)
"""Four bytes' lower numbers ($0, $1) and upper numbers ($2, $3) in bfloat16, times their factors ($5, $6).

Each byte gets 16 bits. The sign of four bits moves to that of bfloat16, the others to the lowest two of its exponent
and the highest of its fraction: 2^-126 times the number, also below 1. Multiplying by 2^126 is exact. Products are sums
with -0, since cards before Hopper have no others in bfloat16."""


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


def tile_rows(num_pairs: int, num_experts: int, most: int = _MOST_ROWS) -> int:
    """Return the rows that a program multiplies, by the mean of an expert."""
    mean: int = triton.next_power_of_2(num_pairs // num_experts)
    return max(_LEAST_ROWS, min(most, mean))


def tile_sizes(rows: int, *, is_fp4: bool, is_transposed: bool, shared_memory_kib: int) -> tuple[int, int, int, int]:
    """Return a program's outputs, inputs at a time, stages and warps: the fastest of those measured on Hopper, or as
    many stages as fit."""
    if rows > _MOST_ROWS:
        return 128, 64, 3, 8
    if rows == _MOST_ROWS:
        return (128, 64, 4, 8) if is_fp4 or is_transposed else (128, 128, 3 if shared_memory_kib >= _MUCH_KIB else 2, 8)
    if rows > _FEW_ROWS:
        return (128, 128, 3, 4) if is_fp4 else (64, 128, 4, 8)
    return (64, 256, 3, 4) if is_fp4 else (64, 128, 4, 4)


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
    if is_fp4 and not is_transposed:
        # The kernel has the even numbers of a row of W apart from the odd.
        x_SK = torch.cat([x_SK[:, ::2], x_SK[:, 1::2]], 1)
    places: tuple[Tensor | None, ...]
    if isinstance(pairs, SortedPairs):
        rows = tile_rows(num_pairs, num_experts, _MOST_SORTED_ROWS)
        places, num_choices = (pairs.ends_E, None, None, None, None), 1
        num_tiles = triton.cdiv(num_pairs, rows) + num_experts
    else:
        rows, num_choices = pairs.rows, pairs.num_choices
        places = None, pairs.numbers, pairs.experts, pairs.count, pairs.weights_S
        num_tiles = min(len(pairs.numbers) // rows, num_pairs)  # each tile has a pair
    kib = choices_on(x_SK.device).shared_memory_kib
    outputs, inputs, stages, warps = tile_sizes(rows, is_fp4=is_fp4, is_transposed=is_transposed, shared_memory_kib=kib)
    grid = (num_tiles * triton.cdiv(num_outputs, outputs),)
    sizes = {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, "EXPERTS": triton.next_power_of_2(num_experts)}
    how = {"num_stages": stages, "num_warps": warps}
    counts = num_pairs, num_experts, num_outputs, num_inputs, num_choices
    _product_by_expert[grid](
        x_SK, *halves, bias_EN, found_SN, *places, *counts, x_SK.stride(0), found_SN.stride(0), *strides,
        IS_TRANSPOSED=is_transposed, IS_FP4=is_fp4, **sizes, **how,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fp4_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    weight,
    scale,
    first_row,
    first_byte,
    num_rows,
    num_bytes,
    row_stride,
    row_scale_stride,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return the even and the odd numbers [ROWS, BYTES] of an expert's matrix in bfloat16; 0 beyond it."""
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    byte = (tl.arange(0, BYTES) + first_byte)[None, :]
    both = tl.load(weight + row * row_stride + byte, mask=(row < num_rows) & (byte < num_bytes), other=0)
    BLOCK: tl.constexpr = _FP4_BLOCK // 2
    block = (tl.arange(0, BYTES // BLOCK) + first_byte // BLOCK)[None, :]
    is_inside = (row < num_rows) & (block < num_bytes // BLOCK)
    power = tl.load(scale + row * row_scale_stride + block, mask=is_inside, other=0).to(tl.int16)
    # The bits of 2^(power - 127); that of 0 is a fraction.
    factor = tl.where(power == 0, tl.full((), 64, tl.int16), power << 7).to(tl.bfloat16, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, BYTES // BLOCK, BLOCK)), (ROWS, BYTES))
    return tl.inline_asm_elementwise(
        _FOUR_BYTES, "=&r,=&r,=&r,=&r,r,r,r", [both, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _fp8_tile(  # type: ignore[no-untyped-def]  # noqa: PLR0913
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
):
    """Return [ROWS, COLUMNS] of an expert's matrix, which are of one block, dequantised in float32; 0 beyond it."""
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    place = scale + first_row // _FP8_BLOCK * row_scale_stride + first_column // _FP8_BLOCK * column_scale_stride
    number = weight + row * row_stride + column * column_stride
    is_inside = (row < num_rows) & (column < num_columns)
    return tl.load(number, mask=is_inside, other=0.0).to(tl.float32) * tl.load(place)


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
    INPUTS: tl.constexpr,
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
    # x W^T is transposed: tensor cores take their first operand from registers, where the weights are dequantised. In
    # MXFP4 its sum has even and odd inputs in turn; that of x W, even and odd outputs apart.
    total = tl.zeros((ROWS, OUTPUTS) if IS_TRANSPOSED else (OUTPUTS, ROWS), tl.float32)
    HALF: tl.constexpr = (OUTPUTS if IS_TRANSPOSED else INPUTS) // 2
    if IS_FP4 and IS_TRANSPOSED:
        even = tl.zeros((ROWS, HALF), tl.float32)
        odd = tl.zeros((ROWS, HALF), tl.float32)
    for number in range(tl.cdiv(num_inputs, INPUTS)):
        first = number * INPUTS
        if IS_TRANSPOSED:
            inner = first + tl.arange(0, INPUTS)
            is_left = is_row[:, None] & (inner < num_inputs)[None, :]
            left = tl.load(x_row[:, None] + inner[None, :], mask=is_left, other=0.0)
            if IS_FP4:
                evens, odds = _fp4_tile(
                    weight, scale, first, column * HALF, num_inputs, num_outputs // 2, row_stride, row_scale_stride,
                    INPUTS, HALF,
                )  # fmt: skip
                even = tl.dot(left, evens.to(left.dtype), even)
                odd = tl.dot(left, odds.to(left.dtype), odd)
            else:
                right = _fp8_tile(
                    weight, scale, first, column * OUTPUTS, num_inputs, num_outputs, row_stride, column_stride,
                    row_scale_stride, column_scale_stride, INPUTS, OUTPUTS,
                )  # fmt: skip
                total = tl.dot(left, right.to(left.dtype), total)
        elif IS_FP4:
            evens, odds = _fp4_tile(
                weight, scale, column * OUTPUTS, number * HALF, num_outputs, num_inputs // 2, row_stride,
                row_scale_stride, OUTPUTS, HALF,
            )  # fmt: skip
            inner = number * HALF + tl.arange(0, HALF)
            is_right = (inner < num_inputs // 2)[:, None] & is_row[None, :]
            place = x_row[None, :] + inner[:, None]
            right = tl.load(place, mask=is_right, other=0.0)
            total = tl.dot(evens.to(right.dtype), right, total)
            right = tl.load(place + num_inputs // 2, mask=is_right, other=0.0)
            total = wait_for_sums(tl.dot(odds.to(right.dtype), right, total))
        else:
            inner = first + tl.arange(0, INPUTS)
            is_right = (inner < num_inputs)[:, None] & is_row[None, :]
            right = tl.load(x_row[None, :] + inner[:, None], mask=is_right, other=0.0)
            left = _fp8_tile(
                weight, scale, column * OUTPUTS, first, num_outputs, num_inputs, row_stride, column_stride,
                row_scale_stride, column_scale_stride, OUTPUTS, INPUTS,
            )  # fmt: skip
            total = wait_for_sums(tl.dot(left.to(right.dtype), right, total))
    if IS_FP4 and IS_TRANSPOSED:
        total = tl.interleave(even, odd)
    if not IS_TRANSPOSED:
        total = tl.trans(total)
    if bias is not None:
        own_bias = bias + expert.to(tl.int64) * expert_bias_stride + output * bias_stride
        total += tl.load(own_bias, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if pair_weights is not None:
        total *= tl.load(pair_weights + row, mask=is_row, other=0.0)[:, None]
    place = found + row[:, None] * found_stride + output[None, :]
    tl.store(place, total.to(found.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
