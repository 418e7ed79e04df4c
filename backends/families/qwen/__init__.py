"""Qwen3-VL, Qwen3.5 and Qwen2.5-VL, which take images alike.

`pictures` has their image processor, `grids` what their towers derive from the sizes of images.

T tokens, P patches, D values of a patch, N tokens of an image, H hidden width of the language model, E width of the
tower, A width of a head of the tower
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from tinker_server.backends.families.family import (
    EngineField,
    ImageFeatures,
    ImageSpan,
    LoraFlag,
    RenderedImage,
    TowerLora,
)
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.families.qwen.grids import Grids
from tinker_server.backends.families.qwen.pictures import PictureProcessor
from tinker_server.backends.families.tower_patches import tower_patch
from tinker_server.backends.kernels.pinned_copy import to_device

WITH_TAPS = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
"""Architectures whose first decoder layers add features of the vision tower's layers."""
WITH_LINEAR_ATTENTION = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = (*WITH_TAPS, *WITH_LINEAR_ATTENTION, "Qwen2_5_VLForConditionalGeneration")
TOWER = "model.visual"
GATES = ("gate", "shared_expert_gate")
"""Routers, and the gate of the expert that all tokens share."""


class Qwen3VL:
    """`Family` of Qwen2.5-VL and of the Qwen3-VL and Qwen3.5 models, dense and mixtures of experts: text and images;
    no video."""

    model_class: type[_BaseAutoModelClass] = AutoModelForImageTextToText
    sees_whole_images = has_state_space = has_latent_attention = False
    repeats_key_heads, unshared = True, None
    frozen: Sequence[str] = (TOWER, *(f"model.language_model.layers.*.mlp.{gate}" for gate in GATES))

    def __init__(self, config: PretrainedConfig, source: str) -> None:
        """`source` is the model's directory. Raises BackendFailed if it has no image processor."""
        self.has_linear_attention = self.needs_bfloat16_on_cpu = config.architectures[0] in WITH_LINEAR_ATTENTION
        self.vision = Qwen3VLVision(source, config)
        self.placeholders: Mapping[int, str] = {
            config.image_token_id: "<|image_pad|>",
            config.video_token_id: "<|video_pad|>",
        }

    def attention(self, decoder: str) -> dict[str, str]:
        """Images are sequences without a mask: the vision tower always uses SDPA."""
        return {"text_config": decoder, "vision_config": "sdpa"}

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """Return [4, 1, T] int64: the position in the text, then time, height and width.

        transformers builds the mask between packed samples from index 0. Without it samples attend to each other, and
        no error is raised.
        """
        positions_41T = np.empty((4, 1, length), np.int64)
        positions_41T[0] = np.arange(length)
        positions_41T[1:, 0] = mrope_positions(length, spans)
        return positions_41T

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """Return the decoder's attention, MLP and experts, and the head; vision tower and routers are frozen."""
        return decoder_modules(model, experts=True, linear_attention=True)


class Qwen3VLVision:
    """`Vision`: an image is a placeholder per merged patch."""

    is_divided = False
    engine_fields: Mapping[str, EngineField] = {
        "pixel_values": EngineField(),
        "image_grid_thw": EngineField(one_row_each=True, stays_on_cpu=True),
    }

    def __init__(self, source: str, config: PretrainedConfig) -> None:
        self._processor = PictureProcessor(source)
        self.normalise = self._processor.normalise
        self.placeholder_id = self.feature_id = config.image_token_id
        self._has_taps = config.architectures[0] in WITH_TAPS
        # The embedding of patches is a convolution whose name ends as attention's own projection does.
        projections = [f"visual.blocks.{layer}.attn.proj" for layer in range(config.vision_config.depth)]
        linears = (
            "qkv",
            "gate_up_proj",
            "down_proj",
            "linear_fc1",
            "linear_fc2",
            "visual.merger.mlp.0",
            "visual.merger.mlp.2",
        )
        self.lora = TowerLora(TOWER, (f"{TOWER}.patch_embed",), (*linears, *projections))

    def engine_options(self, max_images: int) -> dict[str, object]:
        """Switch normalising off: pixels come normalised, and the engine would do it again."""
        return {
            "mm_device_do_normalize": False,
            "limit_mm_per_prompt": {"image": max_images, "video": 0},
        }

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return merged patches in each direction, by the processor's own resize rule."""
        side, limits = self._processor.side, self._processor.own.size
        resized = smart_resize(height, width, side, limits["shortest_edge"], limits["longest_edge"])
        return resized[0] // side, resized[1] // side

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return a token per merged patch."""
        return grid[0] * grid[1]

    def image_ids(self, span: ImageSpan) -> np.ndarray:
        """Implement `Vision.image_ids`."""
        return np.full(span.num_tokens, self.placeholder_id)

    def process(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Process as `PictureProcessor` does."""
        return self._processor(rgb)

    def size_bytes(self, grid: tuple[int, int]) -> int:
        """Return the bytes of three channels."""
        return self.num_tokens(grid) * self._processor.side**2 * 3

    def sizes_of_image(self, span: ImageSpan) -> dict[str, Tensor]:
        """Return image_grid_thw [1, 3]."""
        merge: int = self._processor.own.merge_size
        return {"image_grid_thw": torch.tensor([[1, span.grid[0] * merge, span.grid[1] * merge]])}

    def tower(self, model: PreTrainedModel, dtype: torch.dtype) -> "Qwen3VLTower":
        """Return tower and merger; in Qwen3-VL with the taps that deepstack adds to the first decoder layers."""
        return Qwen3VLTower(model, self._processor, dtype, has_taps=self._has_taps)


class Qwen3VLTower:
    """`VisionTower`; an image's features are its tokens and, in Qwen3-VL, a tap for each of the first decoder
    layers."""

    def __init__(
        self, model: PreTrainedModel, processor: PictureProcessor, dtype: torch.dtype, *, has_taps: bool
    ) -> None:
        """`model` is the module whose forward calls its own get_image_features; it takes pixels of `dtype`."""
        self._run = model.get_image_features
        self._processor, self._dtype = processor, dtype
        self._grids = Grids(model.visual)
        self._embedding = model.visual.patch_embed.proj
        embed = model.visual.patch_embed
        tower_patch(embed, "forward").replace(self._embed, on=embed)
        _use_varlen(model.visual)
        self._has_taps = has_taps
        self._output: Callable[..., object]
        self._splits_taps: bool

    def compute(self, images: Sequence[RenderedImage], device: torch.device) -> list[ImageFeatures]:
        """Compute all images in a single call of the tower."""
        pictures = [to_device(image.tensors["pixel_values"], device) for image in images]
        bytes_PD = torch.cat([self._processor.cut(picture_HW3) for picture_HW3 in pictures])
        pixels_PD = self._processor.normalise_patches(bytes_PD, self._dtype)
        # Nothing before the tower requires a gradient, and backward ends before the first thing that does.
        pixels_PD.requires_grad_(torch.is_grad_enabled())
        grids_N3 = _sizes(images)
        output = self._run(pixels_PD, grids_N3, return_dict=True, **self._grids.find(grids_N3, device))
        self._output = type(output)
        # transformers splits the taps by image since 5.18; before, they are one tensor.
        taps = output.deepstack_features if self._has_taps else []
        self._splits_taps = not any(isinstance(tap, Tensor) for tap in taps)
        counts = [len(tokens) for tokens in output.pooler_output]
        parts = [tap.split(counts) if isinstance(tap, Tensor) else tap for tap in taps]
        # Clones: slices would keep the whole batch's memory alive.
        of_image = zip(output.pooler_output, *parts, strict=True)
        return [tuple(part.clone() for part in features) for features in of_image]

    def _embed(self, pixels_PD: Tensor) -> Tensor:
        """Return [P, E]: each patch is embedded alone, so its convolution is a product.

        As nn.Conv3d on a GPU, it takes nine tenths of the whole tower's time.
        """
        weight_ED = self._embedding.weight.flatten(1)
        return F.linear(pixels_PD.to(weight_ED.dtype), weight_ED, self._embedding.bias)

    def announce(self, images: Sequence[RenderedImage], device: torch.device) -> dict[str, Tensor]:
        """Return empty pixels, which only say that there are images, and the real grids."""
        return {"pixel_values": torch.empty(0, device=device), "image_grid_thw": to_device(_sizes(images), device)}

    def output(self, features: Sequence[ImageFeatures]) -> object:
        """Return features in the form that `compute` got from the model."""
        tokens = tuple(feature[0] for feature in features)
        if not self._has_taps:
            return self._output(pooler_output=tokens)
        taps = [list(tap) for tap in zip(*(feature[1:] for feature in features), strict=True)]
        split = taps if self._splits_taps else [torch.cat(tap) for tap in taps]
        return self._output(pooler_output=tokens, deepstack_features=split)


def _sizes(images: Sequence[RenderedImage]) -> Tensor:
    """Return [images, 3]: frames, rows and columns of patches."""
    return torch.cat([image.tensors["image_grid_thw"] for image in images])


def mrope_positions(length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
    """Return [3, T] temporal, height and width positions of an input (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Equals transformers' `get_rope_index`, but goes by spans: two images with no text between them stay two images.
    """
    positions_3T = np.empty((3, length), dtype=np.int64)
    token, position = 0, 0
    for span in spans:
        text = span.offset - token
        positions_3T[:, token : span.offset] = np.arange(position, position + text)
        position += text
        grid_h, grid_w = span.grid
        token = span.offset + span.num_tokens
        image = positions_3T[:, span.offset : token]
        image[0] = position
        image[1] = position + np.repeat(np.arange(grid_h), grid_w)
        image[2] = position + np.tile(np.arange(grid_w), grid_h)
        position += max(grid_h, grid_w)
    positions_3T[:, token:] = np.arange(position, position + length - token)
    return positions_3T


def _use_varlen(tower: PreTrainedModel) -> None:
    """On CUDA in 16 bits, make a tower's layers attend in all images at once, whatever their sizes: FlashAttention 2
    (arXiv:2307.08691), not causal.

    In transformers each image, or each window of one, is a call of SDPA of its own in every layer, and the rotation of
    queries and keys twelve more: a third of a tower's time.
    """
    weight = next(tower.parameters())
    if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
        for block in tower.blocks:
            tower_patch(block.attn, "forward").replace(partial(_attend, block.attn), on=block.attn)


class _Attention(Protocol):
    """The attention of transformers' vision blocks."""

    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    scaling: float


def _attend(
    attention: _Attention,
    hidden_PE: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    position_embeddings: tuple[Tensor, Tensor],
    **_: object,
) -> Tensor:
    """Return [P, E], as transformers' own forward; cosines and sines are [P, A]."""
    from tinker_server.backends.kernels.rotary import rotate

    qkv = rotate(attention.qkv(hidden_PE), *position_embeddings)
    query, key, value = qkv.view(len(hidden_PE), 3, attention.num_heads, -1).unbind(1)
    varlen = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = varlen_attn(query, key, value, *varlen, scale=attention.scaling)
    assert isinstance(out, Tensor)
    result: Tensor = attention.proj(out.flatten(1))
    return result
