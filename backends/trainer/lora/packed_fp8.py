"""Frozen linears and experts that stay in fp8 in the trainer's memory: dequantised for each product, in forward and in
backward.

What autograd keeps of a linear for backward is its packed bytes.

O outputs and I inputs of a linear; T tokens, K experts of a token, E experts, H hidden width, I inner width, B bytes
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tinker_server.backends.formats import block_fp8, packed


class PackedLinear(nn.Linear):
    """A frozen linear whose `weight` is packed."""

    def __init__(self, like: nn.Linear) -> None:
        """Make a linear without memory."""
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, like.bias is not None)
        num_bytes = block_fp8.packed_bytes(like.out_features, like.in_features)
        self.weight = _make_without_memory(num_bytes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O], without adapters."""
        whole_OI = block_fp8.unpack(self.weight, x.new_empty(self.out_features, self.in_features))
        return functional.linear(x, whole_OI, self.bias)


class PackedExperts(nn.Module):
    """A layer's frozen experts, packed; each expert's gate stands before its up. `LoraExperts` computes with them."""

    is_concatenated, is_transposed, has_bias, has_gate = True, False, False, True
    """As transformers' own experts say of themselves."""

    def __init__(self, sizes: tuple[int, int, int], act_fn: nn.Module) -> None:
        """Make them without memory. `sizes`: experts, hidden width, inner width."""
        super().__init__()
        self.sizes, self.act_fn = sizes, act_fn
        count, hidden, inner = sizes
        into, out = 2 * block_fp8.packed_bytes(inner, hidden), block_fp8.packed_bytes(hidden, inner)
        self.gate_up_proj = _make_without_memory(count, into)
        self.down_proj = _make_without_memory(count, out)

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return [T, H], computed expert by expert: LoRA's products are compared with it at start."""
        _, hidden, inner = self.sizes
        gate_EB, up_EB = packed.gates_and_ups(self.gate_up_proj)
        total_TH = torch.zeros_like(hidden_TH)
        for expert in experts_TK.unique().tolist():
            tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
            gate_IH, up_IH = (unpack(part_EB[expert], inner, hidden, like=hidden_TH) for part_EB in (gate_EB, up_EB))
            inner_NI = self.act_fn(hidden_TH[tokens] @ gate_IH.T) * (hidden_TH[tokens] @ up_IH.T)
            y_NH = inner_NI @ unpack(self.down_proj[expert], hidden, inner, like=hidden_TH).T
            total_TH.index_add_(0, tokens, (y_NH * weights_TK[tokens, places, None]).to(total_TH.dtype))
        return total_TH


def _make_without_memory(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)


def unpack(weight: Tensor, num_outputs: int, num_inputs: int, like: Tensor) -> Tensor:
    """Return a linear's weight [O, I], of these sizes, in the type of `like`. A weight that is not packed is returned
    as it is."""
    if weight.dtype != torch.uint8:
        return weight
    return block_fp8.unpack(weight, like.new_empty(num_outputs, num_inputs))
