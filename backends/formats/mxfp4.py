"""Published MXFP4 (OCP Microscaling Formats 1.0): numbers of four bits, and a power of two for every 32 of a row.

A stack of experts' matrices has two tensors in the files, of blocks and of scales. Trainer, engine and the holder of a
base dequantise with the function here. Where the base stays in MXFP4, both are one tensor of bytes, packed row by row:
so each part of a matrix's rows is packed too. Knows neither transformers nor vLLM.

E experts, N outputs, K inputs of a matrix, J blocks of a row, X bytes of a block, R bytes of a packed row
"""

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors of a stack of matrices."""
_METHOD = "mxfp4"
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of four bits, of which the highest is the sign (section 5.3.3)."""
_BIAS = 127
"""Subtracted from a block's exponent (section 5.4.1)."""
_ALIGNED = 16
"""Bytes at a multiple of which a row begins, by which kernels read it fastest."""


def is_in_mxfp4(quantisation: Mapping[str, object] | None) -> bool:
    """Return whether files are in MXFP4, as their config says."""
    return quantisation is not None and quantisation.get("quant_method") == _METHOD


def dequantise(numbers_NX: Tensor, scales_NJ: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., N, K] of the bytes of all numbers of a row, [..., N, K / 2]. Each byte has two, the first in its
    lower half. In bfloat16 nothing is rounded."""
    table = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], dtype=torch.float32, device=numbers_NX.device)
    halves_NK = torch.stack([numbers_NX & 0x0F, numbers_NX >> 4], -1).flatten(-2)
    exponents_NJ = scales_NJ.int() - _BIAS
    found_NJK = torch.ldexp(table[halves_NK.int()].unflatten(-1, (-1, BLOCK)), exponents_NJ[..., None])
    return found_NJK.flatten(-2).to(dtype)


def row_bytes(num_inputs: int) -> int:
    """Return R of a row. The numbers come first, then the scales, then zeros."""
    assert num_inputs % BLOCK == 0
    return -(-(num_inputs // 2 + num_inputs // BLOCK) // _ALIGNED) * _ALIGNED


def pack(blocks_ENJX: Tensor, scales_ENJ: Tensor) -> Tensor:
    """Return [E, N, R] of the two tensors of the files."""
    numbers_ENX, num_blocks = blocks_ENJX.flatten(-2), scales_ENJ.shape[-1]
    num_zeros = row_bytes(BLOCK * num_blocks) - numbers_ENX.shape[-1] - num_blocks
    return torch.cat([numbers_ENX, scales_ENJ, scales_ENJ.new_zeros(*scales_ENJ.shape[:-1], num_zeros)], -1)


def halves(weight_NR: Tensor, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of numbers [..., N, K / 2] and the scales [..., N, J] of packed rows. They share its memory."""
    begin, end = num_inputs // 2, num_inputs // 2 + num_inputs // BLOCK
    return weight_NR[..., :begin], weight_NR[..., begin:end]


def unpack(weight_NR: Tensor, found_NK: Tensor) -> Tensor:
    """Write the dequantised matrix to `found_NK`, and return it."""
    return found_NK.copy_(dequantise(*halves(weight_NR, found_NK.shape[-1]), found_NK.dtype))
