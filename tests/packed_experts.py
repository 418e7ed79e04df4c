"""Products of pairs with packed experts, by our kernel and by definition.

As a program, in Triton's interpreter on the CPU: TRITON_INTERPRET=1 python -m tests.packed_experts
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tinker_server.backends.formats import block_fp8, mxfp4
from tinker_server.backends.formats.packed import gates_and_ups, halves
from tinker_server.backends.kernels import fp8
from tinker_server.backends.kernels.packed_experts import AlignedPairs, SortedPairs, product_by_expert

Format = Literal["fp8", "mxfp4"]
Difference = tuple[Tensor, Tensor]
"""What the kernel gives, and what is exact."""


@dataclass(frozen=True)
class Experts:
    weight_EB: Tensor
    """Packed."""
    whole_ENK: Tensor
    """Dequantised."""


def make_experts(
    count: int, shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu", *, of: Format = "fp8"
) -> Experts:
    """Experts whose packed matrices have a gap between them, as those of gates have that stand beside ups."""
    made = torch.Generator().manual_seed(0)
    if of == "mxfp4":
        return _make_in_mxfp4(count, shape, dtype, device)
    blocks = [-(-size // 128) for size in shape]
    numbers = (torch.randn(count, *shape, generator=made) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(count, *blocks, generator=made) / 100
    bytes_EB = torch.stack([block_fp8.packed(*both) for both in zip(numbers, scale, strict=True)])
    gap = torch.full_like(bytes_EB, 0x7F)  # not a number
    stack_EB = torch.cat([bytes_EB, gap], 1).to(device)
    whole_ENK = block_fp8.dequantised(numbers, scale, dtype).to(device)
    return Experts(stack_EB[:, : bytes_EB.shape[1]], whole_ENK)


def _make_in_mxfp4(count: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> Experts:
    made, (outputs, inputs) = torch.Generator().manual_seed(0), shape
    size = (count, 2 * outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(121, 125, size, dtype=torch.uint8, generator=made)
    _, ups = gates_and_ups(mxfp4.pack(blocks, scales).to(device))
    whole_ENK = mxfp4.dequantise(blocks.flatten(-2), scales, dtype)[:, 1::2].contiguous().to(device)
    return Experts(ups, whole_ENK)


def ends_of(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(counts).cumsum(0).int().to(device)


def exact_products(x_SN: Tensor, experts: Experts, ends_E: Tensor, *, is_transposed: bool = False) -> Tensor:
    """In double precision, expert by expert."""
    matrices = experts.whole_ENK.double()
    parts = pairwise([0, *ends_E.tolist()])
    return torch.cat(
        [
            x_SN[begin:end].double() @ (matrix if is_transposed else matrix.T)
            for matrix, (begin, end) in zip(matrices, parts, strict=True)
        ]
    )


def aligned(experts_S: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted and filled up to whole tiles, as vLLM's `moe_align_block_size` gives them: their numbers, the expert
    of each tile, and how many numbers are set."""
    numbers, tiles = [], []
    for expert in range(count):
        own = (experts_S == expert).nonzero().flatten().tolist()
        own += [len(experts_S)] * (-len(own) % rows)
        numbers += own
        tiles += [expert] * (len(own) // rows)
    size = len(experts_S) + count * (rows - 1)
    padded = numbers + [len(experts_S)] * (-(-size // rows) * rows - len(numbers))
    experts = tiles + [0] * (len(padded) // rows - len(tiles))
    return tuple(torch.tensor(part, dtype=torch.int32) for part in (padded, experts, [len(numbers)]))  # type: ignore[return-value]


def sorted_products(
    counts: list[int],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    is_transposed: bool = False,
    of: Format = "fp8",
) -> Difference:
    """Of pairs whose rows are in the experts' order, so many of each."""
    experts, ends_E = make_experts(len(counts), shape, dtype, device, of=of), ends_of(counts, device)
    inputs, outputs = shape if is_transposed else shape[::-1]
    x_SN = torch.randn(sum(counts), inputs, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = torch.full((sum(counts), outputs), torch.nan, dtype=dtype, device=device)
    product_by_expert(x_SN, halves(experts.weight_EB, *shape), SortedPairs(ends_E), found, is_transposed=is_transposed)
    return found, exact_products(x_SN, experts, ends_E, is_transposed=is_transposed)


def dense_products(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Difference:
    """Of rows with a matrix in fp8, beside other results."""
    made, whole = torch.Generator().manual_seed(0), make_experts(1, shape, dtype, device)
    x_MK = torch.randn(rows, shape[1], generator=made).to(device, dtype)
    found = torch.full((rows, shape[0] + 8), torch.nan, dtype=dtype, device=device)[:, 8:]
    numbers_ENK, scale_EIJ = halves(whole.weight_EB, *shape)
    fp8.product(x_MK, numbers_ENK[0], scale_EIJ[0], 128, found)
    return found, x_MK.double() @ whole.whole_ENK[0].double().T


def aligned_products(
    num_choices: int, rows: int, dtype: torch.dtype, device: str = "cpu", *, is_weighted: bool, of: Format = "fp8"
) -> Difference:
    """Of pairs by their numbers, beside other results, as those of gates stand beside those of ups; in MXFP4 with the
    experts' biases."""
    shape, count, made = (160, 192), 5, torch.Generator().manual_seed(1)
    experts = make_experts(count, shape, dtype, device, of=of)
    experts_S = torch.cat([torch.randperm(count, generator=made)[:3] for _ in range(29)])
    x_SN = torch.randn(len(experts_S) // num_choices, shape[1], generator=made).to(device, dtype)
    weights_S = torch.rand(len(experts_S), generator=made).to(device) if is_weighted else None
    wide = torch.full((len(experts_S), 2 * shape[0]), torch.nan, dtype=dtype, device=device)
    tiles = [tensor.to(device) for tensor in aligned(experts_S, count, rows)]
    pairs = AlignedPairs(tiles[0], tiles[1], tiles[2], rows, num_choices, weights_S)
    bias_EN = torch.randn(count, 2 * shape[0], generator=made).to(device, dtype)[:, 1::2] if of == "mxfp4" else None
    product_by_expert(x_SN, halves(experts.weight_EB, *shape), pairs, wide[:, shape[0] :], bias_EN=bias_EN)
    assert wide[:, : shape[0]].isnan().all()
    order = experts_S.argsort(stable=True)
    ends_E = ends_of(experts_S.bincount(minlength=count).tolist())
    exact = exact_products(x_SN[(order // num_choices).to(device)], experts, ends_E)[order.argsort().to(device)]
    exact = exact if bias_EN is None else exact + bias_EN.double()[experts_S.to(device)]
    return wide[:, shape[0] :], exact if weights_S is None else exact * weights_S[:, None]


def _permute(first: Any, second: Any, selector: Any) -> Any:
    eight = [word >> np.uint32(shift) & np.uint32(0xFF) for word in (first, second) for shift in (0, 8, 16, 24)]
    chosen = [eight[int(selector) >> 4 * place & 7] << np.uint32(8 * place) for place in range(4)]
    return chosen[0] | chosen[1] | chosen[2] | chosen[3]


def _multiply_and_add_halves(*given: Any) -> Any:
    words = np.broadcast_arrays(*given)
    left, right, added = (torch.from_numpy(each.view(np.int32).copy()).view(torch.bfloat16).double() for each in words)
    return (left * right + added).bfloat16().view(torch.int32).numpy().view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda source: source,
    "and.b32": operator.and_,
    "mul.lo.u32": operator.mul,
    "prmt.b32": _permute,
    "fma.rn.bf16x2": _multiply_and_add_halves,
}


def _run_ptx(_: object, text: str, constraints: str, values: list[Any], types: list[Any], *more: Any) -> Any:
    """Run instructions on numbers of 32 bits, as Triton's interpreter calls it, which has none of them itself."""
    from triton.runtime.interpreter import TensorHandle

    pack, shape, first = more[-1], values[0].data.shape, constraints.count("=")
    words = [word for value in values for word in value.data.reshape(-1, pack).view(np.uint32).T]
    registers: dict[str, Any] = {f"${first + number}": word for number, word in enumerate(words)}
    for name, target, sources in re.findall(r"([a-z][\w.]+) (\S+), ([^;]+);", re.sub(r"\.reg[^;]+;", "", text)):
        given = [registers.get(source, source) for source in sources.split(", ")]
        given = [np.uint32(int(number, 0)) if isinstance(number, str) else number for number in given]
        registers[target] = _INSTRUCTIONS[name](*given)
    each = first // len(types)
    found = [np.stack([registers[f"${each * at + word}"] for word in range(each)], 1) for at in range(len(types))]
    handles = [
        TensorHandle(output.view(np.float32 if of.scalar.is_fp32() else np.uint16).reshape(shape), of.scalar)
        for output, of in zip(found, types, strict=True)
    ]
    return SimpleNamespace(get_result=handles.__getitem__)


def _check_in_interpreter() -> None:  # which has no products in bfloat16
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_inline_asm = _run_ptx
    for rows, wide in ((1, 300), (3, 2304), (130, 1088)):  # the second's inputs are split, the last's unevenly
        _require_close(*dense_products(rows, (160, wide), torch.float32))
    shapes: dict[Format, list[tuple[int, int]]] = {"fp8": [(160, 192), (64, 300)], "mxfp4": [(160, 192), (64, 288)]}
    for of in shapes:
        for shape, is_transposed in product(shapes[of], [False, True]):
            _require_close(
                *sorted_products([0, 37, 0, 21, 3], shape, torch.float32, is_transposed=is_transposed, of=of)
            )
        for num_choices, is_weighted in ((1, True), (3, False)):
            _require_close(*aligned_products(num_choices, 16, torch.float32, is_weighted=is_weighted, of=of))


def _require_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


if __name__ == "__main__":
    _check_in_interpreter()
