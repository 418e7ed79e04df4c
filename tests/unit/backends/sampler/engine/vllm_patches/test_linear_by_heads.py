"""Adapters of Qwen3-Next's `in_proj_qkvz` in the engine, compared with transformers' order of its outputs."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from tinker_server.backends.families.linear_attention import rows_of_inputs
from tinker_server.backends.sampler.engine.vllm_patches.cpu import SlotKernels
from tinker_server.backends.sampler.engine.vllm_patches.linear_by_heads import LinearByHeads

HIDDEN, RANK, TOKENS = 24, 3, 5
SLOT = 1
SIZES = {"q": 4 * 8, "k": 4 * 8, "v": 8 * 6, "z": 8 * 6}
Halves = list[Tensor | None]


@pytest.fixture
def layer() -> Qwen3NextGatedDeltaNet:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    )
    return Qwen3NextGatedDeltaNet(config, 0)


def of_rank(layer: Qwen3NextGatedDeltaNet, rank: int, num_ranks: int) -> LinearByHeads:
    """Return the engine's linear on a rank; rows without an adapter come first."""
    base = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    nn.Module.__init__(base)
    weight = layer.in_proj_qkvz.weight.detach()
    base.tp_size, base.tp_rank, base.input_size = num_ranks, rank, HIDDEN
    base.output_sizes, base.output_size = [len(weight)], len(weight)
    base.output_size_per_partition = len(weight) // num_ranks
    base.weight = nn.Parameter(weight.chunk(num_ranks)[rank])
    base.quant_method = SimpleNamespace(apply=lambda linear, x, bias: F.linear(x, linear.weight))
    linear = LinearByHeads(base, [*rows_of_inputs(layer, "in_proj_qkvz").values()])
    config = LoRAConfig(max_lora_rank=8, max_loras=2, lora_dtype=torch.float32)
    linear.create_lora_weights(2, config)
    kernels = SlotKernels(16, 16, "cpu")
    kernels.update_metadata(LoRAMapping((0, 7, 7, 7, 7), (0,) * TOKENS, is_prefill=True), [None, 7], 2, 100)
    linear.set_mapping(kernels)
    return linear


def in_parts(layer: Qwen3NextGatedDeltaNet, outputs_TO: Tensor) -> list[Tensor]:
    """Return queries, keys, values and gate in transformers' order."""
    heads = outputs_TO.new_zeros(1, len(outputs_TO), 2 * layer.num_v_heads)
    queries, keys, values, gate, *_ = layer.fix_query_key_value_ordering(outputs_TO[None], heads)
    return [part[0].flatten(1) for part in (queries, keys, values, gate)]


def outputs(layer: Qwen3NextGatedDeltaNet, x: Tensor, num_ranks: int, a: Halves, b: Halves) -> Tensor:
    """Return all ranks' outputs with an adapter, of the whole linear if there is one of all rows."""
    found = []
    for rank in range(num_ranks):
        linear = of_rank(layer, rank, num_ranks)
        linear.set_lora(SLOT, *((a, b) if len(a) > 1 else (a[0], b[0])))
        found.append(linear.apply(x))
    return torch.cat(found, 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("left_out", [None, 1])
def test_adapters_of_queries_keys_values_and_gate_are_added_to_these(
    layer: Qwen3NextGatedDeltaNet, num_ranks: int, left_out: int | None
) -> None:
    x = torch.randn(TOKENS, HIDDEN)
    a: Halves = [torch.randn(RANK, HIDDEN) for _ in SIZES]
    b: Halves = [torch.randn(size, RANK) for size in SIZES.values()]
    if left_out is not None:
        a[left_out] = b[left_out] = None
    base = F.linear(x, layer.in_proj_qkvz.weight.detach())
    found = outputs(layer, x, num_ranks, a, b)
    torch.testing.assert_close(found[0], base[0])
    for got, wanted, a_RI, b_OR in zip(in_parts(layer, found), in_parts(layer, base), a, b, strict=True):
        added = 0 if a_RI is None or b_OR is None else x[1:] @ a_RI.T @ b_OR.T
        torch.testing.assert_close(got[1:], wanted[1:] + added, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_adapter_of_all_rows_is_added_row_by_row(layer: Qwen3NextGatedDeltaNet, num_ranks: int) -> None:
    x, a_RI, b_OR = torch.randn(TOKENS, HIDDEN), torch.randn(RANK, HIDDEN), torch.randn(sum(SIZES.values()), RANK)
    wanted = F.linear(x, layer.in_proj_qkvz.weight.detach())
    wanted[1:] += x[1:] @ a_RI.T @ b_OR.T
    torch.testing.assert_close(outputs(layer, x, num_ranks, [a_RI], [b_OR]), wanted, atol=1e-4, rtol=1e-5)


def test_an_adapter_of_a_warm_up_fills_the_first_slice_alone(layer: Qwen3NextGatedDeltaNet) -> None:
    linear = of_rank(layer, 1, 2)
    first = linear.lora_b_stacked[0].shape[-2]
    linear.set_lora(SLOT, torch.zeros(RANK, HIDDEN), torch.zeros(first, RANK))
    assert not any(b_SEOR.any() for b_SEOR in linear.lora_b_stacked)
