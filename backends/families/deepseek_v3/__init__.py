"""DeepSeek-V3: latent attention (MLA), and experts that a sigmoid router chooses by groups. Moonlight and Kimi K2 have
the same architecture.

Queries come from a token's latent, keys and values from another latent; all heads share the rotated part of their keys.
The engine computes whole keys and values as the trainer does, or keeps latents (`configure/supported.py` says when): in
that form of vLLM's attention `kv_b_proj` is multiplied into other matrices at load, which would leave out its adapters
without an error, so that the engine has no place for them. `engine` sets the norms inside vLLM.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from tinker_server.backends.formats.model_files import require_fields
from tinker_server.backends.patches import Patch

ARCHITECTURE = "DeepseekV3ForCausalLM"
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Linears of latent attention beside `o_proj`; a `q_proj` takes the place of the first two where queries have no
latent."""
OUT_OF_LATENTS = ("q_b_proj", "kv_b_proj")
"""Those of them that the hosted service does not train."""
NORM_EPSILON = 1e-6
"""Epsilon of the latents' norms, in transformers as in DeepSeek's own code, whatever the config says."""
LATENT_NORMS = Patch(
    "latent-norms",
    "vllm.model_executor.models.deepseek_v2:DeepseekV2Attention",
    "0db730dbe2718e72eac9c0bf9d315273806543a783cf8dd77ba78c5b719c7e33",
    "The norms of latents get the config's epsilon, where DeepSeek's own code and transformers have 1e-6; values are"
    " padded to the width of keys.",
    how="relied on",
)


def not_loaded(config: PretrainedConfig) -> tuple[str, ...]:
    """Return how names of tensors begin that neither trainer nor engine loads: those of layers that predict further
    tokens, which follow the others. transformers knows them by DeepSeek-V3's own number of layers alone."""
    if config.architectures != [ARCHITECTURE]:
        return ()
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(f"model.layers.{first + number}." for number in range(count))


def require_known(config: PretrainedConfig, source: str) -> None:
    """Raise BackendFailed, naming the config's field, for what the engine computes otherwise or without a word."""
    fields: dict[str, tuple[object, object]] = {
        "topk_method": (getattr(config, "topk_method", None), "noaux_tc"),
        "scoring_func": (getattr(config, "scoring_func", None), "sigmoid"),
        "moe_layer_freq": (getattr(config, "moe_layer_freq", 1), 1),
        "hidden_act": (config.hidden_act, "silu"),
        "num_key_value_heads": (config.num_key_value_heads, config.num_attention_heads),
        "attention_bias": (config.attention_bias, False),
        "rope_interleave": (config.rope_interleave, True),
        "tie_word_embeddings": (config.tie_word_embeddings, False),
        **_rope_fields(config),
    }
    require_fields(ARCHITECTURE, fields, source)


def _rope_fields(config: PretrainedConfig) -> dict[str, tuple[object, object]]:
    """Return the values of a config's rotation, and those that the engine has."""
    rope: Mapping[str, Any] = config.rope_parameters
    if rope["rope_type"] != "yarn":
        return {"rope_type": (rope["rope_type"], "default")}
    longest = int(rope["factor"] * rope["original_max_position_embeddings"])
    # Where either is missing, transformers does not read the other.
    both_or_none = rope.get("mscale") if rope.get("mscale_all_dim") else None
    return {
        "rope_parameters.attention_factor": (rope.get("attention_factor"), None),
        "rope_parameters.truncate": (rope.get("truncate", True), True),
        "rope_parameters.mscale": (rope.get("mscale"), both_or_none),
        "max_position_embeddings": (config.max_position_embeddings, min(config.max_position_embeddings, longest)),
    }
