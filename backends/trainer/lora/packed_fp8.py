"""Frozen linears that stay in fp8 in the trainer's memory: dequantised for each product, in forward and in backward.

Numbers and scales are one tensor of bytes. So all code that hands weights on, compiled code too, has one tensor of a
linear, and what autograd keeps for backward is these bytes.

O outputs and I inputs of a linear, B bytes
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from backends.formats.block_fp8 import BLOCK, dequantised


class PackedLinear(nn.Linear):
    """A frozen linear whose `weight` is packed."""

    def __init__(self, like: nn.Linear) -> None:
        """Make one without memory."""
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, like.bias is not None)
        num_bytes = packed_bytes(like.out_features, like.in_features)
        self.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O], without adapters."""
        whole_OI = _unpacked(self.weight, self.out_features, self.in_features, x.dtype)
        return functional.linear(x, whole_OI, self.bias)


def packed_bytes(num_outputs: int, num_inputs: int) -> int:
    """Return B of a matrix."""
    return num_outputs * num_inputs + 4 * -(-num_outputs // BLOCK) * -(-num_inputs // BLOCK)


def packed(weight_OI: Tensor, scale_IJ: Tensor) -> Tensor:
    """Return [B]: the scales in float32, which have to be aligned, then the numbers."""
    scales = scale_IJ.float().contiguous().view(-1).view(torch.uint8)
    return torch.cat([scales, weight_OI.contiguous().view(-1).view(torch.uint8)])


def unpacked(weight: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return a linear's weight [O, I] in the type of `inputs` [..., I]; `outputs` is [..., O]. One that is not packed
    is returned as it is."""
    if weight.dtype != torch.uint8:
        return weight
    return _unpacked(weight, outputs.shape[-1], inputs.shape[-1], inputs.dtype)


def _unpacked(weight_B: Tensor, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    num_numbers = num_outputs * num_inputs
    scales, numbers = weight_B.split([len(weight_B) - num_numbers, num_numbers])
    scale = scales.view(torch.float32).view(-(-num_outputs // BLOCK), -1)
    return dequantised(numbers.view(torch.float8_e4m3fn).view(num_outputs, num_inputs), scale, dtype)
