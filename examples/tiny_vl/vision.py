"""The vision tower over a batch of equal-sized images at once, with the model's own weights.

transformers computes attention image by image in a Python loop; here a batch is one call. Equality of the two is
checked by `check.py`. Legend: B images, H W pixels, Y X token grid, P patches, D tower width, O text width.
"""

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
    """What the language model sees of some images, one after the other: N tokens in all."""

    merged_NO: torch.Tensor
    deepstack_NO: list[torch.Tensor]


@dataclass(frozen=True)
class VisionFeatures:
    """Of equal-sized images; T = Y * X tokens in reading order."""

    merged_BTO: torch.Tensor
    deepstack_BTO: list[torch.Tensor]

    def flat(self) -> ImageTokens:
        return ImageTokens(self.merged_BTO.flatten(0, 1), [part.flatten(0, 1) for part in self.deepstack_BTO])


class BatchedVision:
    """Computes in `dtype` with the weights of `visual`, whatever theirs is; gradient flows to them."""

    def __init__(self, visual: Qwen3VLVisionModel, dtype: torch.dtype) -> None:
        self._visual, self._dtype = visual, dtype
        self._tables: dict[Grid, tuple[torch.Tensor, ...]] = {}

    def __call__(self, pixels_B3HW: torch.Tensor) -> VisionFeatures:
        """Of pixels in 0..255, whose sides are multiples of TOKEN_SIDE."""
        grid = pixels_B3HW.shape[2] // TOKEN_SIDE, pixels_B3HW.shape[3] // TOKEN_SIDE
        indices, weights, cos, sin = self._table(grid, pixels_B3HW.device)
        positions_PD = (self._visual.pos_embed(indices) * weights[:, :, None]).sum(1)
        x = self._patches(pixels_B3HW) + positions_PD.to(self._dtype)
        deepstack = []
        for i, block in enumerate(self._visual.blocks):
            x = x + self._attention(block.attn, self._norm(block.norm1, x), cos, sin)
            x = x + self._mlp(block.mlp, self._norm(block.norm2, x))
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

    def _patches(self, pixels_B3HW: torch.Tensor) -> torch.Tensor:
        """Patch embeddings, [B, P, D], in the model's order: the MERGE x MERGE patches of a token together."""
        convolution = self._visual.patch_embed.proj
        weight = convolution.weight.sum(2).to(self._dtype)  # a still image fills both time slots
        pixels = (pixels_B3HW / 127.5 - 1).to(self._dtype)
        x = F.conv2d(pixels, weight, convolution.bias.to(self._dtype), stride=PATCH)
        batch, width, rows, columns = x.shape
        x = x.view(batch, width, rows // MERGE, MERGE, columns // MERGE, MERGE)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, width)

    def _linear(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer.weight.to(self._dtype), layer.bias.to(self._dtype))

    def _norm(self, layer: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight.to(self._dtype), layer.bias.to(self._dtype)
        return F.layer_norm(x, layer.normalized_shape, weight, bias, NORM_EPS)

    def _attention(self, layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, patches, width = x.shape
        qkv = self._linear(layer.qkv, x).view(batch, patches, 3, layer.num_heads, layer.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = ((part.float() * cos + rotate_half(part.float()) * sin).to(self._dtype) for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self._linear(layer.proj, mixed.transpose(1, 2).reshape(batch, patches, width))

    def _mlp(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self._linear(layer.linear_fc2, F.gelu(self._linear(layer.linear_fc1, x), approximate="tanh"))

    def _merge(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], -1, layer.hidden_size)
        x = self._norm(layer.norm, x.view(shape) if layer.use_postshuffle_norm else x).view(shape)
        return self._linear(layer.linear_fc2, F.gelu(self._linear(layer.linear_fc1, x)))
