"""The student's view of the teacher: the loss between their features of the same crop, and probes of both.

Legend: B crops, C teacher channels, Y X student tokens, T = Y * X.
"""

import random
from collections.abc import Callable
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
WHOLE_SHARE = 0.3  # of the views that distil: nearly whole photographs, as they are asked about


@dataclass(frozen=True)
class View:
    photos_B: torch.Tensor
    """Indices of the photographs, on the CPU."""
    pixels_B3HW: torch.Tensor
    """At the student's size, uint8."""
    features_BTC: torch.Tensor
    """The teacher's, brought to the student's grid."""
    pooled_BC: torch.Tensor
    """The teacher's, averaged before that."""
    grid: Grid


class ViewPool:
    """The latest `size` views, each drawn about `uses` times: the teacher costs more than the student."""

    def __init__(self, make: Callable[[], View], size: int, uses: int) -> None:
        self._make, self._size, self._uses = make, size, uses
        self._views: list[View] = []
        self._drawn = 0

    def draw(self) -> View:
        made, rest = divmod(self._drawn, self._uses)
        if rest == 0:
            self._views[made % self._size : made % self._size + 1] = [self._make()]
        self._drawn += 1
        return random.choice(self._views)


def teacher_side(tokens: int) -> int:
    return round(tokens * TEACHER_ZOOM) * CELL


@torch.no_grad()
def make_view(teacher: Teacher, canvases: Canvases, photos_B: torch.Tensor, grid: Grid, strength: Strength) -> View:
    indices_B = photos_B.to(canvases.pixels_N3HW.device)
    crops = random_crops(canvases, indices_B, teacher_side(grid[0]), teacher_side(grid[1]), strength)
    pixels = shrunk(crops, grid[0] * TOKEN_SIDE, grid[1] * TOKEN_SIDE).round().to(torch.uint8)
    features = teacher(crops)
    tokens = F.adaptive_avg_pool2d(features, grid).flatten(2).transpose(1, 2).contiguous()
    return View(photos_B, pixels, tokens, features.float().mean((2, 3)), grid)


def common_grids(canvases: Canvases) -> tuple[list[Grid], list[float]]:
    """The grids of most photographs, and how often each is met."""
    counts: dict[Grid, float] = {}
    for height, width in canvases.sizes_N2.tolist():
        grid = image_grid(height, width)
        counts[grid] = counts.get(grid, 0) + 1
    grids = sorted(counts, key=lambda grid: -counts[grid])[:COMMON_GRIDS]
    return grids, [counts[grid] for grid in grids]


class Distillation(nn.Module):
    """Linear heads to the teacher's channels, from image tokens and from where an answer begins, and their losses.

    Channels are weighed by their spread, as a linear probe does that standardises its inputs.
    """

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, CHANNELS)
        self.answer_head = nn.Linear(HIDDEN, CHANNELS)
        self.token_mean = nn.Buffer(torch.zeros(CHANNELS))
        self.token_std = nn.Buffer(torch.ones(CHANNELS))
        self.pooled_std = nn.Buffer(torch.ones(CHANNELS))
        self._teacher = [teacher]  # in a list, for it is not trained and not saved here

    def measure(self, views: list[View]) -> None:
        """Take the scale of the teacher's channels from some views."""
        tokens = torch.cat([view.features_BTC.flatten(0, 1).float() for view in views])
        pooled = torch.cat([view.pooled_BC for view in views])
        self.token_mean.copy_(tokens.mean(0))
        self.token_std.copy_(tokens.std(0) + 0.02)
        self.pooled_std.copy_(pooled.std(0) + 0.01)

    def forward(self, features: VisionFeatures, view: View) -> dict[str, torch.Tensor]:
        """The tower's losses by name; `loss` is their weighted sum."""
        said_BTC = self.head(features.merged_BTO.float())  # in standard units
        true_BTC = (view.features_BTC.float() - self.token_mean) / self.token_std
        token = F.smooth_l1_loss(said_BTC, true_BTC, beta=2.0) * 2
        pooled, logit = self._pooled_losses(said_BTC.mean(1) * self.token_std + self.token_mean, view)
        return {"loss": token + pooled + LOGIT_WEIGHT * logit, "token": token, "pooled": pooled, "logit": logit}

    def answer_loss(self, hidden_BO: torch.Tensor, view: View) -> torch.Tensor:
        """Return the loss of the language model's last states where the name of the subject begins."""
        said = self.answer_head(hidden_BO.float()) * self.pooled_std + self.token_mean
        pooled, logit = self._pooled_losses(said, view)
        return pooled + LOGIT_WEIGHT * logit

    def _pooled_losses(self, said_BC: torch.Tensor, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the teacher's mean features and of its logits, in nats over its 1,000 classes."""
        pooled = ((said_BC - view.pooled_BC) / self.pooled_std).square().mean()
        said, true = (self._teacher[0].logits(part).log_softmax(1) for part in (said_BC, view.pooled_BC))
        return pooled, F.kl_div(said, true, log_target=True, reduction="batchmean")


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
