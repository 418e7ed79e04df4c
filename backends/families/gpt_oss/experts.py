"""gpt-oss's experts: laid out as other mixtures' when they are loaded, or packed in MXFP4 as they are in the files.

T tokens, K experts of a token, E experts, H hidden width, I inner width
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinker_server.backends.families.gpt_oss import EXPERTS, apply_gate, has_own_experts, uninterleave
from tinker_server.backends.formats import packed
from tinker_server.backends.patches import require_as_written


class BiasedExperts(nn.Module):
    """A layer's experts: outputs before inputs, with biases. Gate stands above up; or they alternate, if the matrices
    are packed."""

    is_concatenated, is_transposed, has_bias, has_gate = True, False, True, True

    def __init__(self, num_experts: int, hidden: int, inner: int, *, is_packed: bool = False) -> None:
        """Make them without memory."""
        super().__init__()
        self.sizes, self.is_packed = (num_experts, hidden, inner), is_packed

        def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=False)

        def matrices(*shape: int) -> nn.Parameter:
            return parameter(*packed.byte_shape(shape), dtype=torch.uint8) if is_packed else parameter(*shape)

        self.gate_up_proj = matrices(num_experts, 2 * inner, hidden)
        self.gate_up_bias = parameter(num_experts, 2 * inner)
        self.down_proj = matrices(num_experts, hidden, inner)
        self.down_bias = parameter(num_experts, hidden)

    def gates_and_ups(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Return the halves of the matrices, or of the biases. They share their memory."""
        if self.is_packed:
            return packed.alternating(both)
        gates, ups = both.chunk(2, 1)
        return gates, ups

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return [T, H], computed expert by expert: LoRA's products are compared with it at start."""
        _, hidden, inner = self.sizes
        total_TH = torch.zeros_like(hidden_TH)
        for expert in experts_TK.unique().tolist():
            tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
            parts = [
                hidden_TH[tokens] @ self._matrix(stack[expert], hidden, hidden_TH).T + bias[expert]
                for stack, bias in zip(*map(self.gates_and_ups, (self.gate_up_proj, self.gate_up_bias)), strict=True)
            ]
            y = apply_gate(*parts) @ self._matrix(self.down_proj[expert], inner, hidden_TH).T + self.down_bias[expert]
            total_TH.index_add_(0, tokens, (y * weights_TK[tokens, places, None]).to(total_TH.dtype))
        return total_TH

    def _matrix(self, weight: Tensor, num_inputs: int, like: Tensor) -> Tensor:
        """Return an expert's matrix, dequantised if it is packed."""
        return packed.unpack(weight, like.new_empty(len(weight), num_inputs)) if self.is_packed else weight


def lay_out_experts(
    model: PreTrainedModel, own: dict[str, Tensor], dtype: torch.dtype, *, are_packed: bool = False
) -> None:
    """Replace gpt-oss's experts in a model without memory, and their tensors in `own`, this rank's shards by name; but
    matrices that are packed.

    Shards are of whole experts: only the dimensions behind are laid out anew. Dequantised, they were in bfloat16.
    """
    for name, base in [named_module for named_module in model.named_modules() if has_own_experts(named_module[1])]:
        require_as_written([EXPERTS])
        num_experts, inner, hidden = base.down_proj.shape
        model.set_submodule(name, BiasedExperts(num_experts, hidden, inner, is_packed=are_packed))
        bias = own.pop(f"{name}.gate_up_proj_bias")
        own[f"{name}.gate_up_bias"] = bias if are_packed else uninterleave(bias)
        own[f"{name}.down_bias"] = own.pop(f"{name}.down_proj_bias")
        if are_packed:
            continue
        for matrix in ("gate_up_proj", "down_proj"):
            transposed = own.pop(f"{name}.{matrix}")
            transposed = uninterleave(transposed) if matrix == "gate_up_proj" else transposed
            own[f"{name}.{matrix}"] = transposed.mT.to(dtype).contiguous()
