"""Tiny random models as complete Hugging Face directories, made in a second.

The usual initialisation of 0.02 gives near-flat log probabilities, on which a parity test proves
nothing: here they range over about -9 .. -2.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
INTERNVL_SPECIALS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
GEMMA_SPECIALS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
CONTEXT = 4096
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{%- for part in message.content or [] %}
{%- if part.type == 'image' %}{{ 'IMAGE' }}
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""In the manner of those that take images and call tools."""
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}

VISION = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    in_channels=3,
    patch_size=16,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=64,
    num_position_embeddings=256,
    deepstack_visual_indexes=[0, 1],
)


def make_tiny_vl(
    directory: Path, *, tie: bool = False, moe: bool = False, heads: tuple[int, int] = (2, 1), seed: int = 0
) -> Path:
    """A Qwen3-VL of 0.3 M parameters; `tie`: its head shares the embeddings' weight; `moe`: with experts; `heads` are
    those of queries and of keys."""
    tokenizer, ids = _tokenizer(directory)
    text_config = dict(
        _text_sizes(tokenizer, ids, tie) | {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]},
        **(EXPERTS if moe else {}),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    )
    config = (Qwen3VLMoeConfig if moe else Qwen3VLConfig)(
        text_config=text_config,
        vision_config=VISION,
        **_token_ids(ids),
        tie_word_embeddings=tie,
    )
    kind = Qwen3VLMoeForConditionalGeneration if moe else Qwen3VLForConditionalGeneration
    _save(kind, config, directory, ids, seed)
    if moe:
        transpose_experts(directory)
    _write_processor(directory)
    return directory


def make_tiny_qwen3_5(directory: Path, *, moe: bool = False, seed: int = 0, **sizes: object) -> Path:
    """A Qwen3.5: a layer of linear attention, then one of full attention; `moe`: with experts, one of them shared."""
    tokenizer, ids = _tokenizer(directory)
    text_config: dict[str, object] = {
        **_text_sizes(tokenizer, ids, False),
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        **({**EXPERTS, "shared_expert_intermediate_size": 32} if moe else {}),
        **sizes,
    }
    vision_config = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}
    vision_config["out_hidden_size"] = text_config["hidden_size"]
    config = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(
        text_config=text_config,
        vision_config=vision_config,
        **_token_ids(ids),
    )
    kind = Qwen3_5MoeForConditionalGeneration if moe else Qwen3_5ForConditionalGeneration
    _save(kind, config, directory, ids, seed)
    _write_processor(directory)
    return directory


def make_tiny_qwen2_5_vl(directory: Path, *, seed: int = 0) -> Path:
    """A Qwen2.5-VL: the first layer of its tower looks at windows of 56 x 56 pixels, the second at the whole image."""
    tokenizer, ids = _tokenizer(directory)
    config = Qwen2_5_VLConfig(
        text_config=dict(
            _text_sizes(tokenizer, ids, False),
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        ),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            in_channels=3,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            tokens_per_second=2,
            window_size=56,
            fullatt_block_indexes=[1],
            out_hidden_size=64,
        ),
        **_token_ids(ids),
        tie_word_embeddings=False,
    )
    _save(Qwen2_5_VLForConditionalGeneration, config, directory, ids, seed)
    _write_processor(directory, patch_size=14, processor_class="Qwen2_5_VLProcessor")
    return directory


def make_tiny_internvl(directory: Path, *, seed: int = 0) -> Path:
    """An InternVL: up to six tiles of 32 x 32 pixels and a seventh of the whole image, four tokens each."""
    tokenizer, ids = _tokenizer(directory, INTERNVL_SPECIALS, "<IMG_CONTEXT>")
    config = InternVLConfig(
        text_config=dict(_text_sizes(tokenizer, ids, False), model_type="qwen2"),
        vision_config=dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            attention_bias=True,
            image_size=[32, 32],
            patch_size=[8, 8],
        ),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    _save(InternVLForConditionalGeneration, config, directory, ids, seed)
    image_processor = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 32, "width": 32},
        "crop_to_patches": False,
        "max_patches": 6,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "processor_class": "InternVLProcessor",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"image_seq_length": 4, "processor_class": "InternVLProcessor"}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def make_tiny_smolvlm(directory: Path, *, first: bool = False, seed: int = 0) -> Path:
    """A SmolVLM2, or the `first` SmolVLM: tiles of 32 x 32 pixels, four tokens each; images are made 96 pixels long."""
    marks = ["<fake_token_around_image>", "<global-img>", "<image>", "<video>", "<end_of_utterance>"]
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    tokenizer, ids = _tokenizer(directory, {name: name for name in [*marks, *places]}, "<image>")
    name = "Idefics3" if first else "SmolVLM"
    config = (Idefics3Config if first else SmolVLMConfig)(
        text_config=dict(_text_sizes(tokenizer, ids, False), model_type="llama"),
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        ),
        scale_factor=2,
        image_token_id=ids["<image>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=False,
    )
    kind = Idefics3ForConditionalGeneration if first else SmolVLMForConditionalGeneration
    _save(kind, config, directory, ids, seed)
    image_processor = {
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"longest_edge": 96},
        "max_image_size": {"longest_edge": 32},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": f"{name}Processor",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"image_seq_len": 4, "processor_class": f"{name}Processor"}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def make_tiny_gemma3(directory: Path, *, seed: int = 0, **changes: int) -> Path:
    """A Gemma 3 with images of 64 x 64 pixels, 16 features each: a layer with a window, then one without, and a tied
    head. `changes` of its config."""
    tokenizer, ids = _tokenizer(directory, GEMMA_SPECIALS, "<start_of_image>", ["\n" * count for count in range(1, 5)])
    config = Gemma3Config(
        text_config=dict(
            _text_sizes(tokenizer, ids, True),
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=20,
            query_pre_attn_scalar=32,
        ),
        vision_config=dict(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=64,
            patch_size=8,
            vision_use_head=False,
        ),
        **{"mm_tokens_per_image": 16, **changes},
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        tie_word_embeddings=True,
    )
    _save(Gemma3ForConditionalGeneration, config, directory, ids, seed)
    (path,) = directory.glob("*.safetensors")
    # As in the published files: transformers leaves a part of the tower's names out, without which no engine loads it.
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    image_processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 64, "width": 64},
        "do_pan_and_scan": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Gemma3Processor",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor))
    processor = {"image_seq_length": config.mm_tokens_per_image, "processor_class": "Gemma3Processor"}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def _write_processor(directory: Path, patch_size: int = 16, processor_class: str = "Qwen3VLProcessor") -> None:
    processor = {
        "size": {"longest_edge": 16777216, "shortest_edge": 4 * patch_size**2},
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": processor_class,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    video = {key: value for key, value in processor.items() if key != "image_processor_type"}
    video |= {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def transpose_experts(directory: Path) -> None:
    """Files of Qwen3-VL MoE hold inputs before outputs; transformers transposes them only when it loads."""
    for path in directory.glob("*.safetensors"):
        tensors = {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, {"format": "pt"})


def make_tiny_text(directory: Path, *, seed: int = 0) -> Path:
    """A text-only Qwen3 of the same size."""
    tokenizer, ids = _tokenizer(directory)
    _save(Qwen3ForCausalLM, Qwen3Config(**_text_sizes(tokenizer, ids, False)), directory, ids, seed)
    return directory


def make_tiny_of(kind: str, directory: Path, *, seed: int = 0, **sizes: object) -> Path:
    """A text-only decoder of another kind, as transformers names its config."""
    tokenizer, ids = _tokenizer(directory)
    config = AutoConfig.for_model(kind, **{**_text_sizes(tokenizer, ids, False), **sizes})
    _save(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, directory, ids, seed)
    return directory


def make_tiny_moe(directory: Path, *, dense_layers: Sequence[int] = (0,), seed: int = 0) -> Path:
    """A text-only Qwen3 with experts, but for the layers that have none."""
    tokenizer, ids = _tokenizer(directory)
    config = Qwen3MoeConfig(**_text_sizes(tokenizer, ids, False), **EXPERTS, mlp_only_layers=list(dense_layers))
    _save(Qwen3MoeForCausalLM, config, directory, ids, seed)
    return directory


def make_wide_moe(directory: Path) -> Path:
    """A Qwen3 MoE of 8 layers with 32 experts, 4 for a token, and weights that keep the size of what passes them: in
    bfloat16, rounding sends a tenth of its tokens to other experts."""
    tokenizer, ids = _tokenizer(directory)
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
    experts = {**EXPERTS, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**{**_text_sizes(tokenizer, ids, False), **sizes, **experts, "mlp_only_layers": []})
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def make_tiny_qwen3_next(directory: Path, *, seed: int = 0) -> Path:
    """A Qwen3-Next: a layer of linear attention, then one of full attention, both with experts, one of them shared."""
    return make_tiny_of(
        "qwen3_next",
        directory,
        seed=seed,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        partial_rotary_factor=0.5,
        shared_expert_intermediate_size=32,
        **EXPERTS,
    )


def make_tiny_nemotron_h(directory: Path, *, moe: bool = True, seed: int = 0) -> Path:
    """A Nemotron-H: two Mamba2 layers, attention without rotation, an MLP, and one layer of experts if `moe`, whose
    router's correction changes its choice. Time steps and decays are of every size, and biases are not 0."""
    kinds = ["linear_attention", "moe" if moe else "mlp", "full_attention", "mlp", "linear_attention"]
    make_tiny_of(
        "nemotron_h",
        directory,
        seed=seed,
        layers_block_type=kinds,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=32,
        routed_scaling_factor=2.5,
        time_step_min=1e-9,  # transformers has no shorter steps, the engine has
    )
    (path,) = directory.glob("*.safetensors")
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(("A_log", "dt_bias")):
            tensor.uniform_(-1.5, 1.0, generator=generator)
        elif name.endswith((".D", "conv1d.bias")):
            tensor.normal_(0, 0.5, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            tensor.normal_(0, 0.2, generator=generator)
        elif ".experts." in name:  # they were made as one tensor, and small
            tensor.normal_(0, 0.7 * tensor.shape[-1] ** -0.5, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return directory


def make_tiny_gpt_oss(directory: Path, *, seed: int = 0, sliding_window: int = 8, **sizes: object) -> Path:
    """A gpt-oss: a layer with a window, then one without, sinks as large as scores, and biases."""
    make_tiny_of(
        "gpt_oss",
        directory,
        seed=seed,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=sliding_window,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        # Within the original length too, yarn makes queries and keys larger.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": CONTEXT // 4,
        },
        **sizes,
    )
    (path,) = directory.glob("*.safetensors")
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "bias" in name or "sinks" in name:
            tensor.normal_(0, 1.0 if "sinks" in name else 0.3, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return directory


LATENTS: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
"""Sizes of a DeepSeek-V3 of which vLLM's kernels take latents."""


def make_tiny_deepseek_v3(directory: Path, *, seed: int = 0, **sizes: object) -> Path:
    """A DeepSeek-V3: a layer without experts, then one with four groups of them. Values are narrower than keys, what
    corrects the router's scores is as large as these, and an epsilon is as large as what its norms take."""
    settings = {
        "rms_norm_eps": 0.1,
        "num_key_value_heads": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "head_dim": 16,  # which transformers takes for the rotated part
        "v_head_dim": 40,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": CONTEXT // 4,
        },
    }
    make_tiny_of("deepseek_v3", directory, seed=seed, **{**settings, **sizes})
    (path,) = directory.glob("*.safetensors")
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(0, 0.5, generator=generator)
        elif name.endswith("a_layernorm.weight"):
            tensor.normal_(1, 0.3, generator=generator)
    save_file(tensors, path, {"format": "pt"})
    return directory


def quantise(directory: Path, quantised: Path) -> None:
    """Make of a gpt-oss one whose experts are in MXFP4, and write what these are into the first one's files: by
    transformers' own conversion."""
    shutil.copytree(directory, quantised)
    (path,) = directory.glob("*.safetensors")
    tensors, generator = load_file(path), torch.Generator().manual_seed(1)
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, inputs, outputs = tensor.shape
            shape = (num_experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales).to(tensor.dtype).contiguous()
    save_file(tensors, path, {"format": "pt"})
    save_file(packed, quantised / path.name, {"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (quantised / "config.json").write_text(json.dumps(config))


_NOT_IN_FP8 = (
    *("mlp.gate", "mlp.shared_expert_gate", "conv1d"),
    *("linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba"),
)
"""Modules that are not quantised in what is published."""


def quantise_in_blocks(directory: Path, quantised: Path, powers_of_two: torch.dtype | None = None) -> Path:
    """Make of a model one in fp8 as published, block by block and expert by expert, and write what its numbers are into
    the first one's files. Routers, gates of linear attention, the head, the tower and the first layer's keys stay as
    they are. `powers_of_two`: the type of scales that are such, as those of DeepSeek-V3.1."""

    def step(largest: torch.Tensor) -> torch.Tensor:
        found = (largest / 440).bfloat16()
        return found if powers_of_two is None else found.float().log2().ceil().exp2()

    others: dict[str, object] = {} if powers_of_two is None else {"scale_fmt": "ue8m0"}
    kept = ["lm_head", "model.visual", "model.layers.0.self_attn.k_proj"]
    tensors = _write_in_blocks(directory, quantised, step, powers_of_two or torch.bfloat16, kept)
    _change_quantization(quantised, others)
    (path,) = directory.glob("*.safetensors")
    save_file(tensors, path, {"format": "pt"})
    return quantised


def publish_in_fp8(directory: Path, quantised: Path) -> Path:
    """Make of a model one in fp8 as published, whose blocks have scales in float32 that use all of fp8's range."""

    def step(largest: torch.Tensor) -> torch.Tensor:
        return largest.float() / 448 if largest > 0 else torch.ones(())

    _write_in_blocks(directory, quantised, step, torch.float32, ["lm_head", "model.visual"])
    return quantised


def _write_in_blocks(
    directory: Path,
    quantised: Path,
    step_of: Callable[[torch.Tensor], torch.Tensor],
    scale_dtype: torch.dtype,
    kept: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Write a model's files in fp8, and return its tensors with the numbers that those have. `step_of` gives the scale
    for a block's largest number; the modules `kept` stay as they are."""
    shutil.copytree(directory, quantised)
    (path,) = directory.glob("*.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    tensors, packed = load_file(path), {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if ".layers." not in name or tensor.dim() < 2 or module in kept or module.endswith(_NOT_IN_FP8):
            packed[name] = tensor
            continue
        for matrix_name, matrix in _matrices(name, tensor, inputs_first=config["model_type"] == "qwen3_vl_moe"):
            rows, columns = matrix.shape
            weight = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
            scale = torch.empty(-(-rows // 128), -(-columns // 128), dtype=scale_dtype)
            for row in range(0, rows, 128):
                for column in range(0, columns, 128):
                    block = (slice(row, row + 128), slice(column, column + 128))
                    step = step_of(matrix[block].abs().amax())
                    weight[block] = (matrix[block].float() / step).to(torch.float8_e4m3fn)
                    scale[row // 128, column // 128] = step
                    matrix[block] = weight[block].float() * step.float()
            packed |= {matrix_name: weight, f"{matrix_name}_scale_inv": scale}
    save_file(packed, quantised / path.name, {"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }
    (quantised / "config.json").write_text(json.dumps(config))
    return tensors


def _change_quantization(directory: Path, changes: Mapping[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


def _matrices(name: str, tensor: torch.Tensor, *, inputs_first: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of a tensor's matrices, those of a stack of experts one by one, with the names that they have alone."""
    if tensor.dim() == 2:
        yield name, tensor
        return
    experts, _, last = name.rpartition(".")
    for number, one in enumerate(tensor.mT if inputs_first else tensor):
        parts = zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if last == "gate_up_proj" else [(last, one)]
        for part, matrix in parts:
            yield f"{experts}.{number}.{part}.weight", matrix


def _token_ids(ids: dict[str, int]) -> dict[str, int]:
    """Placeholder tokens of images, as a config names them."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in names.items()}


def _text_sizes(tokenizer: PreTrainedTokenizerFast, ids: dict[str, int], tie: bool) -> dict[str, object]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,  # padded above the tokenizer's, as Qwen does
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tie,
        "pad_token_id": ids["<|endoftext|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }


def _tokenizer(
    directory: Path,
    named: Mapping[str, str] | None = None,
    image: str = "<|vision_start|><|image_pad|><|vision_end|>",
    texts: Sequence[str] = (),
) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """`named`: further tokens, by the names that a processor knows; `image`: what the chat template has for one;
    `texts`: such as are always one token."""
    specials = [*SPECIALS, *(named or {}).values()]
    directory.mkdir(parents=True, exist_ok=True)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    corpus = ["hello world, this is a small corpus for a tiny tokenizer. user assistant system image what"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=384, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    raw.add_tokens([AddedToken(one, normalized=False) for one in texts])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named or SPECIALS[1:],
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", image)
    tokenizer.save_pretrained(directory)
    return tokenizer, {token: tokenizer.convert_tokens_to_ids(token) for token in specials}


def _save(
    kind: type[PreTrainedModel], config: PreTrainedConfig, directory: Path, ids: dict[str, int], seed: int
) -> None:
    config.architectures = [kind.__name__]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    # Recurrences and squares blow rounding up: beyond 1e-4 nats in float32, were their inputs as wide.
                    width = 0.6 if "linear_attn" in name or "mixer" in name else 1.2
                    parameter.normal_(0, 0.5 if "pos_embed" in name else width / parameter[0].numel() ** 0.5)
    model.generation_config = GenerationConfig(
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=ids["<|endoftext|>"]
    )
    model.save_pretrained(directory)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "Llama": partial(make_tiny_of, "llama"),
    "Mistral": partial(make_tiny_of, "mistral", sliding_window=8),
    # As many tokens as the published ones: vLLM's own limit for adapters is below.
    "Gemma 3": partial(make_tiny_of, "gemma3_text", sliding_window=8, query_pre_attn_scalar=32, vocab_size=262208),
    "Gemma 2": partial(
        make_tiny_of,
        "gemma2",
        sliding_window=8,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,  # which the engine takes for granted
    ),
    "Granite": partial(
        make_tiny_of,
        "granite",
        logits_scaling=2.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "gpt-oss": make_tiny_gpt_oss,
    "DeepSeek-V3": make_tiny_deepseek_v3,
    "Qwen3 MoE": make_tiny_moe,
    "Qwen3-Next": make_tiny_qwen3_next,
    "Qwen2 MoE": partial(
        make_tiny_of,
        "qwen2_moe",
        **{**EXPERTS, "norm_topk_prob": False},
        shared_expert_intermediate_size=32,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention"] * 2,
    ),
    "Mixtral": partial(make_tiny_of, "mixtral", num_local_experts=8, num_experts_per_tok=3),
    "Qwen3-VL MoE": lambda directory: make_tiny_vl(directory, moe=True),
    "Qwen2.5-VL": make_tiny_qwen2_5_vl,
    "InternVL": make_tiny_internvl,
    "SmolVLM2": make_tiny_smolvlm,
    "Nemotron-H": partial(make_tiny_nemotron_h, moe=False),
    "Nemotron-3": make_tiny_nemotron_h,
    "Gemma 3 with images": make_tiny_gemma3,
    "Qwen3.5": make_tiny_qwen3_5,
    "Qwen3.5 MoE": lambda directory: make_tiny_qwen3_5(directory, moe=True),
}
"""A tiny one of every family that is served."""
DIVIDED: dict[str, tuple[Callable[[Path], Path], int]] = {
    "gpt-oss": (partial(make_tiny_gpt_oss, num_key_value_heads=2), 2),
    "DeepSeek-V3": (make_tiny_deepseek_v3, 2),
    "Qwen3-Next": (make_tiny_qwen3_next, 2),
    "Qwen3-VL MoE": (partial(make_tiny_vl, moe=True), 2),
    "Qwen3-VL MoE, heads of keys repeated": (partial(make_tiny_vl, moe=True, heads=(4, 2)), 4),
    "Nemotron-3": (make_tiny_nemotron_h, 2),
    "Gemma 3 with images": (make_tiny_gemma3, 2),
    "Qwen3.5 MoE": (partial(make_tiny_qwen3_5, moe=True, linear_num_key_heads=2, linear_num_value_heads=4), 2),
}
"""Models that an engine's ranks divide, each in its own way, and the number of ranks."""
_WHOLE_BLOCKS: dict[str, Any] = {**EXPERTS, "moe_intermediate_size": 256}
_PARTS_OF_BLOCKS: dict[str, Any] = {
    **EXPERTS,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
}
DIVIDED_IN_FP8: dict[str, tuple[Callable[[Path], Path], int]] = {
    "Qwen3 MoE": (partial(make_tiny_of, "qwen3_moe", **_WHOLE_BLOCKS, mlp_only_layers=[0]), 2),
    "Qwen3 MoE, parts of blocks": (partial(make_tiny_of, "qwen3_moe", **_PARTS_OF_BLOCKS), 4),
    "Qwen3.5 MoE": (
        partial(make_tiny_qwen3_5, moe=True, linear_num_key_heads=2, linear_num_value_heads=4, **_WHOLE_BLOCKS),
        2,
    ),
    "DeepSeek-V3": (
        partial(make_tiny_deepseek_v3, qk_nope_head_dim=64, qk_rope_head_dim=64, head_dim=64, v_head_dim=64),
        2,
    ),
}
"""Mixtures that an engine's ranks divide in fp8, and the number of ranks."""
