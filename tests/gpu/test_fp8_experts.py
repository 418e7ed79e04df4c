"""The kernel of packed experts on CUDA.

pytest tests/gpu/test_fp8_experts.py
"""

import pytest
import torch
from torch import Tensor

from tests.packed_experts import Format, aligned_products, ends_of, make_experts, sorted_products
from tinker_server.backends.formats import mxfp4
from tinker_server.backends.formats.packed import halves
from tinker_server.backends.kernels.packed_experts import AlignedPairs, SortedPairs, product_by_expert, tile_rows
from tinker_server.backends.trainer.lora.grouped import multiply_by_expert

pytestmark = pytest.mark.gpu
COUNTS = {
    "none": [0, 0, 0],
    "few": [1, 0, 2, 0, 0, 5, 1, 0],
    "uneven": [37, 0, 1000, 3, 70, 0, 129],
    "many": [1024] * 16,
    "256 experts": [number % 5 for number in range(256)],
}
SHAPES: list[tuple[Format, tuple[int, int]]] = [
    *(("fp8", shape) for shape in [(768, 2048), (2048, 768), (160, 192), (64, 300), (512, 2048)]),
    *(("mxfp4", shape) for shape in [(2880, 2880), (768, 2048), (160, 192), (96, 288)]),
]
FORMATS: list[Format] = ["fp8", "mxfp4"]


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("of", "shape"), SHAPES)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_sorted_pairs_are_multiplied_by_their_experts(counts, of, shape, is_transposed):
    counted = COUNTS[counts]
    found, exact = sorted_products(counted, shape, torch.bfloat16, "cuda", is_transposed=is_transposed, of=of)
    if len(found):
        assert_rounded(found, exact)


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_pairs_by_their_numbers_are_multiplied_where_they_are(of, num_choices, rows, is_weighted):
    assert_rounded(*aligned_products(num_choices, rows, torch.bfloat16, "cuda", is_weighted=is_weighted, of=of))


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("counts", ["few", "many"])
def test_vllms_tiles_are_those_of_the_kernel(of, counts):
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    shape, own = (768, 2048), COUNTS[counts]
    experts, made = make_experts(len(own), shape, torch.bfloat16, "cuda", of=of), torch.Generator().manual_seed(0)
    experts_S = torch.arange(len(own)).repeat_interleave(torch.tensor(own))
    order = torch.randperm(len(experts_S), generator=made)
    ids_T1 = experts_S[order].int().cuda()[:, None]
    x = torch.randn(len(order), shape[1], generator=made).bfloat16().cuda()
    rows = tile_rows(len(order), len(own))
    numbers, tile_experts, count = moe_align_block_size(ids_T1, rows, len(own))
    pairs = AlignedPairs(numbers, tile_experts, count, rows, 1, None)
    sorted_x = x[experts_S[order].argsort(stable=True).cuda()]
    found, wanted = (torch.empty(len(order), shape[0], dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_by_expert(x, halves(experts.weight_EB, *shape), pairs, found)
    product_by_expert(sorted_x, halves(experts.weight_EB, *shape), SortedPairs(ends_of(own, "cuda")), wanted)
    # Each row is computed alike, by trainer and engine, in whatever tile.
    assert found[experts_S[order].argsort(stable=True).cuda()].equal(wanted)


@pytest.mark.parametrize("of", FORMATS)
@pytest.mark.parametrize("counts", ["few", "uneven", "many"])
def test_the_gradient_of_x_is_that_of_the_dequantised_experts(of, counts):
    own, shape = COUNTS[counts], (768, 2048)
    experts, ends = make_experts(len(own), shape, torch.bfloat16, "cuda", of=of), ends_of(own, "cuda")
    x, weights = torch.randn(2, sum(own), shape[1], device="cuda").bfloat16()
    found = []
    for matrices in (experts.weight_EB, experts.whole_ENK):
        leaf = x.clone().requires_grad_()
        y = multiply_by_expert(leaf, matrices, ends, shape[0])
        (y * weights[:, : shape[0]]).sum().backward()
        found.append((y.detach(), leaf.grad))
    (got_y, got), (wanted_y, wanted) = found
    torch.testing.assert_close(got_y, wanted_y, rtol=2**-6, atol=1e-2 * float(wanted_y.abs().max()))
    torch.testing.assert_close(got, wanted, rtol=2**-6, atol=1e-2 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_four_bits_are_dequantised_alike_by_the_kernel_and_by_torch(dtype):
    blocks = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 16, 1, 16)
    for power in (0, 1, 2, 100, 127, 200, 252):
        scales = torch.full((1, 16, 1), power, dtype=torch.uint8, device="cuda")
        found = torch.empty(32, 16, dtype=dtype, device="cuda")
        rows = halves(mxfp4.pack(blocks, scales), 16, 32)
        ends = torch.tensor([32], dtype=torch.int32, device="cuda")
        identity = torch.eye(32, dtype=dtype, device="cuda")
        product_by_expert(identity, rows, SortedPairs(ends), found)
        wanted = mxfp4.dequantise(blocks[0].flatten(-2), scales[0], dtype).T
        assert found.equal(wanted) or power < 3  # products with a number below 2^-126 may be zero
        torch.testing.assert_close(found, wanted, rtol=0, atol=2.0**-125)
