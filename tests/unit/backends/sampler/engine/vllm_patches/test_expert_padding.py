"""Experts whose inner width a kernel pads, in an engine of several ranks."""

from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.engine.vllm_patches.lora import require_unpadded

INNER = 96


def of_ranks(num_ranks: int, padded: int | None = None) -> FusedMoEConfig:
    """Experts of a layer as vLLM describes them; a kernel has chosen the padded width."""
    config = FusedMoEConfig(
        num_experts=8,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=INNER,
        num_local_experts=8,
        num_logical_experts=8,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Default,
        moe_parallel_config=replace(FusedMoEParallelConfig.make_no_parallel(), tp_size=num_ranks),
        in_dtype=torch.float32,
        is_lora_enabled=True,
    )
    if padded is not None:
        config.intermediate_size_per_partition = padded
    return config


def test_experts_of_uneven_widths_have_adapters_on_several_ranks_unless_a_kernel_pads_them() -> None:
    for config in (of_ranks(1), of_ranks(2), of_ranks(1, padded=128)):
        require_unpadded(config, "layers.0.mlp.experts")
    with pytest.raises(BackendFailed, match=r"tensor_parallel 2 .* experts of layers\.0\.mlp\.experts .* 48 to 64"):
        require_unpadded(of_ranks(2, padded=64), "layers.0.mlp.experts")
