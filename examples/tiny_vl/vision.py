"""The vision tower over a batch of equal-sized images at once, with the model's own weights.

transformers computes attention image by image in a Python loop; here a batch is one call. Equality of the two is
checked by `check.py`. Legend: B images, H W pixels, Y X token grid, P patches, D tower width, O text width.
"""

# mypy: disable-error-code="union-attr, misc, arg-type"
# mypy takes every attribute of a torch module for a Tensor or a Module.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from model import MERGE, PATCH, TOKEN_SIDE, Grid
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, rotate_half
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

NORM_EPS = 1e-6


@dataclass(frozen=True)
class ImageTokens:
    """The language model's input from several images in succession: N tokens in all."""

    merged_NO: torch.Tensor
    deepstack_NO: list[torch.Tensor]


@dataclass(frozen=True)
class VisionFeatures:
    """Features of equal-sized images; T = Y * X tokens in reading order."""

    merged_BTO: torch.Tensor
    deepstack_BTO: list[torch.Tensor]

    def flat(self) -> ImageTokens:
        return ImageTokens(self.merged_BTO.flatten(0, 1), [part.flatten(0, 1) for part in self.deepstack_BTO])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight.to(x.dtype), bias.to(x.dtype), NORM_EPS)


def block_weights(layer: nn.Module) -> list[torch.Tensor]:
    parts = (layer.norm1, layer.attn.qkv, layer.attn.proj, layer.norm2, layer.mlp.linear_fc1, layer.mlp.linear_fc2)
    return [tensor for part in parts for tensor in (part.weight, part.bias)]


def block(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, *weights: torch.Tensor) -> torch.Tensor:
    """One layer of the tower, as a function of its weights: compiled once, it serves every layer."""
    norm1, norm1_bias, qkv, qkv_bias, proj, proj_bias, norm2, norm2_bias, fc1, fc1_bias, fc2, fc2_bias = weights
    batch, patches, width = x.shape
    parts = linear(norm(x, norm1, norm1_bias), qkv, qkv_bias).view(batch, patches, 3, heads, width // heads)
    query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
    query, key = ((part.float() * cos + rotate_half(part.float()) * sin).to(x.dtype) for part in (query, key))
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, patches, width)
    x = x + linear(mixed, proj, proj_bias)
    inner = F.gelu(linear(norm(x, norm2, norm2_bias), fc1, fc1_bias), approximate="tanh")
    return x + linear(inner, fc2, fc2_bias)


class BatchedVision:
    """Computes in `dtype` with the weights of `visual`, whatever theirs is; gradient flows to them.

    `compiled` is for long training on few image sizes: each number of patches takes seconds to compile.
    """

    def __init__(self, visual: Qwen3VLVisionModel, dtype: torch.dtype, compiled: bool = False) -> None:
        self._visual, self._dtype = visual, dtype
        self._block: Callable[..., torch.Tensor] = torch.compile(block, dynamic=False) if compiled else block
        self._tables: dict[Grid, tuple[torch.Tensor, ...]] = {}

    def __call__(self, pixels_B3HW: torch.Tensor) -> VisionFeatures:
        """Compute the features of pixels in 0..255, whose sides are multiples of TOKEN_SIDE."""
        grid = pixels_B3HW.shape[2] // TOKEN_SIDE, pixels_B3HW.shape[3] // TOKEN_SIDE
        indices, weights, cos, sin = self._table(grid, pixels_B3HW.device)
        positions_PD = (self._visual.pos_embed(indices) * weights[:, :, None]).sum(1)
        x = self._patches(pixels_B3HW, grid) + positions_PD.to(self._dtype)
        deepstack = []
        for i, layer in enumerate(self._visual.blocks):
            x = self._block(x, cos, sin, layer.attn.num_heads, *block_weights(layer))
            if i in self._visual.deepstack_visual_indexes:
                merger = self._visual.deepstack_merger_list[self._visual.deepstack_visual_indexes.index(i)]
                deepstack.append(self._merge(merger, x))
        return VisionFeatures(self._merge(self._visual.merger, x), deepstack)

    def _table(self, grid: Grid, device: torch.device) -> tuple[torch.Tensor, ...]:
        if grid not in self._tables:
            visual = self._visual
            thw = torch.tensor([[1, grid[0] * MERGE, grid[1] * MERGE]], device=device)
            indices, weights = get_vision_interpolation_indices_and_weights(
                thw,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=MERGE,
            )
            cos, sin = visual.rotary_pos_emb(weights, get_vision_position_ids(thw, MERGE))
            self._tables[grid] = indices, weights, cos, sin
        return self._tables[grid]

    def _patches(self, pixels_B3HW: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Patch embeddings, [B, P, D], in the model's order: the MERGE x MERGE patches of a token together."""
        convolution = self._visual.patch_embed.proj
        weight = convolution.weight.sum(2).flatten(1)  # a still image fills both time slots
        pixels = (pixels_B3HW / 127.5 - 1).to(self._dtype)
        x = pixels.view(len(pixels), 3, grid[0], MERGE, PATCH, grid[1], MERGE, PATCH)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(pixels), grid[0] * grid[1] * MERGE**2, 3 * PATCH**2)
        return linear(x, weight, convolution.bias)

    def _merge(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], -1, layer.hidden_size)
        x = x.view(shape) if layer.use_postshuffle_norm else x
        x = norm(x, layer.norm.weight, layer.norm.bias).view(shape)
        x = F.gelu(linear(x, layer.linear_fc1.weight, layer.linear_fc1.bias))
        return linear(x, layer.linear_fc2.weight, layer.linear_fc2.bias)
