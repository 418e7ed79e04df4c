"""The student's view of the teacher: the loss between their features of the same crop, and probes of both.

Legend: B crops, C teacher channels, Y X student tokens, T = Y * X.
"""

from dataclasses import dataclass

import torch
from augment import Strength, random_crops, shrunk
from data import Canvases
from model import HIDDEN, TOKEN_SIDE, Grid, image_grid
from teacher import CELL, CHANNELS, Teacher
from torch import nn
from torch.nn import functional as F
from vision import BatchedVision, VisionFeatures

TEACHER_ZOOM = 1.4  # the teacher sees a crop in this many times the student's pixels a side: near its own 260
LOGIT_WEIGHT = 0.5
STATISTICS_BATCHES = 8
COMMON_GRIDS = 6


@dataclass(frozen=True)
class View:
    grid: Grid
    pixels_B3HW: torch.Tensor
    """At the student's size."""
    features_BCYX: torch.Tensor
    """The teacher's, brought to the student's grid."""
    pooled_BC: torch.Tensor
    """The teacher's, averaged before that."""


def teacher_side(tokens: int) -> int:
    return round(tokens * TEACHER_ZOOM) * CELL


@torch.no_grad()
def make_view(teacher: Teacher, canvases: Canvases, indices_B: torch.Tensor, grid: Grid, strength: Strength) -> View:
    crops = random_crops(canvases, indices_B, teacher_side(grid[0]), teacher_side(grid[1]), strength)
    features = teacher(crops)
    pixels = shrunk(crops, grid[0] * TOKEN_SIDE, grid[1] * TOKEN_SIDE)
    return View(grid, pixels, F.adaptive_avg_pool2d(features, grid).float(), features.float().mean((2, 3)))


def common_grids(canvases: Canvases) -> tuple[list[Grid], list[float]]:
    """The grids of most photographs, and how often each is met."""
    counts: dict[Grid, float] = {}
    for height, width in canvases.sizes_N2.tolist():
        grid = image_grid(height, width)
        counts[grid] = counts.get(grid, 0) + 1
    grids = sorted(counts, key=lambda grid: -counts[grid])[:COMMON_GRIDS]
    return grids, [counts[grid] for grid in grids]


class Distillation(nn.Module):
    """A linear head from image tokens to the teacher's channels, and the loss over what it says.

    Channels are weighed by their spread, as a linear probe does that standardises its inputs.
    """

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, CHANNELS)
        self.token_mean = nn.Buffer(torch.zeros(CHANNELS))
        self.token_std = nn.Buffer(torch.ones(CHANNELS))
        self.pooled_std = nn.Buffer(torch.ones(CHANNELS))
        self._teacher = [teacher]  # in a list, for it is not trained and not saved here

    def measure(self, views: list[View]) -> None:
        """Take the scale of the teacher's channels from some views."""
        tokens = torch.cat([view.features_BCYX.flatten(2).transpose(1, 2).flatten(0, 1) for view in views])
        pooled = torch.cat([view.pooled_BC for view in views])
        self.token_mean.copy_(tokens.mean(0))
        self.token_std.copy_(tokens.std(0) + 0.02)
        self.pooled_std.copy_(pooled.std(0) + 0.01)

    def forward(self, features: VisionFeatures, view: View) -> dict[str, torch.Tensor]:
        """The losses by name; `loss` is their weighted sum."""
        said_BTC = self.head(features.merged_BTO.float())  # in standard units
        true_BTC = (view.features_BCYX.flatten(2).transpose(1, 2) - self.token_mean) / self.token_std
        token = F.smooth_l1_loss(said_BTC, true_BTC, beta=2.0) * 2
        said_pooled = said_BTC.mean(1) * self.token_std + self.token_mean
        pooled = ((said_pooled - view.pooled_BC) / self.pooled_std).square().mean()
        said_logits = self._teacher[0].logits(said_pooled)
        true_logits = self._teacher[0].logits(view.pooled_BC)
        divergence = F.kl_div(said_logits.log_softmax(1), true_logits.log_softmax(1), log_target=True, reduction="none")
        logit = divergence.sum(1).mean()
        return {"loss": token + pooled + LOGIT_WEIGHT * logit, "token": token, "pooled": pooled, "logit": logit}


@torch.no_grad()
def pooled_features(vision: BatchedVision, teacher: Teacher | None, canvases: Canvases, batch: int) -> torch.Tensor:
    """Mean features of whole photographs on their own grids: the student's, or the teacher's where given."""
    device = canvases.pixels_N3HW.device
    by_grid: dict[Grid, list[int]] = {}
    for i, (height, width) in enumerate(canvases.sizes_N2.tolist()):
        by_grid.setdefault(image_grid(height, width), []).append(i)
    result = torch.zeros(len(canvases.sizes_N2), HIDDEN if teacher is None else CHANNELS, device=device)
    for grid, members in by_grid.items():
        for chunk in torch.tensor(members, device=device).split(batch):
            pixels = canvases.pixels_N3HW[chunk].float()
            if teacher is None:
                pixels = shrunk(pixels, grid[0] * TOKEN_SIDE, grid[1] * TOKEN_SIDE)
                result[chunk] = vision(pixels).merged_BTO.float().mean(1)
            else:
                pixels = shrunk(pixels, teacher_side(grid[0]), teacher_side(grid[1]))
                result[chunk] = teacher(pixels).float().mean((2, 3))
    return result
