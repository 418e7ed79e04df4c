"""LoRA kernels, experts and linear attention of vLLM 0.32 on the CPU, corrected.

1. A row without an adapter carries slot -1, which torch's indexing takes for the last slot. The kernels below compute
   slot by slot: -1 gets nothing, and no weights are copied per token.
2. With LoRA enabled vLLM takes its Triton kernel for experts whatever the device, and no CPU has Triton: not even the
   base model would run. Weights, names and slots are vLLM's own here too; only the sums are ours. They include experts
   without a gate, which vLLM's own kernel for a CPU does not.
3. A one-token prefill of a linear-attention model crashes: the convolution needs its input with a stride of its own,
   and torch says of a single row that it is contiguous whatever its stride.
4. With prefix caching, prompts of a Mamba2 model end the engine: the state at the end of a block is to be kept beside
   the last one, and the CPU's scan gives the last one alone. Such prompts are computed in two steps again.

N rows, K experts of a row, E experts, S adapter slots, R LoRA rank, H hidden width, I inner width, T tokens, C channels
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _causal_conv1d_fwd_cpu

from tinker_server.backends.families.gpt_oss import apply_gate
from tinker_server.backends.sampler.engine.vllm_patches import targets
from tinker_server.backends.sampler.engine.vllm_patches.lora import kernels_with_prompt_rows, rows_by_slot

CPU_UUID = "cpu"
"""The CPU's name where a GPU has a number that no other has."""
Slices = tuple[Tensor, ...] | Tensor
"""A tensor for each slice of a layer's outputs, or all of them in one."""


class SlotKernels(PunicaWrapperCPU):  # type: ignore[misc]
    """LoRA kernels that compute slot by slot."""

    def add_shrink(
        self, y: Slices, x: Tensor, lora_a_stacked: tuple[Tensor, ...], scale: float, **kwargs: object
    ) -> None:
        """Fill each `y` [N, R] with x A^T, by the rows' slots."""
        if self.no_lora:
            return
        rows = x.view(-1, x.shape[-1])
        for out, a_stacked in zip(y, lora_a_stacked, strict=False):
            _shrink(rows, a_stacked, out.view(-1, out.shape[-1]), self.token_lora_indices, scale)

    def add_expand(  # noqa: PLR0913
        self,
        y: Tensor,
        x: Slices,
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: object,
    ) -> None:
        """Add each x B^T to its slice of `y`'s outputs, by the rows' slots."""
        if self.no_lora:
            return
        out, offset = y.view(-1, y.shape[-1]), offset_start
        for low, b_stacked, size in zip(x, lora_b_stacked, output_slices, strict=False):
            _expand(low, b_stacked, out[:, offset : offset + size], self.token_lora_indices, add_inputs)
            offset += size

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: object
    ) -> None:
        """Add x B^T, by the rows' slots."""
        if not self.no_lora:
            _expand(x, lora_b_stacked, y, self.token_lora_indices, add_inputs)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: object
    ) -> None:
        """Add the head's adapters to the logits of sampled rows."""
        out, rows = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        low_NR = torch.zeros(len(rows), lora_b_stacked.size(-1), dtype=torch.float32)
        _shrink(rows, lora_a_stacked, low_NR, self.sampler_indices, scale)
        _expand(low_NR, lora_b_stacked, out, self.sampler_indices, add_inputs=True)


CPUKernels = kernels_with_prompt_rows(SlotKernels)


def _weight(stacked: Tensor, slot: int) -> Tensor:
    """Return an adapter's matrix; some layers have a dimension of one in between."""
    return stacked[slot, 0] if stacked.dim() == 4 else stacked[slot]


def _shrink(inputs: Tensor, a_stacked: Tensor, out_NR: Tensor, slots_N: Tensor, scaling: float) -> None:
    for slot, rows in rows_by_slot(slots_N, len(inputs)):
        low = inputs[rows].to(out_NR.dtype) @ _weight(a_stacked, slot).to(out_NR.dtype).T
        out_NR[rows, : low.shape[1]] = scaling * low


def _expand(inputs: Tensor, b_stacked: Tensor, out: Tensor, slots_N: Tensor, add_inputs: bool) -> None:
    # An adapter's output and the model's may be padded differently.
    columns = out[:, : b_stacked.shape[-2]]
    if not add_inputs:
        columns.zero_()
    for slot, rows in rows_by_slot(slots_N, len(inputs)):
        weight = _weight(b_stacked, slot)[: columns.shape[1]].to(out.dtype)
        columns.index_add_(0, rows, inputs[rows].to(out.dtype) @ weight.T)


_ACTIVATIONS: dict[MoEActivation, Callable[..., Tensor]] = {
    MoEActivation.SILU: lambda gate, up: F.silu(gate) * up,
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: apply_gate,
    MoEActivation.RELU2_NO_MUL: lambda up: F.relu(up).square(),
}
"""Of gate and up, or of up alone."""


class ExpertsOnCPU(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]
    """A layer's experts with adapters; vLLM makes one for every layer."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they were loaded."""

    def apply(  # noqa: PLR0913
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *_: object,
        **__: object,
    ) -> None:
        """Fill `output` [N, H]. `w1` is [E, 2 I, H], gate above up, or up alone [E, I, H], and `w2` [E, H, I], but for
        what `_matrices` makes of them."""
        if activation not in _ACTIVATIONS:
            raise NotImplementedError(f"experts with {activation.value} have no adapters on the CPU")
        total_NH = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
            x = hidden_states[rows]
            into_NH, out_HI = self._matrices(w1[expert], w2[expert], x)
            into = self._with_adapters(_plus(x @ into_NH.T, self.w1_bias, expert), x, "w13", expert, rows)
            inner = _ACTIVATIONS[activation](*into.split(out_HI.shape[1], -1))
            y = self._with_adapters(_plus(inner @ out_HI.T, self.w2_bias, expert), inner, "w2", expert, rows)
            total_NH.index_add_(0, rows, (y * topk_weights[rows, choices, None]).float())
        output.copy_(total_NH)

    def _matrices(self, w1: Tensor, w2: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return an expert's matrices [2 I, H] and [H, I], in the type of `like`."""
        return w1, w2

    def _with_adapters(self, y: Tensor, x: Tensor, name: str, expert: int, rows: Tensor) -> Tensor:
        """Add to `y` the output of the rows' adapters of this expert for `x`, side by side as their matrices are."""
        context: MoELoRAContext = self._lora_context
        slots_N = context.punica_wrapper.token_lora_indices[rows]
        halves = [getattr(context, f"{name}_lora_{half}_stacked") for half in "ab"]
        for slot, mine in rows_by_slot(slots_N, len(x)):
            parts = [  # a factor that all experts share is there once
                x[mine] @ a_SERI[slot, expert % a_SERI.shape[1]].T @ b_SEOR[slot, expert % b_SEOR.shape[1]].T
                for a_SERI, b_SEOR in zip(*halves, strict=True)
            ]
            y.index_add_(0, mine, torch.cat(parts, -1).to(y.dtype))
        return y


def _plus(product: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return product if bias is None else product + bias[expert].to(product.dtype)


def _convolve_contiguous(*, x: Tensor, **others: object) -> Tensor:
    """Copy `x` [C, T], so that a single row has a stride of its own."""
    own_TC = x.new_empty(x.shape[1], x.shape[0]).copy_(x.T)
    result: Tensor = _causal_conv1d_fwd_cpu(x=own_TC.T, **others)
    return result


def _allowing_ungated(check: Callable[[FusedMoEConfig], None]) -> Callable[[FusedMoEConfig], None]:
    def allowing(self: FusedMoEConfig) -> None:
        try:
            check(self)
        except NotImplementedError:  # vLLM has done all else before
            if self.is_act_and_mul:
                raise

    return allowing


def patch_cpu() -> None:
    """Apply the changes of a process that computes on the CPU, before a model is made."""
    if torch.cpu._is_amx_tile_supported():
        # vLLM's attention in bfloat16 uses the processor's tiles without asking Linux, which ends the process.
        torch.cpu._init_amx()
    targets.PUNICA.replace(CPUKernels)
    targets.CPU_EXPERTS.replace(lambda moe_config: (UnquantizedMoeBackend.CPU, ExpertsOnCPU))
    targets.CPU_UNGATED_EXPERTS.replace(_allowing_ungated(FusedMoEConfig.__post_init__))
    targets.CPU_CONVOLUTION.replace(_convolve_contiguous)
    targets.CPU_MAMBA2.replace(MambaBase.get_kv_cache_spec)


def _leave_weights(layer: LinearBase, **_: object) -> None:
    """Set the function of a linear layer, and leave its weights as they were loaded."""
    layer.cpu_linear = F.linear


def share_on_cpu() -> None:
    """Apply the changes of a process that holds weights for others in shared memory, or maps them."""
    targets.CPU_WEIGHTS.replace(_leave_weights)
    targets.CPU_MAPPING.replace(lambda: None)
    targets.CPU_MAPPED_DEVICE.replace(lambda: CPU_UUID)
