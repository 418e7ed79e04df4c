"""Tensors that the vision towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5 derive from their images' sizes.

The towers would derive them on the device, with a wait for each image. Here they are computed once per size.

N images, P patches
"""

from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from tinker_server.backends.kernels.pinned_copy import to_device

_SIZES = 256
"""Number of image sizes whose tensors are cached: 64 bytes a patch."""


class Grids:
    """Computes and caches these tensors for a vision tower."""

    def __init__(self, tower: PreTrainedModel) -> None:
        self._tower = tower
        self._of_image = lru_cache(_SIZES)(self._compute)

    def find(self, grids_N3: Tensor, device: torch.device) -> dict[str, object]:
        """Return them named as arguments of transformers' get_image_features; `grids_N3` are on the host."""
        tower, cu_seqlens = self._tower, get_vision_cu_seqlens(grids_N3)
        images = [self._of_image(*grid) for grid in grids_N3.tolist()]
        found = {name: torch.cat([image[name] for image in images]) for name in images[0]} | {"cu_seqlens": cu_seqlens}
        longest = {"max_seqlen": _longest(cu_seqlens)}
        if hasattr(tower, "window_size"):
            found["window_index"], windows = get_vision_window_index(
                grids_N3, tower.spatial_merge_size, tower.window_size, tower.patch_size
            )
            found["cu_window_seqlens"] = windows
            longest["max_window_seqlen"] = _longest(windows)
        on_device = {name: to_device(value, device) for name, value in found.items()}
        return {f"image_{name}": value for name, value in (on_device | longest).items()}

    def _compute(self, frames: int, height: int, width: int) -> dict[str, Tensor]:
        """Compute an image's tensors, [P, ...] each."""
        tower, grid_13 = self._tower, torch.tensor([[frames, height, width]])
        found = {"position_ids": get_vision_position_ids(grid_13, tower.spatial_merge_size)}
        if hasattr(tower, "num_grid_per_side"):
            found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid_13,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
        return found


def _longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max())
