"""Configs of published models, without the fields on which no size depends.

Each value is in a public copy of the model's config.json, or is the default of its class in transformers. A model of
which a value was not found has no config here.
"""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _llama(hidden: int, inner: int, layers: int, heads: int, **other: Any) -> Config:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {
        **sizes,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **other,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int, **other: Any) -> Config:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {
        **sizes,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        **other,
    }


def _experts(count: int, chosen: int, inner: int) -> Config:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}


def _qwen3_moe(*sizes: int, **other: Any) -> Config:
    kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    return _qwen3(*sizes, **{**kind, "num_key_value_heads": 4, "norm_topk_prob": True, **other})


def _tower(depth: int, hidden: int, inner: int, width: int) -> Config:
    """Return the vision tower of Qwen3-VL and Qwen3.5; `width` is the decoder's."""
    sizes = {"depth": depth, "hidden_size": hidden, "intermediate_size": inner, "out_hidden_size": width}
    return {**sizes, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 2304}


def _qwen3_vl(text: Config, taps: list[int], depth: int = 27, hidden: int = 1152, inner: int = 4304) -> Config:
    is_mixture = text["model_type"] == "qwen3_moe"
    kind = "qwen3_vl_moe" if is_mixture else "qwen3_vl"
    tower = _tower(depth, hidden, inner, text["hidden_size"])
    return {
        "model_type": kind,
        "architectures": ["Qwen3VLMoeForConditionalGeneration" if is_mixture else "Qwen3VLForConditionalGeneration"],
        "text_config": {**text, "model_type": f"{kind}_text", "max_position_embeddings": 262144},
        "vision_config": {**tower, "model_type": kind, "deepstack_visual_indexes": taps},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def _qwen3_5(hidden: int, layers: int, heads: int, key_heads: int, values: int, **other: Any) -> Config:
    """`values`: heads of values in layers of linear attention. In `other`, the inner width or the experts."""
    kind = "qwen3_5_moe" if "num_experts" in other else "qwen3_5"
    is_small = other.get("tie_word_embeddings", False)
    tower = _tower(24, 1024, 4096, hidden) if is_small else _tower(27, 1152, 4304, hidden)
    text = {
        "model_type": f"{kind}_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": is_small,
        **other,
    }
    architecture = "Qwen3_5MoeForConditionalGeneration" if "moe" in kind else "Qwen3_5ForConditionalGeneration"
    return {
        "model_type": kind,
        "architectures": [architecture],
        "text_config": text,
        "vision_config": {**tower, "model_type": kind},
        "tie_word_embeddings": is_small,
    }


def _nemotron(pattern: str, hidden: int, mamba_heads: int, **other: Any) -> Config:
    return {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
        **other,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "quantization_config": {"quant_method": "mxfp4"},
    }


_SHARED_512, _SHARED_1024 = ({"shared_expert_intermediate_size": inner} for inner in (512, 1024))
_LLAMA_8B = _llama(4096, 14336, 32, 32)
_LLAMA_70B = _llama(8192, 28672, 80, 64)
_QWEN3_8B = _qwen3(4096, 12288, 36, 32)
_QWEN3_32B = _qwen3(5120, 25600, 64, 64)
_QWEN3_30B = _qwen3_moe(2048, 6144, 48, 32, **_experts(128, 8, 768))
_QWEN3_235B = _qwen3_moe(4096, 12288, 94, 64, **_experts(128, 8, 1536))
_QWEN3_4B = _qwen3(2560, 9728, 36, 32, tie_word_embeddings=True, max_position_embeddings=262144)
_QWEN3_5_9B = _qwen3_5(4096, 32, 16, 4, 32, intermediate_size=12288)
_QWEN3_5_27B = _qwen3_5(5120, 64, 24, 4, 48, intermediate_size=17408)
_QWEN3_5_35B = _qwen3_5(2048, 40, 16, 2, 32, **_experts(256, 8, 512), **_SHARED_512)
_DEEPSEEK_V3_1: Config = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "max_position_embeddings": 163840,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
_DEEPSEEK_V4_1: Config = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}
_KIMI_K2: Config = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
}
_KIMI_K2_5: Config = {
    "model_type": "kimi_k25",
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": _KIMI_K2,
}
_INKLING: Config = {"model_type": "inkling_mm_model", "architectures": ["InklingForConditionalGeneration"]}

COOKBOOK: dict[str, Config] = {
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True),
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "Qwen/Qwen3-8B": _QWEN3_8B,
    "Qwen/Qwen3-8B-Base": _QWEN3_8B,
    "Qwen/Qwen3-32B": _QWEN3_32B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Base": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": _QWEN3_235B,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _qwen3_vl(_QWEN3_30B, [8, 16, 24]),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": _qwen3_vl(_QWEN3_235B, [8, 16, 24]),
    "Qwen/Qwen3.5-4B": _qwen3_5(2560, 32, 16, 4, 32, intermediate_size=9216, tie_word_embeddings=True),
    "Qwen/Qwen3.5-9B": _QWEN3_5_9B,
    "Qwen/Qwen3.5-9B-Base": _QWEN3_5_9B,
    "Qwen/Qwen3.5-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.6-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.8-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.5-35B-A3B-Base": _QWEN3_5_35B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5(4096, 60, 32, 2, 64, **_experts(512, 10, 1024), **_SHARED_1024),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        2688,
        64,
        intermediate_size=1856,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_experts_per_tok=6,
        routed_scaling_factor=2.5,
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _nemotron(
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        4096,
        128,
        intermediate_size=2688,
        moe_intermediate_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        n_routed_experts=512,
        num_experts_per_tok=22,
        routed_scaling_factor=5.0,
    ),
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3_1,
    "deepseek-ai/DeepSeek-V3.1-Base": _DEEPSEEK_V3_1,
    "deepseek-ai/DeepSeek-V4.1-Flash": _DEEPSEEK_V4_1,
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": _DEEPSEEK_V4_1,
    "moonshotai/Kimi-K2-Thinking": _KIMI_K2,
    "moonshotai/Kimi-K2.5": _KIMI_K2_5,
    "moonshotai/Kimi-K2.6": _KIMI_K2_5,
    "zai-org/GLM-5.3": {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "max_position_embeddings": 1048576,
    },
    "zai-org/GLM-5.3-Flash": {"model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"]},
    "thinkingmachines/Inkling": _INKLING,
    "thinkingmachines/Inkling-Small": _INKLING,
}
"""Those that the cookbook's `model_info` names. Where a model is refused by its architecture, only this is named."""
NOT_FOUND = (
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
    "moonshotai/Kimi-K3.1-Pro",
    "thinkingmachines/Inkling-2-Small",
)
"""Those that it names and whose configs were not found."""
SERVICE_COUNTS = {
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (56_598_528, 3_176_448, 156_032),
    "Qwen/Qwen3-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-30B-A3B-Base": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-32B": (5_898_240, 2_490_368, 157_056),
    "Qwen/Qwen3-4B-Instruct-2507": (1_327_104, 737_280, 154_496),
    "Qwen/Qwen3-8B": (1_769_472, 958_464, 156_032),
    "Qwen/Qwen3-8B-Base": (1_769_472, 958_464, 156_032),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (56_598_528, 3_176_448, 156_032),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3.5-27B": (4_325_376, 2_965_504, 253_440),
    "Qwen/Qwen3.5-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.5-35B-A3B-Base": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.5-397B-A17B": (96_030_720, 2_841_600, 252_416),
    "Qwen/Qwen3.5-4B": (1_130_496, 897_024, 250_880),
    "Qwen/Qwen3.5-9B": (1_572_864, 1_130_496, 252_416),
    "Qwen/Qwen3.5-9B-Base": (1_572_864, 1_130_496, 252_416),
    "Qwen/Qwen3.6-27B": (4_325_376, 2_965_504, 253_440),
    "Qwen/Qwen3.6-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.8-27B": (4_325_376, 2_965_504, 253_440),
    "deepseek-ai/DeepSeek-V3.1": (94_307_328, 2_440_000, 136_448),
    "deepseek-ai/DeepSeek-V3.1-Base": (94_307_328, 2_440_000, 136_448),
    "deepseek-ai/DeepSeek-V4.1-Flash": (107_673_600, 1_013_760, 134_400),
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": (107_673_600, 1_013_760, 134_400),
    "meta-llama/Llama-3.1-70B": (8_847_360, 4_096_000, 136_448),
    "meta-llama/Llama-3.1-8B": (1_769_472, 851_968, 132_352),
    "meta-llama/Llama-3.1-8B-Instruct": (1_769_472, 851_968, 132_352),
    "meta-llama/Llama-3.2-1B": (491_520, 212_992, 130_304),
    "meta-llama/Llama-3.2-3B": (946_176, 573_440, 131_328),
    "meta-llama/Llama-3.3-70B-Instruct": (8_847_360, 4_096_000, 136_448),
    "moonshotai/Kimi-K2-Thinking": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K2.5": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K2.6": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K3.1-Pro": (766_457_856, 8_040_960, 171_008),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (11_346_176, 584_832, 133_760),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": (11_346_176, 584_832, 133_760),
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": (111_349_760, 1_675_264, 135_168),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (111_349_760, 1_675_264, 135_168),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (254_529_536, 4_134_912, 139_264),
    "openai/gpt-oss-120b": (40_124_160, 746_496, 203_968),
    "openai/gpt-oss-20b": (6_842_880, 497_664, 203_968),
    "thinkingmachines/Inkling": (154_705_920, 3_424_256, 207_168),
    "thinkingmachines/Inkling-Small": (64_503_808, 1_311_744, 205_120),
    "thinkingmachines/Inkling-2-Small": (128_065_536, 2_347_008, 205_632),
    "zai-org/GLM-5.3": (121_356_288, 2_920_320, 161_024),
    "zai-org/GLM-5.3-Flash": (75_755_520, 2_009_088, 158_976),
}
"""Numbers that a LoRA of rank 1 trains at the hosted service, of mlp, attn and unembed: measured there, as
`hyperparam_utils` in tinker-cookbook 0.6.1 has them."""
OTHERS: dict[str, Config] = {
    "Qwen/Qwen3-VL-4B-Instruct": _qwen3_vl(_QWEN3_4B, [5, 11, 17], 24, 1024, 4096),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3_vl(_QWEN3_8B, [8, 16, 24]),
    "Qwen/Qwen3-VL-32B-Instruct": _qwen3_vl(_QWEN3_32B, [8, 16, 24]),
    "mistralai/Mistral-7B-v0.1": {
        **_llama(4096, 14336, 32, 32, vocab_size=32000, max_position_embeddings=32768, sliding_window=4096),
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
    },
    "google/gemma-3-12b-it, text": {
        **_llama(3840, 15360, 48, 16, head_dim=256, vocab_size=262208, tie_word_embeddings=True),
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
    },
}
