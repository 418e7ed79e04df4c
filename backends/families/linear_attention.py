"""The functions of transformers' linear attention that are replaced for packed samples, and the code that they were
written for."""

from backends.patches import Patch

_MODULES = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next")]
CONVOLUTIONS = {
    module: Patch(
        f"packed-convolution {module.partition('modeling_')[2]}",
        f"{module}:causal_conv1d_fn",
        "c9beb1ba143f3e7c4b33f7adc2b0bae9028628ea5e5c971a17c7a5fe94c0bcaf",
        "A convolution of linear attention reads nothing of the packed sample before.",
    )
    for module in _MODULES
}
"""By module, as DELTA_RULES."""
DELTA_RULES = {
    module: Patch(
        f"packed-delta-rule {module.partition('modeling_')[2]}",
        f"{module}:torch_chunk_gated_delta_rule",
        "e4e4df965ab934a6b3e1a98d75a56006bf397b19c3106a66f96fa10278a2a0e3",
        "The state of linear attention begins anew at each packed sample.",
    )
    for module in _MODULES
}
PATCHES = [*CONVOLUTIONS.values(), *DELTA_RULES.values()]
