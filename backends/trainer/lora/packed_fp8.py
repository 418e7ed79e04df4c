"""Frozen linears that stay in fp8 in the trainer's memory: dequantised for each product, in forward and in backward.

What autograd keeps of a linear for backward is its packed bytes.

O outputs and I inputs of a linear
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tinker_server.backends.formats import block_fp8


class PackedLinear(nn.Linear):
    """A frozen linear whose `weight` is packed."""

    def __init__(self, like: nn.Linear) -> None:
        """Make a linear without memory."""
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, like.bias is not None)
        num_bytes = block_fp8.packed_bytes(like.out_features, like.in_features)
        self.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O], without adapters."""
        whole_OI = block_fp8.unpack(self.weight, x.new_empty(self.out_features, self.in_features))
        return functional.linear(x, whole_OI, self.bias)


def unpack(weight: Tensor, num_outputs: int, num_inputs: int, like: Tensor) -> Tensor:
    """Return a linear's weight [O, I], of these sizes, in the type of `like`. A weight that is not packed is returned
    as it is."""
    if weight.dtype != torch.uint8:
        return weight
    return block_fp8.unpack(weight, like.new_empty(num_outputs, num_inputs))
