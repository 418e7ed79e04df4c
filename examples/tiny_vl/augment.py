"""Random crops of canvases, on their device, as input of both teacher and student.

Mixing needs no labels, because the teacher sees the mixture too ("function matching", Beyer et al.
2022). Legend: N photographs, B crops, H W pixels.
"""

import math
from dataclasses import dataclass

import torch
from data import Canvases
from torch.nn import functional as F


@dataclass(frozen=True)
class Strength:
    """Strength of the augmentations."""

    least_area: float
    mix: float
    """Share of crops that are blended with another; as many again have a rectangle of another pasted in."""
    colour: float
    """Largest relative change of brightness, contrast and saturation."""


DISTIL = Strength(least_area=0.08, mix=0.4, colour=0.4)
WHOLE = Strength(least_area=0.5, mix=0.2, colour=0.25)
CAPTION = Strength(least_area=0.35, mix=0.0, colour=0.3)
PLAIN = Strength(least_area=0.6, mix=0.0, colour=0.1)
LARGEST_ASPECT_CHANGE = 3 / 2
LARGEST_TURN = math.radians(20)
TURNED_SHARE = 0.4
GREY_SHARE = 0.1
MOST_BLENDED, LARGEST_PASTE = 0.5, 0.7


def uniform(count: int, low: float, high: float, device: torch.device) -> torch.Tensor:
    return torch.rand(count, device=device) * (high - low) + low


def random_crops(
    canvases: Canvases, indices_B: torch.Tensor, height: int, width: int, strength: Strength
) -> torch.Tensor:
    """Crops of `height` x `width` with pixels in 0..255, float."""
    device = canvases.pixels_N3HW.device
    count = len(indices_B)
    sizes_B2 = canvases.sizes_N2[indices_B].float()
    photo_aspect_B = sizes_B2[:, 1] / sizes_B2[:, 0]
    change_B = torch.exp(uniform(count, -1, 1, device) * math.log(LARGEST_ASPECT_CHANGE))
    stretch_B = (width / height) * change_B / photo_aspect_B  # of the crop, in the canvas
    # Half of the crops by uniform area, half by uniform logarithm: whole subjects and details.
    area_B = uniform(count, strength.least_area, 1, device)
    log_area_B = torch.exp(uniform(count, math.log(strength.least_area), 0, device))
    area_B = torch.where(torch.rand(count, device=device) < 0.5, area_B, log_area_B)
    half_w_B = (area_B * stretch_B).sqrt().clamp(max=1)
    half_h_B = (area_B / stretch_B).sqrt().clamp(max=1)
    centre_x_B = uniform(count, -1, 1, device) * (1 - half_w_B)
    centre_y_B = uniform(count, -1, 1, device) * (1 - half_h_B)
    turn_B = uniform(count, -LARGEST_TURN, LARGEST_TURN, device)
    turn_B = turn_B * (torch.rand(count, device=device) < TURNED_SHARE)
    flip_B = (torch.rand(count, device=device) < 0.5).float() * -2 + 1
    cos_B, sin_B = turn_B.cos(), turn_B.sin()
    rows = [
        torch.stack([half_w_B * flip_B * cos_B, -half_w_B * sin_B, centre_x_B], 1),
        torch.stack([half_h_B * flip_B * sin_B, half_h_B * cos_B, centre_y_B], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), [count, 3, height, width], align_corners=False)
    pixels = canvases.pixels_N3HW[indices_B].float()
    crops = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    return finished(crops, strength.colour, strength.mix)


@torch.compile(dynamic=True, disable=not torch.cuda.is_available())
def finished(crops_B3HW: torch.Tensor, colour: float, mix: float) -> torch.Tensor:
    return mixed(recoloured(crops_B3HW, colour), mix)


def recoloured(crops_B3HW: torch.Tensor, colour: float) -> torch.Tensor:
    count, device = len(crops_B3HW), crops_B3HW.device

    def factor() -> torch.Tensor:
        return uniform(count, 1 - colour, 1 + colour, device).view(-1, 1, 1, 1)

    x = crops_B3HW * factor()
    grey = x.mean(1, keepdim=True)
    saturation = factor() * (torch.rand(count, 1, 1, 1, device=device) >= GREY_SHARE)
    x = grey + (x - grey) * saturation
    mean = x.mean((1, 2, 3), keepdim=True)
    tint = 1 + (torch.rand(count, 3, 1, 1, device=device) - 0.5) * (colour / 2)
    return ((mean + (x - mean) * factor()) * tint).clamp(0, 255)


def mixed(crops_B3HW: torch.Tensor, share: float) -> torch.Tensor:
    """Some crops blended with the next one, as many with a rectangle of it pasted in, the others as they are."""
    count, _, height, width = crops_B3HW.shape
    device = crops_B3HW.device
    other = crops_B3HW.roll(1, 0)
    choice, amount, side, top, left = torch.rand(5, count, 1, 1, 1, device=device).unbind(0)
    blended = crops_B3HW + (other - crops_B3HW) * (amount * MOST_BLENDED * (choice < share))
    y = torch.arange(height, device=device).view(1, 1, -1, 1) / height
    x = torch.arange(width, device=device).view(1, 1, 1, -1) / width
    side = side * LARGEST_PASTE
    inside = (y >= top * (1 - side)) & (y < top * (1 - side) + side)
    inside = inside & (x >= left * (1 - side)) & (x < left * (1 - side) + side)
    return torch.where(inside & (choice > 1 - share), other, blended)


def shrunk(pixels_B3HW: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The same pictures at the student's size, low-pass filtered as the image processor does."""
    return F.interpolate(pixels_B3HW, (height, width), mode="bilinear", antialias=True, align_corners=False)
