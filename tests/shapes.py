"""Large models by their shapes alone, on the meta device, as the memory plan sees them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3_5Config, Qwen3Config, Qwen3VLConfig, Qwen3VLMoeConfig

from backends.configure.describe import model_size
from backends.configure.memory_plan import ModelSize
from backends.families.coverage import check_coverage
from backends.families.registry import find_family
from tinker_server.embedded import DIRECTORIES, TINY_VL

_TEXT = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144}
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": [8, 16, 24],
    "num_position_embeddings": 2304,
}


def _seeing(kind: Any, heads: int, key_heads: int, *, tied: bool = False, **text: Any) -> PretrainedConfig:
    config = kind(
        text_config={**_TEXT, "num_attention_heads": heads, "num_key_value_heads": key_heads, **text},
        vision_config={**_VISION, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=tied,
    )
    name = "Qwen3VLMoeForConditionalGeneration" if kind is Qwen3VLMoeConfig else "Qwen3VLForConditionalGeneration"
    config.architectures = [name]
    return config  # type: ignore[no-any-return]


def _config(name: str) -> PretrainedConfig:
    match name:
        case "4b":
            sizes: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
            return _seeing(Qwen3VLConfig, 32, 8, tied=True, **sizes)
        case "32b":
            sizes = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
            return _seeing(Qwen3VLConfig, 64, 8, **sizes)
        case "30b-a3b":
            sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
            experts: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
            return _seeing(Qwen3VLMoeConfig, 32, 4, **sizes, **experts)
        case "9b":  # Qwen3.5's
            sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "head_dim": 256}
            linear: dict[str, Any] = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 248320}
            found = _seeing(Qwen3_5Config, 16, 4, **sizes, **linear)
            found.architectures = ["Qwen3_5ForConditionalGeneration"]
            return found
        case "235b-a22b":
            sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94}
            experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
            return _seeing(Qwen3VLMoeConfig, 64, 4, **sizes, **experts)
        case "8b-text":
            sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
            config: PretrainedConfig = Qwen3Config(**{**_TEXT, **sizes}, num_attention_heads=32, num_key_value_heads=8)
        case "70b":
            sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
            config = LlamaConfig(
                **{**_TEXT, **sizes, "vocab_size": 128256}, num_attention_heads=64, num_key_value_heads=8
            )
    config.architectures = ["LlamaForCausalLM" if name == "70b" else "Qwen3ForCausalLM"]
    return config


@cache
def shape(name: str) -> ModelSize:
    """Of `4b`, `32b`, `30b-a3b`, `235b-a22b` (Qwen3-VL), `9b` (Qwen3.5), `8b-text` (Qwen3) or `70b` (Llama) in
    bfloat16; the images' processor is the small model's."""
    config = _config(name)
    source = str(Path(DIRECTORIES[TINY_VL]))
    family = find_family(config, source)
    size = model_size(name, config, check_coverage(family, config, source), "bfloat16")
    size = replace(size, can_be_shared=not family.has_linear_attention)
    return size if name in ("30b-a3b", "235b-a22b") else replace(size, tensor_parallels=(1, 2, 4, 8))
