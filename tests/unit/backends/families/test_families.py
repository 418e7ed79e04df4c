"""Families name the modules that LoRA reaches, and none is silently left out."""

import math
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from tests.models import make_tiny_vl
from tinker_server.backends.families.coverage import LoraMatrices, check_coverage
from tinker_server.backends.families.family import LoraFlag
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.families.nemotron_h import require_known
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.protocol import BackendFailed

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4}


def config(kind: str, **sizes: object) -> PretrainedConfig:
    found = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    found.architectures = [""]
    return found


# Numbers of an adapter of rank 1: outputs and inputs of each matrix of `SIZES`.
HEAD = 128 + 64
MLP = 3 * (128 + 64)
FUSED_MLP = (2 * 128 + 64) + (128 + 64)  # gate and up in one matrix


def attention(head_size: int, num_heads: int = 2, num_keys: int = 1) -> int:
    """Queries, keys, values and what brings them together."""
    queries, keys = num_heads * head_size, num_keys * head_size
    return 2 * (queries + 64) + 2 * (keys + 64)


DENSE = {
    "qwen3": 4 * (attention(128) + MLP) + HEAD,
    **dict.fromkeys(
        ("qwen2", "llama", "mistral", "olmo2", "smollm3", "granite", "cohere2"), 4 * (attention(32) + MLP) + HEAD
    ),
    "glm4": 4 * (attention(128) + FUSED_MLP) + HEAD,
    "phi3": 4 * ((4 * 32 + 64) + (64 + 64) + FUSED_MLP) + HEAD,  # queries, keys and values in one matrix
}


@pytest.mark.parametrize("kind", DENSE)
def test_dense_decoders_are_covered(kind: str) -> None:
    assert check_coverage(find_family(config(kind), "dir"), config(kind), "dir").adapter == DENSE[kind]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_dense_decoders_with_a_head_size_of_their_own_are_covered(kind: str) -> None:
    numbers = check_coverage(find_family(config(kind), "dir"), config(kind, head_dim=48), "dir")
    assert numbers.adapter == 4 * (attention(48) + MLP) + HEAD


def experts(count: int, inner: int) -> int:
    return count * 3 * (inner + 64)


def test_qwen3_moe_is_covered_with_layers_that_have_no_experts_and_its_routers_frozen() -> None:
    found = config("qwen3_moe", **EXPERTS, mlp_only_layers=[0])
    found.architectures = ["Qwen3MoeForCausalLM"]
    numbers = check_coverage(find_family(found, "dir"), found, "dir")
    assert numbers.adapter == 4 * attention(32) + MLP + 3 * experts(4, 32) + HEAD


# Three layers of linear attention, of 16 heads of keys and 32 of values with 128 numbers each, and one whose queries
# bring their gates.
QWEN3_NEXT = 3 * ((2 * 16 * 128 + 2 * 32 * 128 + 64) + (2 * 32 + 64) + (64 + 32 * 128)) + attention(256) + 2 * 256


@pytest.mark.parametrize(
    ("kind", "architecture", "of_attention"),
    [
        ("qwen3_next", "Qwen3NextForCausalLM", QWEN3_NEXT),
        ("qwen2_moe", "Qwen2MoeForCausalLM", 4 * attention(32)),
    ],
)
def test_mixtures_with_a_shared_expert_are_covered_with_its_gate_frozen(
    kind: str, architecture: str, of_attention: int
) -> None:
    found = config(kind, **EXPERTS, shared_expert_intermediate_size=32)
    found.architectures = [architecture]
    family = find_family(found, "dir")
    numbers = check_coverage(family, found, "dir")
    assert numbers.adapter == of_attention + 4 * (experts(4, 32) + experts(1, 32)) + HEAD
    assert "model.layers.*.mlp.shared_expert_gate" in family.frozen


def test_mixtral_is_covered_and_its_router_frozen() -> None:
    found = config("mixtral")
    found.architectures = ["MixtralForCausalLM"]
    family = find_family(found, "dir")
    numbers = check_coverage(family, found, "dir")
    assert numbers.adapter == 4 * (attention(32) + experts(8, 128)) + HEAD
    assert list(family.frozen) == ["model.layers.*.mlp.gate"]


@pytest.mark.parametrize("moe", [False, True])
def test_qwen3_vl_is_covered_and_its_vision_tower_frozen(tmp_path, moe: bool) -> None:
    source = make_tiny_vl(tmp_path / "model", moe=moe)
    found = AutoConfig.from_pretrained(source)
    numbers = check_coverage(find_family(found, str(source)), found, str(source))
    vocabulary = 384  # the tokenizer's, made a multiple of 64
    assert numbers.adapter == 2 * (attention(32) + (experts(8, 96) if moe else MLP)) + vocabulary + 64
    assert not any(one.in_tower for one in numbers.matrices) and numbers.tower > 0


PARTLY: dict[str, tuple[dict[str, Any], list[str]]] = {
    "qwen3_next": (
        {**EXPERTS, "shared_expert_intermediate_size": 32},
        ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj", "mlp.experts.gate_up_proj"],
    ),
    "qwen3_5_text": ({}, ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"]),
    "qwen2_moe": ({**EXPERTS, "shared_expert_intermediate_size": 32}, ["mlp.experts.gate_up_proj", "mlp.experts.down"]),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"] * 2},
        ["self_attn.out_proj", "feed_forward.w1", "conv.in"],
    ),
    "falcon_h1": (
        {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_state": 16},
        ["mamba.in_proj", "mamba.out_proj"],
    ),
    "mixtral": ({}, ["mlp.experts.gate_up_proj"]),
    "gpt_oss": ({}, ["mlp.experts.gate_up_proj"]),
    "youtu": ({}, ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"]),  # no experts
    "opt": ({}, ["self_attn.out_proj", "fc1", "fc2"]),
    "gpt2": ({}, ["attn.c_attn", "mlp.c_proj"]),
    "falcon": ({}, ["self_attention.query_key_value"]),
}


@pytest.mark.parametrize("kind", PARTLY)
def test_a_model_that_would_be_trained_in_part_is_refused_with_the_missing_weights(kind: str) -> None:
    sizes, missing = PARTLY[kind]
    model = config(kind, **sizes)
    with pytest.raises(BackendFailed, match=r"dir: .* is not supported: LoRA would leave out") as refused:
        check_coverage(find_family(model, "dir"), model, "dir")
    for name in missing:
        assert re.search(rf"\.\*\.{re.escape(name)}", str(refused.value)), refused.value


GPT_OSS = {"num_local_experts": 4, "attention_bias": True, "architectures": ["GptOssForCausalLM"]}


def test_gpt_oss_is_covered_with_its_router_and_its_sinks_frozen() -> None:
    model = config("gpt_oss", **GPT_OSS, intermediate_size=96)
    model.architectures = ["GptOssForCausalLM"]
    numbers = check_coverage(find_family(model, "dir"), model, "dir")
    assert LoraMatrices("experts", 2 * 4 * 4, 96, 64) in numbers.matrices
    assert LoraMatrices("experts", 4 * 4, 64, 96) in numbers.matrices


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["full_attention"] * 4),
        ("attention_bias", False),
        ("tie_word_embeddings", True),
        ("swiglu_alpha", 1.0),
        ("swiglu_limit", 3.0),
        ("rms_norm_eps", 1e-6),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_gpt_oss_is_refused_by_name_where_the_engine_would_pass_over_its_config(field: str, value: object) -> None:
    model = config("gpt_oss", **{**GPT_OSS, field: value})
    model.architectures = ["GptOssForCausalLM"]
    refused = {"rope_parameters": "rope_type"}.get(field, field)
    with pytest.raises(BackendFailed, match=rf"GptOssForCausalLM with {refused}.* the engine has it with .* alone"):
        find_family(model, "dir")


DEEPSEEK_V3 = {
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 2048}


def deepseek_v3(**fields: object) -> PretrainedConfig:
    found = config("deepseek_v3", **{**DEEPSEEK_V3, **fields})
    found.architectures = ["DeepseekV3ForCausalLM"]
    return found


def test_deepseek_v3_is_covered_with_its_latents_and_shared_experts_and_its_router_frozen() -> None:
    model = deepseek_v3(q_lora_rank=48, kv_lora_rank=40)
    numbers = check_coverage(find_family(model, "dir"), model, "dir")
    for name, outputs, inputs in (
        ("q_a_proj", 48, 64),
        ("q_b_proj", 2 * (128 + 64), 48),
        ("kv_a_proj_with_mqa", 40 + 64, 64),
        ("kv_b_proj", 2 * (128 + 128), 40),
        ("o_proj", 64, 2 * 128),
    ):
        assert LoraMatrices(name, 4, outputs, inputs) in numbers.matrices
    assert LoraMatrices("experts", 3 * 2 * 16, 32, 64) in numbers.matrices
    assert LoraMatrices("gate_proj", 3, 32, 64) in numbers.matrices  # shared experts'
    assert list(find_family(model, "dir").frozen) == ["model.layers.*.mlp.gate"]
    without = deepseek_v3(q_lora_rank=None)
    numbers = check_coverage(find_family(without, "dir"), without, "dir")
    assert LoraMatrices("q_proj", 4, 2 * (128 + 64), 64) in numbers.matrices


@pytest.mark.parametrize("mscales", [{}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_deepseek_v3_is_served_with_yarn_as_published(mscales: dict[str, float]) -> None:
    model = deepseek_v3(rope_parameters={**YARN, **mscales})
    family = find_family(model, "dir")
    # YaRN scales attention by 0.1 m ln(factor) + 1, and DeepSeek divides that of mscale by that of mscale_all_dim.
    scale, of_all = (0.1 * m * math.log(2) + 1 for m in (mscales.get("mscale", 1), mscales.get("mscale_all_dim", 0)))
    assert family.model_class.from_config(model).model.rotary_emb.attention_scaling == pytest.approx(scale / of_all)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topk_method", None),
        ("scoring_func", "softmax"),
        ("moe_layer_freq", 2),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 1),
        ("attention_bias", True),
        ("rope_interleave", False),
        ("tie_word_embeddings", True),
        ("rope_type", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        ("rope_parameters.attention_factor", {**YARN, "attention_factor": 1.0}),
        ("rope_parameters.truncate", {**YARN, "truncate": False}),
        ("rope_parameters.mscale", {**YARN, "mscale": 0.7}),
        ("max_position_embeddings", {**YARN, "factor": 1.5}),
    ],
)
def test_deepseek_v3_is_refused_by_name_where_the_engine_would_compute_otherwise(field: str, value: object) -> None:
    model = deepseek_v3(**{"rope_parameters" if isinstance(value, dict) else field: value})
    wanted = rf"DeepseekV3ForCausalLM with {re.escape(field)} .* the engine has it with .* alone"
    with pytest.raises(BackendFailed, match=wanted):
        find_family(model, "dir")


NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "moe_shared_expert_intermediate_size": 48,
    **EXPERTS,
}


def nemotron(**sizes: object) -> PretrainedConfig:
    found = config("nemotron_h", **{**NEMOTRON, **sizes})
    found.architectures = ["NemotronHForCausalLM"]
    return found


def test_nemotron_h_is_covered_with_its_router_convolutions_and_states_frozen() -> None:
    model = nemotron()
    family = find_family(model, "dir")
    numbers = check_coverage(family, model, "dir")
    values, written = 4 * 16, 2 * 8
    assert set(numbers.matrices) == {
        LoraMatrices("in_proj", 1, 2 * values + 2 * written + 4, 64),
        LoraMatrices("out_proj", 1, 64, values),
        LoraMatrices("experts", 8, 32, 64),
        LoraMatrices("experts", 8, 64, 32),
        LoraMatrices("up_proj", 1, 48, 64),
        LoraMatrices("down_proj", 1, 64, 48),
        LoraMatrices("up_proj", 1, 128, 64),
        LoraMatrices("down_proj", 1, 64, 128),
        LoraMatrices("q_proj", 1, 2 * 128, 64),
        LoraMatrices("k_proj", 1, 128, 64),
        LoraMatrices("v_proj", 1, 128, 64),
        LoraMatrices("o_proj", 1, 64, 2 * 128),
        LoraMatrices("lm_head", 1, 128, 64),
    }
    assert list(family.frozen) == ["model.layers.*.mixer.gate"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_shared_experts", 2),
        ("moe_latent_size", 16),
        ("mlp_hidden_act", "silu"),
        ("mamba_hidden_act", "gelu"),
        ("time_step_limit", (0.0, 0.5)),
        ("sliding_window", 8),
        ("tie_word_embeddings", True),
    ],
)
def test_nemotron_h_is_refused_by_name_where_engine_or_trainer_would_pass_over_its_config(
    field: str, value: object
) -> None:
    with pytest.raises(BackendFailed, match=rf"dir: NemotronHForCausalLM with {field} .* is not supported, only with"):
        find_family(nemotron(**{field: value}), "dir")


def test_nemotron_h_is_refused_if_it_is_quantised() -> None:
    model = nemotron()
    model.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(BackendFailed, match="NemotronHForCausalLM with quantization_config"):
        require_known(model, "dir")


def test_qwen2_moe_is_refused_with_windows_that_the_engine_would_ignore() -> None:
    layers = {"use_sliding_window": True, "sliding_window": 32}
    for layer_types in (None, ["full_attention"] * 2 + ["sliding_attention"] * 2):
        model = config("qwen2_moe", **EXPERTS, **layers, layer_types=layer_types)
        model.architectures = ["Qwen2MoeForCausalLM"]
        with pytest.raises(BackendFailed, match=r"dir: Qwen2MoeForCausalLM with sliding windows in some .* the engine"):
            find_family(model, "dir")
    model.layer_types = ["sliding_attention"] * 4  # which it computes
    find_family(model, "dir")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_in_some_layers_are_refused_where_the_engine_does_not_tell_layers_apart(kind: str) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 32, "num_hidden_layers": 4}
    for fields in ({"max_window_layers": 2}, {"layer_types": ["full_attention", "sliding_attention"] * 2}):
        model = config(kind, **{**windows, **fields})
        model.architectures = [f"{kind.title()}ForCausalLM"]
        with pytest.raises(BackendFailed, match=rf"dir: {kind.title()}ForCausalLM with sliding windows in some"):
            find_family(model, "dir")
    for served in ({"max_window_layers": 0}, {"max_window_layers": 4}, {"use_sliding_window": False}):
        find_family(config(kind, **{**windows, **served}), "dir")


def test_a_module_that_two_flags_train_is_refused() -> None:
    class Twice:
        """A family that names a layer under two flags."""

        def __init__(self) -> None:
            self._own = find_family(config("qwen3"), "dir")
            self.model_class, self.frozen = self._own.model_class, self._own.frozen

        def lora_modules(self, model: torch.nn.Module) -> dict[LoraFlag, list[str]]:
            found = decoder_modules(model)
            return {**found, "train_mlp": [*found["train_mlp"], found["train_attn"][0]]}

    with pytest.raises(BackendFailed, match=r"self_attn\.q_proj"):
        check_coverage(Twice(), config("qwen3"), "dir")  # type: ignore[arg-type] # as much of a family as it reads


def test_a_model_that_generates_no_text_is_refused() -> None:
    model = AutoConfig.for_model("t5")
    model.architectures = ["T5ForConditionalGeneration"]
    with pytest.raises(BackendFailed, match="dir: no model that generates text can be built of its config: "):
        check_coverage(find_family(model, "dir"), model, "dir")


BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "mxfp4"),
        ("quant_method", "compressed-tensors"),
        ("quant_method", None),
        ("weight_block_size", None),
        ("weight_block_size", [64, 128]),
        ("activation_scheme", "static"),
        ("fmt", "e5m2"),
        ("scale_fmt", "e5m3"),
    ],
)
def test_quantised_weights_are_refused_by_name_unless_in_fp8_by_blocks(field: str, value: object) -> None:
    find_family(config("qwen3", quantization_config=BLOCK_FP8), "dir")
    model = config("qwen3", quantization_config={**BLOCK_FP8, field: value})
    wanted = rf"dir: quantised weights with quantization_config\.{field} {re.escape(str(value))} are not supported: .+"
    with pytest.raises(BackendFailed, match=wanted):
        find_family(model, "dir")
