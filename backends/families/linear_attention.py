"""Linear attention by the gated delta rule: the rows of its input projections, and what is replaced in transformers
(functions for packed samples, Mamba2's too) and in the engine (the gated norm)."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tinker_server.backends.families.rows import Rows
from tinker_server.backends.patches import Patch

GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Input projections of the decay and of beta: a row for each head."""
ENGINE_SLICES: Mapping[str, tuple[str, ...]] = {
    "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    "in_proj": ("gate_proj", "x_proj"),
}
"""Adapters that the hosted service has for the first slices of a linear of the engine."""


def engine_slices(linear: str) -> tuple[str, ...]:
    """Return the full names of these adapters for the engine's linear of this full name; none for most."""
    layer, _, name = linear.rpartition(".")
    return tuple(f"{layer}.{part}" for part in ENGINE_SLICES.get(name, ()))


def rows_of_inputs(layer: nn.Module, projection: str) -> Mapping[str, Rows]:
    """Return the rows of an input projection of a layer that have adapters of their own in the hosted service, by the
    names of these: of queries, keys, values and the gate z; in Mamba2 of the gate and the scan's input x, not of B, C
    and the time steps. None of a module that does not have them together."""
    sizes: Any = layer
    if projection == "in_proj" and type(layer).__name__.endswith("Mamba2Mixer"):
        width = sizes.intermediate_size
        return {"gate_proj": Rows(0, width), "x_proj": Rows(width, 2 * width)}
    if projection == "in_proj_qkv":
        return _runs(1, {"q": sizes.key_dim, "k": sizes.key_dim, "v": sizes.value_dim})
    if projection == "in_proj_qkvz":  # each head of keys has its own rows together
        keys, values = sizes.head_k_dim, sizes.value_dim // sizes.num_k_heads
        return _runs(sizes.num_k_heads, {"q": keys, "k": keys, "v": values, "z": values})
    return {}


def _runs(num_blocks: int, sizes: Mapping[str, int]) -> dict[str, Rows]:
    """Return rows of these sizes, which follow each other in every block."""
    found, begin = {}, 0
    for name, size in sizes.items():
        found[f"in_proj_{name}"] = Rows(begin, begin + size, num_blocks)
        begin += size
    return found


def _module(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


_OF_DELTA_RULE = [_module(name) for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")]
_OF_MAMBA2 = [_module("nemotron_h")]
CONVOLUTIONS = {
    module: Patch(
        f"packed-convolution {module.partition('modeling_')[2]}",
        f"{module}:causal_conv1d_fn",
        "c9beb1ba143f3e7c4b33f7adc2b0bae9028628ea5e5c971a17c7a5fe94c0bcaf",
        "A convolution of linear attention reads nothing of the packed sample before.",
    )
    for module in [*_OF_DELTA_RULE, *_OF_MAMBA2]
}
"""By module, as DELTA_RULES."""
DELTA_RULES = {
    module: Patch(
        f"packed-delta-rule {module.partition('modeling_')[2]}",
        f"{module}:torch_chunk_gated_delta_rule",
        "e4e4df965ab934a6b3e1a98d75a56006bf397b19c3106a66f96fa10278a2a0e3",
        "The state of linear attention begins anew at each packed sample.",
    )
    for module in _OF_DELTA_RULE
}
SCANS = {
    module: Patch(
        f"packed-scan {module.partition('modeling_')[2]}",
        f"{module}:mamba2_chunk_scan",
        (  # of transformers 5.17, and of 5.19, which multiplies by einsum
            "ae044ee8e1c4825fba40e083d169c57e89dcb9d3ce41bda32251b5dfa5739b7b",
            "cad13e35c634d074f72dbe2afc1c2c546719759a0e5b28a10fc77a1cb34d26d4",
        ),
        "The state of a Mamba2 layer begins anew at each packed sample.",
    )
    for module in _OF_MAMBA2
}
GATED_NORMS = Patch(
    "gated-norms",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:RMSNormGated",
    "9fadb6c14e28e6c55c802a21f45424b48147ba68cc98b13b9926cc854b9fa6e9",
    "The norm of linear attention is rounded to the model's precision, where published files have it in float32.",
)
PATCHES = [*CONVOLUTIONS.values(), *DELTA_RULES.values(), *SCANS.values()]
