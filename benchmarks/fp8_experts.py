"""A mixture's products on one GPU: experts in bfloat16, and packed, in fp8 by blocks or as gpt-oss's in MXFP4.

    python benchmarks/fp8_experts.py [--shape 30b-a3b|35b-a3b|gpt-oss-120b]

Each line has a layer's gate, for tokens that are spread evenly: x W^T, and the gradient of x. `engine`
is the same product of pairs by their numbers, beside vLLM's kernel in bfloat16 with the sizes that it chooses.
"""

import argparse
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tinker_server.backends.formats import mxfp4
from tinker_server.backends.formats.block_fp8 import packed_bytes
from tinker_server.backends.formats.packed import halves
from tinker_server.backends.kernels.packed_experts import AlignedPairs, SortedPairs, product_by_expert, tile_rows

IN_MXFP4 = "gpt-oss-120b"
SIZES = {"30b-a3b": (128, 8, 2048, 768), "35b-a3b": (256, 8, 2048, 512), IN_MXFP4: (128, 4, 2880, 2880)}
"""Experts, experts of a token, hidden and inner width."""
TOKENS = (16384, 2048, 256, 64, 8)


def microseconds(work: Callable[[], object]) -> float:
    """Return the mean of a captured graph of ten, after a warm-up."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    end.synchronize()
    taken_ms: float = begin.elapsed_time(end)
    return taken_ms * 1e3 / 50


def compile_first(description: str | None, compile_share: Callable[[int, int], None]) -> Path | None:
    """Read the options of a sweep, and have processes compile a share of the candidates each. Return the file for the
    figures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--figures", type=Path, help="file to which all times are written as JSON")
    given = parser.parse_args()
    context = get_context("spawn")
    shares = [context.Process(target=compile_share, args=(at, given.processes)) for at in range(given.processes)]
    for share in shares:
        share.start()
    for share in shares:
        share.join()
    path: Path | None = given.figures
    return path


def packed_experts(count: int, shape: tuple[int, int], *, in_mxfp4: bool) -> Tensor:
    """Return a packed stack of random numbers."""
    if in_mxfp4:
        sizes = count, shape[0], shape[1] // mxfp4.BLOCK
        blocks = torch.randint(256, (*sizes, mxfp4.BLOCK // 2), dtype=torch.uint8, device="cuda")
        return mxfp4.pack(blocks, torch.full(sizes, 120, dtype=torch.uint8, device="cuda"))
    weight_EB = torch.zeros(count, packed_bytes(*shape), dtype=torch.uint8, device="cuda")
    numbers, scale = halves(weight_EB, *shape)
    numbers.copy_((torch.randn(count, *shape, device="cuda") * 100).clamp(-448, 448))
    scale.fill_(shape[1] ** -0.5 / 100)
    return weight_EB


def vllm_product(x: Tensor, weight: Tensor, ids: Tensor, found: Tensor) -> Callable[[], object]:
    """Return vLLM's product in bfloat16."""
    import triton.language as tl
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        _prepare_expert_assignment,
        invoke_fused_moe_triton_kernel,
        try_get_optimal_moe_config,
    )

    count, outputs, inputs = weight.shape
    tokens, choices = ids.shape
    config = try_get_optimal_moe_config(weight.shape, (count, inputs, outputs), choices, None, tokens)
    tiles = _prepare_expert_assignment(ids, config, tokens, choices, count, None)
    nothing = {name: False for name in ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")}
    shaped = found.view(tokens, choices, outputs)
    return lambda: invoke_fused_moe_triton_kernel(
        x, weight, shaped, None, None, None, *tiles, False, choices, config, compute_type=tl.bfloat16,
        per_channel_quant=False, **nothing,
    )  # fmt: skip


def line(sizes: tuple[int, int, int, int], tokens: int, weight_EB: Tensor, whole: Tensor) -> str:
    """Return what products of so many tokens take."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    experts, choices, hidden, inner = sizes
    both, pairs = halves(weight_EB, inner, hidden), tokens * choices
    ids = torch.stack([torch.randperm(experts, device="cuda")[:choices] for _ in range(tokens)]).int()
    ends = ids.flatten().bincount(minlength=experts).cumsum(0).int()
    x, y = (torch.randn(pairs, width, device="cuda", dtype=torch.bfloat16) for width in (hidden, inner))
    found_y, found_x, rows = torch.empty_like(y), torch.empty_like(x), tile_rows(pairs, experts)
    numbers, tile_experts, count = moe_align_block_size(ids, rows, experts)
    aligned = AlignedPairs(numbers, tile_experts, count, rows, choices, None)
    work = {
        "x W^T, bfloat16": lambda: torch.nn.functional.grouped_mm(x, whole.mT, offs=ends),
        "packed": lambda: product_by_expert(x, both, SortedPairs(ends), found_y),
        "x W, bfloat16": lambda: torch.nn.functional.grouped_mm(y, whole, offs=ends),
        "packed ": lambda: product_by_expert(y, both, SortedPairs(ends), found_x, is_transposed=True),
        "engine, bfloat16": vllm_product(x[:tokens], whole, ids, found_y),
        "packed  ": lambda: product_by_expert(x[:tokens], both, aligned, found_y),
    }
    taken = {name: microseconds(each) for name, each in work.items()}
    tflops = 2 * pairs * hidden * inner / taken["packed"] / 1e6
    times = ", ".join(f"{name.strip()} {time_us:.0f}" for name, time_us in taken.items())
    return f"{tokens} tokens in tiles of {rows}: {times} ({tflops:.0f} TFLOP/s packed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SIZES, default="30b-a3b")
    shape = parser.parse_args().shape
    experts, choices, hidden, inner = sizes = SIZES[shape]
    print(f"{torch.cuda.get_device_name()}: {experts} experts, {choices} a token, {hidden} to {inner}; microseconds")
    weight_EB = packed_experts(experts, (inner, hidden), in_mxfp4=shape == IN_MXFP4)
    whole = torch.randn(experts, inner, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    for tokens in TOKENS:
        print(line(sizes, tokens, weight_EB, whole))


if __name__ == "__main__":
    main()
