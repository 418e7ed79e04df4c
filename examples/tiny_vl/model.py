"""The shape of the model, its first weights, its processor files, and the directory that is published.

Independent of data and training.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

PATCH, MERGE = 16, 2
TOKEN_SIDE = PATCH * MERGE  # one image token covers a square of this side
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 25, 40  # 160x160 to 160x256 pixels: the scale that the tower is trained at

HIDDEN, LAYERS, HEADS, KEY_HEADS, HEAD_DIM, MLP = 256, 2, 8, 4, 32, 704
VISION_HIDDEN, VISION_DEPTH, VISION_HEADS, VISION_MLP = 224, 12, 7, 896
DEEPSTACK_LAYER = 7  # its output enters the text part beside the last layer's
POSITION_GRID = 8  # learned positions a side; the model interpolates them to the image's own grid
SHARD_SIZE = "14MB"
ROPE_THETA = 1e4
NEARNESS = (2.5, 4.0, 2.0)
"""Height of the first heads' scores where they look, by rotary frequency: the first gives the width of a peak, and
the slower ones let only one peak stand. Falls to 0 at the last layer."""

Grid = tuple[int, int]
"""Rows and columns of image tokens."""


def image_grid(height: int, width: int) -> Grid:
    """The grid into which the published processor turns an image of this size."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    least, most = MIN_IMAGE_TOKENS * TOKEN_SIDE**2, MAX_IMAGE_TOKENS * TOKEN_SIDE**2
    resized_height, resized_width = smart_resize(height, width, TOKEN_SIDE, least, most)
    return resized_height // TOKEN_SIDE, resized_width // TOKEN_SIDE


def make_config(token_ids: dict[str, int], vocab_size: int) -> Qwen3VLConfig:
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=vocab_size,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=token_ids["<|endoftext|>"],
            bos_token_id=token_ids["<|endoftext|>"],
            eos_token_id=token_ids["<|im_end|>"],
            rope_parameters=dict(
                rope_type="default",
                rope_theta=ROPE_THETA,
                mrope_section=[6, 5, 5],  # time, height, width: half of HEAD_DIM in all
                mrope_interleaved=True,
            ),
        ),
        vision_config=dict(
            depth=VISION_DEPTH,
            hidden_size=VISION_HIDDEN,
            intermediate_size=VISION_MLP,
            num_heads=VISION_HEADS,
            in_channels=3,
            patch_size=PATCH,
            spatial_merge_size=MERGE,
            temporal_patch_size=2,
            out_hidden_size=HIDDEN,
            num_position_embeddings=POSITION_GRID**2,
            deepstack_visual_indexes=[DEEPSTACK_LAYER],
        ),
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def looking_bias(heads: int, height: float, generator: torch.Generator) -> torch.Tensor:
    """First bias of queries, keys and values, by which each head looks at one patch beside its own.

    The rotary embedding turns the constant part of queries and keys, so that its score depends on the distance alone.
    A tower that starts as a convolution does learns from fewer photographs (d'Ascoli et al. 2021, ConViT).
    """
    pairs = VISION_HIDDEN // heads // 2  # the first half of them turns with the row, the second with the column
    bias = torch.zeros(3, heads, 2 * pairs)
    for head in range(heads):
        steps = torch.randint(-1, 2, (2,), generator=generator).tolist()
        for axis, step in enumerate(steps):
            for i, peak in enumerate(NEARNESS):
                frequency = ROPE_THETA ** (-2 * i / pairs)
                size = math.sqrt(peak * height * math.sqrt(2 * pairs))
                pair = axis * pairs // 2 + i
                bias[0, head, pair] = size
                bias[1, head, pair] = size * math.cos(frequency * step)
                bias[1, head, pair + pairs] = -size * math.sin(frequency * step)
    return bias.flatten()


@torch.no_grad()
def draw_weights(model: Qwen3VLForConditionalGeneration, seed: int) -> None:
    """Variance-keeping first weights. Linear layers that end a residual branch start small."""
    generator = torch.Generator().manual_seed(seed)

    def normal(weight: torch.Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            depth = VISION_DEPTH if ".visual." in name else LAYERS
            ends_branch = name.endswith((".attn.proj", ".mlp.linear_fc2", ".o_proj", ".down_proj"))
            normal(module.weight, (module.in_features * (2 * depth if ends_branch else 1)) ** -0.5)
            if module.bias is not None:
                module.bias.zero_()
    visual = model.model.visual
    normal(visual.patch_embed.proj.weight, visual.patch_embed.proj.weight[0].numel() ** -0.5)
    visual.patch_embed.proj.bias.zero_()
    for i, block in enumerate(visual.blocks):
        block.attn.qkv.bias.copy_(looking_bias(VISION_HEADS, 1 - i / (VISION_DEPTH - 1), generator))
    normal(visual.pos_embed.weight, 0.1)
    normal(model.model.language_model.embed_tokens.weight, 0.5)
    # An image token enters layer 0 without this; a weak start leaves the choice to training.
    for merger in visual.deepstack_merger_list:
        merger.linear_fc2.weight.mul_(0.1)


def make_model(tokenizer_dir: Path, seed: int) -> Qwen3VLForConditionalGeneration:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    model = Qwen3VLForConditionalGeneration(make_config(tokenizer.get_vocab(), len(tokenizer)))
    draw_weights(model, seed)
    return model


def processor_configs() -> dict[str, dict[str, object]]:
    """The two processor files of a Qwen3-VL directory, by file name."""
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "size": {
            "shortest_edge": MIN_IMAGE_TOKENS * TOKEN_SIDE**2,
            "longest_edge": MAX_IMAGE_TOKENS * TOKEN_SIDE**2,
        },
    }
    return {
        "preprocessor_config.json": common | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": common | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }


def write_model(model: Qwen3VLForConditionalGeneration, tokenizer_dir: Path, target: Path) -> int:
    """Write the whole directory in bfloat16, in files of at most SHARD_SIZE; returns its size in bytes."""
    target.mkdir(parents=True, exist_ok=True)
    for file in tokenizer_dir.iterdir():
        shutil.copy(file, target / file.name)
    for name, content in processor_configs().items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n")
    text = model.config.text_config
    config = model.config.to_dict()
    config["dtype"] = "bfloat16"
    published = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(config)).to(torch.bfloat16)
    published.load_state_dict({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()})
    published.generation_config = GenerationConfig(
        eos_token_id=[text.eos_token_id, text.pad_token_id],
        pad_token_id=text.pad_token_id,
        bos_token_id=text.bos_token_id,
    )
    published.save_pretrained(target, max_shard_size=SHARD_SIZE)
    return sum(file.stat().st_size for file in target.iterdir())
