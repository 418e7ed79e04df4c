"""The Qwen models' own image processing, with the patches cut last.

A picture has half the size of its patches, which hold it once for each of two frames; the device cuts it in no time.

H, W pixels of a picture, P patches, D values of a patch
"""

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from tinker_server.backends.families.processors import ImageProcessor


class PictureProcessor(ImageProcessor):
    """Gives pixels in bytes as a picture of the size that the model sees."""

    @property
    def side(self) -> int:
        """Pixels of a merged patch's side."""
        return int(self.own.patch_size * self.own.merge_size)

    def __call__(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Return pixel_values [H, W, 3] in bytes, and image_grid_thw [1, 3], in patches before merging."""
        own = self.own
        (resized_3HW,) = own.resize(pil_to_tensor(rgb)[None], size=own.size, resample=own.resample, factor=self.side)
        height, width = (length // own.patch_size for length in resized_3HW.shape[1:])
        grid_13 = torch.tensor([[1, height, width]])
        return {"pixel_values": resized_3HW.permute(1, 2, 0).contiguous(), "image_grid_thw": grid_13}

    def normalise(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [P, D] of `dtype`, from a picture [H, W, 3]."""
        return self.normalise_patches(self.cut(pixels), dtype)

    def cut(self, picture_HW3: Tensor) -> Tensor:
        """Return [P, D]: patches that will be merged are adjacent; each has its channels in turn, and every
        channel once for each frame."""
        own = self.own
        size, merge = own.patch_size, own.merge_size
        rows, columns = (length // self.side for length in picture_HW3.shape[:2])
        parts = picture_HW3.view(rows, merge, size, columns, merge, size, 3).permute(0, 3, 1, 4, 6, 2, 5)
        frames = parts.unsqueeze(5).expand(-1, -1, -1, -1, -1, own.temporal_patch_size, -1, -1)
        return frames.reshape(rows * columns * merge**2, -1)

    def normalise_patches(self, bytes_PD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [P, D] of `dtype`, from patches of any pictures."""
        return super().normalise(bytes_PD, dtype)
