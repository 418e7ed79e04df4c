"""Products with experts in fp8. tests/gpu has the kernel on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from tests.packed_experts import ends_of, exact_products, make_experts
from tinker_server.backends.formats.packed import multiply_by_expert


def test_the_kernel_multiplies_pairs_by_their_experts_in_tritons_interpreter() -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.packed_experts"], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True
    )


@pytest.mark.parametrize("is_transposed", [False, True])
def test_without_a_kernel_experts_in_use_are_dequantised(is_transposed: bool) -> None:
    counts, shape = [37, 0, 21, 3, 70], (160, 192)
    experts, ends = make_experts(len(counts), shape, torch.bfloat16), ends_of(counts)
    inputs, outputs = shape if is_transposed else shape[::-1]
    x, found = torch.randn(sum(counts), inputs).bfloat16(), torch.full((sum(counts), outputs), torch.nan).bfloat16()
    multiply_by_expert(x, experts.weight_EB, ends, found, is_transposed=is_transposed)
    exact = exact_products(x, experts, ends, is_transposed=is_transposed)
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=1e-4 * float(exact.abs().max()))
