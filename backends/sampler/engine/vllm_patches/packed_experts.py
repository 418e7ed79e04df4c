"""A mixture's experts whose matrices stay packed (`formats/packed.py`), with the trainer's numbers: vLLM's own experts
in fp8 or MXFP4 round activations too, or have no adapters.

On a GPU the trainer's own kernel multiplies by them; on the CPU those in use are dequantised in turn. Ranks divide an
expert in fp8 by its inner width.

T tokens, K experts of a token, S = T * K (token, expert) pairs, E experts, H hidden width, I inner width, B bytes
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.utils import _resize_cache
from vllm.model_executor.utils import is_weights_pre_processed
from vllm.platforms import current_platform

from tinker_server.backends.formats.block_fp8 import packed_bytes, require_kernel
from tinker_server.backends.formats.divided_fp8 import copy_part, rows_of_rank
from tinker_server.backends.formats.packed import alternating, byte_shape, gates_and_ups, halves, unpack

if current_platform.is_cpu():
    from tinker_server.backends.sampler.engine.vllm_patches.cpu import ExpertsOnCPU
else:
    from tinker_server.backends.kernels.packed_experts import AlignedPairs, product_by_expert, tile_rows

_INTO = ("w1", "w3")
"""vLLM's names of gate and up."""


class PackedExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """A layer's experts whose weights are the bytes of their matrices."""

    def __init__(self, config: FusedMoEConfig, *, is_in_mxfp4: bool) -> None:
        super().__init__(config)
        self.experts_cls = _experts_class()
        self._is_in_mxfp4 = is_in_mxfp4
        self._missing: set[tuple[str, int | None]] = set()

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: object,
    ) -> None:
        """Give the layer its weights. Raises ValueError for experts of which ranks have some each, for those in MXFP4
        if ranks divide them, and for those of another form."""
        parallel = self.moe.moe_parallel_config
        if parallel.use_ep or not self.moe.is_act_and_mul:
            raise ValueError("experts that stay packed have gates, and every rank has a part of each")
        if self.moe.has_bias != self._is_in_mxfp4:
            raise ValueError("experts that stay in fp8 have no biases, and those that stay in mxfp4 have biases")
        if self._is_in_mxfp4 and parallel.tp_size > 1:
            raise ValueError("experts that stay in mxfp4 are not divided over ranks")
        inner, hidden = intermediate_size_per_partition, hidden_size
        self._hidden, self._inner = hidden, inner
        if self._is_in_mxfp4:
            shapes = byte_shape((num_experts, 2 * inner, hidden)), byte_shape((num_experts, hidden, inner))
            self._missing = {("w13", None), ("w2", None)}
        else:
            shapes = (num_experts, 2 * packed_bytes(inner, hidden)), (num_experts, packed_bytes(hidden, inner))
            self._missing = {(matrix, expert) for matrix in (*_INTO, "w2") for expert in range(num_experts)}
        for name, shape, outputs in zip(("w13", "w2"), shapes, (2 * inner, hidden), strict=True):
            weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
            weight.weight_loader = self._load_stack if self._is_in_mxfp4 else self._load  # type: ignore[attr-defined]
            layer.register_parameter(f"{name}_weight", weight)
            if self.moe.has_bias:
                bias = nn.Parameter(torch.empty(num_experts, outputs, dtype=params_dtype), requires_grad=False)
                layer.register_parameter(f"{name}_bias", bias)

    def _load_stack(self, param: Tensor, loaded_weight: Tensor, matrix: str) -> None:
        """Copy the packed matrices of all experts, with gates and ups as in the files."""
        param.data.copy_(loaded_weight)
        self._missing.discard((matrix, None))

    def _load(  # noqa: PLR0913 - as vLLM calls it
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy a matrix of the files. Raises ValueError for one that is not packed."""
        if loaded_weight.dtype != torch.uint8:
            raise ValueError("an expert's matrix is not in fp8 in the files; start without --base-precision")
        row_B = param.data[expert_id]
        target = row_B.chunk(2)[_INTO.index(shard_id)] if shard_id in _INTO else row_B
        self._copy_part(loaded_weight, target, is_into=shard_id in _INTO)
        self._missing.discard((shard_id, expert_id))
        return True if return_success else None

    def _copy_part(self, matrix_B: Tensor, target_B: Tensor, *, is_into: bool) -> None:
        """Copy this rank's part of an expert's matrix, into the inner width or out of it."""
        parallel = self.moe.moe_parallel_config
        if parallel.tp_size == 1:
            target_B.copy_(matrix_B)
            return
        whole = self._inner * parallel.tp_size
        every = rows_of_rank([self._hidden], self._hidden, 0, 1)
        inner = rows_of_rank([self._inner], whole, parallel.tp_rank, parallel.tp_size)
        if is_into:
            copy_part(matrix_B, (whole, self._hidden), inner, every, target_B)
        else:
            copy_part(matrix_B, (self._hidden, whole), every, inner, target_B)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the kernel. Raises ValueError if a matrix was never loaded."""
        weight = layer.w13_weight
        assert isinstance(weight, Tensor)
        if self._missing and not weight.is_meta and not is_weights_pre_processed():
            raise ValueError(f"{len(self._missing)} packed matrices of experts are missing in the files")
        if not self._is_in_mxfp4:
            require_kernel(weight.device)
        super().process_weights_after_loading(layer)


class _PackedSizes:
    """Tells vLLM the sizes of experts, which it reads from the shapes of weights."""

    moe_config: FusedMoEConfig

    @property
    def _sizes(self) -> tuple[int, int]:
        """I and H."""
        return self.moe_config.intermediate_size_per_partition, self.moe_config.hidden_dim

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Return E, T, 2 I, H and K."""
        return len(w1), len(a1), 2 * self._sizes[0], a1.shape[1], topk_ids.shape[1]


class PackedExperts(_PackedSizes, TritonExperts):  # type: ignore[misc]
    """A layer's experts with adapters, on a GPU."""

    def apply(  # noqa: PLR0913 - as vLLM calls it
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: object,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Fill `output` [T, H]. `w1` and `w2` are packed stacks."""
        assert expert_map is None and not apply_router_weight_on_input
        (inner, hidden), (num_tokens, num_choices) = self._sizes, topk_ids.shape
        into_TKN = _resize_cache(workspace2, (num_tokens, num_choices, 2 * inner))
        inner_SI = _resize_cache(workspace13, (num_tokens * num_choices, inner))
        y_TKH = _resize_cache(workspace2, (num_tokens, num_choices, hidden))
        rows = tile_rows(topk_ids.numel(), len(w1))
        numbers, experts, count = moe_align_block_size(topk_ids, rows, len(w1))
        pairs = AlignedPairs(numbers, experts, count, rows, num_choices, None)
        parts_SI = into_TKN.view(-1, 2 * inner).chunk(2, 1)
        # Biases alternate where there are any.
        biases = (None, None) if self.w1_bias is None else alternating(self.w1_bias)
        for stack, bias_EI, part_SI in zip(gates_and_ups(w1), biases, parts_SI, strict=True):
            product_by_expert(hidden_states, halves(stack, inner, hidden), pairs, part_SI, bias_EN=bias_EI)
        lora: dict[str, Any] = {
            "topk_weights": topk_weights,
            "w1": w1.new_empty(()).expand(len(w1), 2 * inner, hidden),  # vLLM reads the shapes
            "w2": w1.new_empty(()).expand(len(w1), hidden, inner),
            "num_tokens": num_tokens,
            "top_k_num": num_choices,
        }
        context = self._lora_context
        of_lora = (None,) * 4
        if context is not None:
            more = {"topk_ids": topk_ids, "expert_map": None}
            of_lora = self.apply_w13_lora(context, y=into_TKN, x=hidden_states, **more, **lora)
        self.activation(activation, inner_SI, into_TKN.view(-1, 2 * inner))
        pairs = AlignedPairs(numbers, experts, count, rows, 1, topk_weights.flatten())
        y_SH = y_TKH.view(-1, hidden)
        product_by_expert(inner_SI, halves(w2, hidden, inner), pairs, y_SH, bias_EN=self.w2_bias)
        if context is not None:
            names = "sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping"
            self.apply_w2_lora(context, y=y_TKH, x=inner_SI, **dict(zip(names, of_lora, strict=True)), **lora)
        self.moe_sum(y_TKH, output)


def _experts_class() -> type:
    """Return vLLM's class of experts on this device, for packed weights."""
    if not current_platform.is_cpu():
        return PackedExperts

    class PackedExpertsOnCPU(_PackedSizes, ExpertsOnCPU):
        """Those on the CPU."""

        @property
        def w1_bias(self) -> Tensor | None:
            """Biases of gates, then of ups."""
            bias: Tensor | None = super().w1_bias
            return None if bias is None else torch.cat(alternating(bias), 1)

        def _matrices(self, w1: Tensor, w2: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
            """Return an expert's matrices, dequantised."""
            inner, hidden = self._sizes
            into_NH = like.new_empty(2 * inner, hidden)
            for stack, part_IH in zip(gates_and_ups(w1[None]), into_NH.chunk(2), strict=True):
                unpack(stack[0], part_IH)
            return into_NH, unpack(w2, like.new_empty(hidden, inner))

    return PackedExpertsOnCPU
