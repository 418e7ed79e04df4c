"""A mixture's experts with adapters on the CPU, where vLLM 0.32 has none.

With LoRA enabled it takes its Triton kernel for experts whatever the device, and no CPU has Triton: not even the base
model would run. The weights, their names and their slots are vLLM's own here too; only the sums are ours.

N rows, K experts of a row, E experts, S adapter slots, R LoRA rank, H hidden width, I inner width
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from backends.sampler.vllm_patches.lora import rows_by_slot


class ExpertsOnCPU(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]
    """vLLM makes one for every layer."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The weights stay as they were loaded."""

    def apply(  # noqa: PLR0913
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *_: Any,
        **__: Any,
    ) -> None:
        """Fills `output` [N, H]. `w1` is [E, 2 I, H], gate above up, and `w2` [E, H, I]."""
        if activation != MoEActivation.SILU or self.w1_bias is not None or self.w2_bias is not None:
            raise NotImplementedError(f"experts with {activation.value} or biases have no adapters on the CPU")
        total_NH = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            x = hidden_states[rows]
            gate, up = self._with_adapters(x @ w1[expert].T, x, "w13", expert, rows).chunk(2, -1)
            inner = F.silu(gate) * up
            y = self._with_adapters(inner @ w2[expert].T, inner, "w2", expert, rows)
            total_NH.index_add_(0, rows, (y * topk_weights[rows, places, None]).float())
        output.copy_(total_NH)

    def _with_adapters(self, y: Tensor, x: Tensor, name: str, expert: int, rows: Tensor) -> Tensor:
        """`y` with what the rows' adapters of this expert make of `x`, side by side as their matrices are."""
        context: Any = self._lora_context
        slots_N = context.punica_wrapper.token_lora_indices[rows]
        halves = [getattr(context, f"{name}_lora_{half}_stacked") for half in "ab"]
        for slot, mine in rows_by_slot(slots_N, len(x)):
            parts = [
                x[mine] @ a_SERI[slot, expert].T @ b_SEOR[slot, expert].T
                for a_SERI, b_SEOR in zip(*halves, strict=True)
            ]
            y.index_add_(0, mine, torch.cat(parts, -1).to(y.dtype))
        return y


def replace_experts() -> None:
    """Once per process that computes on the CPU, before a model is made."""
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (
        UnquantizedMoeBackend.CPU,
        ExpertsOnCPU,
    )
