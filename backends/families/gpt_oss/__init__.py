"""gpt-oss: its experts' own layout and activation.

In its files gate and up are interleaved, inputs come before outputs, and every expert has biases. Trainer and engine
lay them out as other mixtures': gate above up, outputs before inputs. `experts` does so in the trainer's model, and
`engine` inside vLLM. Experts that stay in MXFP4, in which outputs come first, are as in the files.

E experts, H hidden width, I inner width
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tinker_server.backends.formats.model_files import quantisation, require_fields
from tinker_server.backends.patches import Patch

ARCHITECTURE, MODEL_TYPE = "GptOssForCausalLM", "gpt_oss"
ROUTER = "model.layers.*.mlp.router"
UNSHARED = "trainer and engine lay out gpt-oss's experts anew, and otherwise than its files"
EXPERTS = Patch(
    "biased-experts",
    "transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts",
    (  # of transformers 5.16 to 5.18, and of 5.19, which has the activation's constants from the config
        "40b753b9563b61e3053414816feaeafc1a4d18a5a8b56afb6566177ee44fd1b6",
        "d49f2b42614e2300e3f3d6a84d0f864592930540c44a96686f22e2679ea0553c",
    ),
    "The experts' layout and activation are our own, so that LoRA reaches each of their three matrices.",
    how="relied on",
)
ENGINE_EXPERTS = Patch(
    "gpt-oss-experts",
    "vllm.model_executor.models.gpt_oss:FusedMoEFactory",
    "a54099c0674c61b236f9dc1ae856e4e33b5c4807d8cc651ec3078809d5e0b647",
    "What adapters of gate and up give is added as if gate stood above up, but gpt-oss's alternate.",
)
ENGINE_WEIGHTS = Patch(
    "gpt-oss-weights",
    "vllm.model_executor.models.gpt_oss:GptOssForCausalLM.load_weights",
    "b40c522c80b19203aced007f10cc0022e37ad675a1bf67be5c0280dd75310d93",
    "As gpt-oss-experts; and experts that stay in MXFP4 are loaded packed.",
)
ALPHA, LIMIT = 1.702, 7.0
"""Constants of the experts' activation."""


def require_known(config: PretrainedConfig, source: str) -> None:
    """Raise BackendFailed, naming the config's field, for what the engine computes otherwise or without a word."""
    quantised = quantisation(config) or {}
    in_turn = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.num_hidden_layers)]
    fields = {
        "quantization_config.quant_method": (quantised.get("quant_method", "mxfp4"), "mxfp4"),
        "layer_types": (config.layer_types, in_turn),
        "rope_type": (config.rope_parameters["rope_type"], "yarn"),
        "attention_bias": (config.attention_bias, True),
        "tie_word_embeddings": (config.tie_word_embeddings, False),
        "rms_norm_eps": (config.rms_norm_eps, 1e-5),
        "swiglu_alpha": (getattr(config, "swiglu_alpha", ALPHA), ALPHA),
        "swiglu_limit": (getattr(config, "swiglu_limit", LIMIT), LIMIT),
    }
    require_fields(ARCHITECTURE, fields, source)


def has_own_experts(module: nn.Module) -> bool:
    """Return whether these are a layer's experts as transformers has them."""
    return type(module).__name__ == "GptOssExperts"


def apply_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Apply the experts' activation."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def uninterleave(gate_up: Tensor, num_parts: int = 1) -> Tensor:
    """Put gates before ups in the last dimension, where they alternate, in each of so many equal parts of it."""
    by_part: Tensor = gate_up.unflatten(-1, (num_parts, -1, 2))
    return by_part.mT.flatten(-3)


def in_common_layout(weights: Iterable[tuple[str, Tensor]], num_parts: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield the files' tensors by name, gates before ups in each of so many parts of a matrix. Raises ValueError if
    there are no experts."""
    num_laid_out = 0
    for name, tensor in weights:
        is_interleaved = ".experts.gate_up_proj" in name
        num_laid_out += is_interleaved
        yield name, uninterleave(tensor, num_parts) if is_interleaved else tensor
    if not num_laid_out:
        raise ValueError("tensors of experts are missing")
