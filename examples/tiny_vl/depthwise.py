"""Depthwise convolution with bias and ReLU6 in one pass over memory, for maps that are stored channels last.

    python depthwise.py        # on a GPU: compares it with cuDNN, and times both

Most of the teacher's time goes there. Legend: B images, C channels, Y X cells.
"""

import sys
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

CELLS, CHANNELS = 16, 64  # of one program's output: its sums stay in registers
WARPS = 4
SHAPES = ((96, 3, 2, 112), (144, 3, 1, 56), (144, 5, 2, 56), (720, 5, 1, 14), (1248, 3, 1, 7))  # some of the teacher's
TOLERANCE = 0.02
REPEATS = 5
Convolution = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def kernel(  # type: ignore[no-untyped-def]
    x,
    taps,
    bias,
    out,
    rows,
    columns,
    out_rows,
    out_columns,
    PADDING: tl.constexpr,
    STRIDE: tl.constexpr,
    KERNEL: tl.constexpr,
    C: tl.constexpr,
    CELLS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    strips = tl.cdiv(out_columns, CELLS)
    line = tl.program_id(0) // strips
    image, row = (line // out_rows).to(tl.int64), line % out_rows
    column = (tl.program_id(0) % strips) * CELLS + tl.arange(0, CELLS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < C
    total = tl.zeros((CELLS, CHANNELS), tl.float32)
    for i in tl.static_range(KERNEL):
        y = row * STRIDE + i - PADDING
        for j in tl.static_range(KERNEL):
            x_column = column * STRIDE + j - PADDING
            inside = (y >= 0) & (y < rows) & (x_column >= 0) & (x_column < columns)
            cell = (image * rows + y) * columns + x_column
            mask = inside[:, None] & is_channel[None, :]
            value = tl.load(x + cell[:, None] * C + channel[None, :], mask, 0.0)
            tap = tl.load(taps + (i * KERNEL + j) * C + channel, is_channel, 0.0)
            total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    total += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)[None, :]
    total = tl.minimum(tl.maximum(total, 0.0), 6.0)
    cell = (image * out_rows + row) * out_columns + column
    mask = (column < out_columns)[:, None] & is_channel[None, :]
    tl.store(out + cell[:, None] * C + channel[None, :], total.to(out.dtype.element_ty), mask)


def depthwise(x_BCYX: torch.Tensor, taps_KKC: torch.Tensor, bias_C: torch.Tensor, stride: int) -> torch.Tensor:
    """Return what `reference` returns."""
    count, channels, rows, columns = x_BCYX.shape
    size = len(taps_KKC)
    shape = (count, channels, rows // stride, columns // stride)
    out = torch.empty(shape, dtype=x_BCYX.dtype, device=x_BCYX.device, memory_format=torch.channels_last)
    programs = (count * shape[2] * triton.cdiv(shape[3], CELLS), triton.cdiv(channels, CHANNELS))
    padding = (size - stride) // 2  # before; TensorFlow's SAME puts the rest behind
    kernel[programs](
        x_BCYX.contiguous(memory_format=torch.channels_last),
        taps_KKC,
        bias_C,
        out,
        rows,
        columns,
        shape[2],
        shape[3],
        padding,
        stride,
        size,
        channels,
        CELLS,
        CHANNELS,
        num_warps=WARPS,
    )
    return out


def reference(x_BCYX: torch.Tensor, taps_KKC: torch.Tensor, bias_C: torch.Tensor, stride: int) -> torch.Tensor:
    size = len(taps_KKC)
    before, behind = (size - stride) // 2, (size - stride + 1) // 2
    weight = taps_KKC.permute(2, 0, 1).unsqueeze(1).contiguous()
    padded = F.pad(x_BCYX, (before, behind, before, behind))
    return F.conv2d(padded, weight, bias_C, stride, groups=len(weight)).clamp(0, 6)


def milliseconds(run: Convolution, x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor, stride: int) -> float:
    run(x, taps, bias, stride)
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(REPEATS):
        run(x, taps, bias, stride)
    torch.cuda.synchronize()
    return (time.monotonic() - started) / REPEATS * 1e3


def main(device: torch.device, count: int) -> bool:
    """Whether both agree at some of the teacher's shapes, and the own one is faster on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    agree, totals_ms = True, [0.0, 0.0]
    for channels, size, stride, side in SHAPES:
        x = torch.randn(count, channels, side, side + 2, device=device, dtype=dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        taps = torch.randn(size, size, channels, device=device, dtype=dtype) / size
        bias = torch.randn(channels, device=device, dtype=dtype)
        own, true = depthwise(x, taps, bias, stride), reference(x.float(), taps.float(), bias.float(), stride)
        gap = float((own.float() - true).norm() / true.norm())
        agree &= gap < TOLERANCE
        print(f"{channels} channels, kernel {size}, stride {stride}: relative difference {gap:.1e}", flush=True)
        if device.type == "cuda":
            times_ms = [milliseconds(run, x, taps, bias, stride) for run in (depthwise, reference)]
            totals_ms = [total + time for total, time in zip(totals_ms, times_ms, strict=True)]
            print(f"    {times_ms[0]:.2f} ms, cuDNN {times_ms[1]:.2f} ms", flush=True)
    return agree and totals_ms[0] <= totals_ms[1]


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()  # else with TRITON_INTERPRET=1
    sys.exit(not main(torch.device("cuda" if on_gpu else "cpu"), 256 if on_gpu else 1))
