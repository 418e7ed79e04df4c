"""Make a small vision-language model directory with random weights: a stand-in for a base model.

The weights are drawn from a fixed seed and never trained. The model knows nothing: asked about a
photograph it answers noise. It stands in until a pretrained base model is at hand, so that every part
of the server (image processing, LoRA training, checkpoints, vLLM sampling) does real work on a CPU.

The directory is a complete Hugging Face model of the class `Qwen3VLForConditionalGeneration`, which
transformers and vLLM load unchanged. What is chosen here is chosen so that a LoRA adapter on the
language model can learn from *frozen* random features:

- weights are wider than the usual 0.02, under which every image would look alike to the model;
- the patch filters are random but smooth, for photographs carry their content in low frequencies;
- residual branches of the vision tower are weak, so that a patch token still says what is at its place;
- an image becomes few tokens, so each one covers enough of the subject.

    python examples/stand_in.py DIRECTORY
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SEED = 38
STAMP_NAME = ".made-by"  # holds the digest of this file: a changed program makes the model again
PATCH, MERGE = 16, 2
TOKEN_PIXELS = (PATCH * MERGE) ** 2  # one image token covers this many pixels
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 4, 20
VOCAB_SIZE = 640  # the tokenizer's size rounded up to a multiple of 64, as Qwen pads its own

HIDDEN, LAYERS, HEADS, HEAD_DIM, MLP = 256, 2, 8, 32, 512
VISION_HIDDEN, VISION_DEPTH, VISION_HEADS, VISION_MLP = 96, 1, 4, 192
POSITION_GRID = 8  # learned positions a side; the model interpolates them to the image's own grid

FILTER_GRID = 5  # a patch filter is this many random values a side, blown up to PATCH: smooth
VISION_RESIDUAL_GAIN = 0.3
POSITION_STD = 0.5
MERGER_GAIN = 2.0  # drives the merger's GELU into its bend: random nonlinear features
# Small token embeddings and strong attention values let the image, not the token itself, rule the residual
# stream at the answer. With the opposite choice the loss stays on a plateau for the first hundred steps.
EMBED_STD = 0.3
VALUE_GAIN = 2.0
TEXT_RESIDUAL_GAIN = 1.0
QUERY_NORM = 0.3  # Qwen3 normalises queries and keys; at weight 1 random attention looks at one token only
HEAD_GAIN = 1.0

# Qwen's special tokens in Qwen's order; the flag says whether decoding may skip the token.
QWEN_TOKENS = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' or 'image' in item or 'image_url' in item -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif item.type == 'video' or 'video' in item -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in item -%}
{{- item.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()
CORPUS = """
What is the name of the subject in this photo? The subject in this photo is: a picture of one thing.
system user assistant tool. You are a helpful assistant. Answer the question about the image.
airplanes, bonsai, car side, chandelier, faces easy, hawksbill, ketch, leopards, motorbikes, watch.
What do you see here? I can see a small red car on the side of the road, and there are two people
with a dog in front of the house. How many of them are there? There are three. Which colour has the
square? The square is red, green, blue, yellow, black or white; the circle is to the left of it.
Describe the photograph in one short sentence. It shows the water, the sky and some trees at night.
The answer is yes, the other answer would be no. Please think about it first, then give your answer.
1 2 3 4 5 6 7 8 9 10 11 12 20 30 100
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over CORPUS: spells any text, and the words above in one or a few tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(QWEN_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS.strip().splitlines(), trainer)
    bpe.add_tokens([AddedToken(t, special=s, normalized=False) for t, s in QWEN_TOKENS.items()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t, special in QWEN_TOKENS.items() if special],
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(token_ids: dict[str, int]) -> Qwen3VLConfig:
    config = Qwen3VLConfig(
        text_config=dict(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=token_ids["<|endoftext|>"],
            bos_token_id=token_ids["<|endoftext|>"],
            eos_token_id=token_ids["<|im_end|>"],
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
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
            deepstack_visual_indexes=[0],
        ),
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


@torch.no_grad()
def draw_weights(model: Qwen3VLForConditionalGeneration) -> None:
    """Replace the default initialisation. Norm weights stay one, biases zero."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(weight: torch.Tensor, std: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def linear(layer: nn.Linear, gain: float = 1.0) -> None:
        normal(layer.weight, gain * layer.in_features**-0.5)
        if layer.bias is not None:
            layer.bias.zero_()

    visual = model.model.visual
    filters = torch.randn(VISION_HIDDEN * 3, 1, FILTER_GRID, FILTER_GRID, generator=generator)
    filters = nn.functional.interpolate(filters, size=(PATCH, PATCH), mode="bilinear", align_corners=True)
    filters = filters.view(VISION_HIDDEN, 3, 1, PATCH, PATCH)
    filters = filters / filters.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
    # Pixels are in -1..1 and a still image fills both time slots: this makes the outputs of order one.
    visual.patch_embed.proj.weight.copy_((filters / PATCH).expand_as(visual.patch_embed.proj.weight))
    visual.patch_embed.proj.bias.zero_()
    normal(visual.pos_embed.weight, POSITION_STD)
    for block in visual.blocks:
        linear(block.attn.qkv)
        linear(block.attn.proj, VISION_RESIDUAL_GAIN)
        linear(block.mlp.linear_fc1)
        linear(block.mlp.linear_fc2, VISION_RESIDUAL_GAIN)
    for merger in [visual.merger, *visual.deepstack_merger_list]:
        linear(merger.linear_fc1, MERGER_GAIN)
        linear(merger.linear_fc2)
        # GELU outputs have a positive mean that is the same for every image: rows summing to zero drop it.
        merger.linear_fc2.weight -= merger.linear_fc2.weight.mean(dim=1, keepdim=True)

    language = model.model.language_model
    normal(language.embed_tokens.weight, EMBED_STD)
    for layer in language.layers:
        linear(layer.self_attn.q_proj)
        layer.self_attn.q_norm.weight.fill_(QUERY_NORM)
        linear(layer.self_attn.k_proj)
        linear(layer.self_attn.v_proj, VALUE_GAIN)
        linear(layer.self_attn.o_proj, TEXT_RESIDUAL_GAIN)
        linear(layer.mlp.gate_proj)
        linear(layer.mlp.up_proj)
        linear(layer.mlp.down_proj, TEXT_RESIDUAL_GAIN)
    linear(model.lm_head, HEAD_GAIN)


def processor_configs() -> dict[str, dict[str, object]]:
    """The two processor files of a Qwen3-VL directory, by file name."""
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    size = {
        "shortest_edge": MIN_IMAGE_TOKENS * TOKEN_PIXELS,
        "longest_edge": MAX_IMAGE_TOKENS * TOKEN_PIXELS,
    }
    return {
        "preprocessor_config.json": common | {"size": size, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": common | {"size": size, "video_processor_type": "Qwen3VLVideoProcessor"},
    }


def write_model(directory: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in QWEN_TOKENS}
    with torch.random.fork_rng(devices=[]):
        model = Qwen3VLForConditionalGeneration(make_config(token_ids))
    draw_weights(model)
    model.generation_config = GenerationConfig(
        eos_token_id=[token_ids["<|im_end|>"], token_ids["<|endoftext|>"]],
        pad_token_id=token_ids["<|endoftext|>"],
        bos_token_id=token_ids["<|endoftext|>"],
    )
    model.save_pretrained(directory)
    for name, content in processor_configs().items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def make_stand_in(directory: Path) -> Path:
    """Write the model to `directory` unless this same program has written it there; returns `directory`."""
    stamp = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp_file = directory / STAMP_NAME
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return directory
    if directory.exists() and not stamp_file.is_file():
        raise FileExistsError(f"{directory} exists and is not a stand-in model")
    aside = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        write_model(aside)
        (aside / STAMP_NAME).write_text(stamp)
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


if __name__ == "__main__":
    print(make_stand_in(Path(sys.argv[1])))
