"""gpt-oss's experts, laid out as other mixtures' when they are loaded.

T tokens, K experts of a token, E experts, H hidden width, I inner width
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinker_server.backends.families.gpt_oss import EXPERTS, apply_gate, has_own_experts, uninterleave
from tinker_server.backends.patches import require_as_written


class BiasedExperts(nn.Module):
    """A layer's experts: gate above up, outputs before inputs, with biases."""

    is_concatenated, is_transposed, has_bias, has_gate = True, False, True, True

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        """Make them without memory."""
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)

        self.gate_up_proj = parameter(num_experts, 2 * inner, hidden)
        self.gate_up_bias = parameter(num_experts, 2 * inner)
        self.down_proj = parameter(num_experts, hidden, inner)
        self.down_bias = parameter(num_experts, hidden)

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return [T, H], computed expert by expert: LoRA's products are compared with it at start."""
        total_TH = torch.zeros_like(hidden_TH)
        for expert in experts_TK.unique().tolist():
            tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
            both = hidden_TH[tokens] @ self.gate_up_proj[expert].T + self.gate_up_bias[expert]
            y = apply_gate(*both.chunk(2, -1)) @ self.down_proj[expert].T + self.down_bias[expert]
            total_TH.index_add_(0, tokens, (y * weights_TK[tokens, places, None]).to(total_TH.dtype))
        return total_TH


def lay_out_experts(model: PreTrainedModel, own: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Replace gpt-oss's experts in a model without memory, and their tensors in `own`, this rank's shards by name.

    Shards are of whole experts: only the dimensions behind are laid out anew. Dequantised, they were in bfloat16.
    """
    for name, base in [named_module for named_module in model.named_modules() if has_own_experts(named_module[1])]:
        require_as_written([EXPERTS])
        num_experts, inner, hidden = base.down_proj.shape
        model.set_submodule(name, BiasedExperts(num_experts, hidden, inner))
        own[f"{name}.gate_up_bias"] = uninterleave(own.pop(f"{name}.gate_up_proj_bias"))
        own[f"{name}.down_bias"] = own.pop(f"{name}.down_proj_bias")
        for matrix in ("gate_up_proj", "down_proj"):
            transposed = own.pop(f"{name}.{matrix}")
            transposed = uninterleave(transposed) if matrix == "gate_up_proj" else transposed
            own[f"{name}.{matrix}"] = transposed.mT.to(dtype).contiguous()
