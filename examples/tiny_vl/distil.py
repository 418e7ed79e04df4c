"""The student's view of the teacher: the loss between their features of the same crop, and probes of both.

Legend: B crops, C teacher channels, K class names, Y X student tokens, T = Y * X.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from augment import Strength, random_crops, shrunk
from data import Canvases
from model import HIDDEN, TOKEN_SIDE, Grid, image_grid
from probe import fit_classifier
from teacher import CELL, Teacher
from torch import nn
from torch.nn import functional as F
from vision import BatchedVision, VisionFeatures

TEACHER_ZOOM = 1.4  # the teacher sees a crop in this many times the student's pixels a side: near its own 260
LOGIT_WEIGHT, NAME_WEIGHT, THUMBNAIL_WEIGHT = 0.5, 0.5, 1.0
THUMBNAIL = 4  # pixels a side
THUMBNAIL_STD = 0.25  # of a pixel in 0..1, roughly
STATISTICS_BATCHES = 8
WHOLE_BATCH = 256
COMMON_GRIDS = 9  # of 98 in 100 photographs
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

    Channels are weighed by their spread, as a linear probe does that standardises its inputs. A linear classifier of
    the teacher's features tells which of their directions matter to the names that the photographs are asked for.
    """

    def __init__(self, teacher: Teacher, names: int) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, teacher.channels)
        self.answer_head = nn.Linear(HIDDEN, teacher.channels)
        nn.init.zeros_(self.answer_head.weight)
        self.thumbnail_head = nn.Linear(HIDDEN, 3 * THUMBNAIL**2)
        self.token_mean = nn.Buffer(torch.zeros(teacher.channels))
        self.token_std = nn.Buffer(torch.ones(teacher.channels))
        self.pooled_std = nn.Buffer(torch.ones(teacher.channels))
        self.name_weight = nn.Buffer(torch.zeros(names, teacher.channels))
        self.name_bias = nn.Buffer(torch.zeros(names))
        self._teacher = [teacher]  # in a list, for it is not trained and not saved here

    def learn_names(self, features_BC: torch.Tensor, labels_B: torch.Tensor) -> None:
        """Fit the classifier of names to the teacher's features of whole photographs."""
        weight, bias = fit_classifier(features_BC, labels_B, len(self.name_bias))
        self.name_weight.copy_(weight)
        self.name_bias.copy_(bias)

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
        token, mean_BC = token_loss(said_BTC, view.features_BTC, self.token_mean, self.token_std)
        pooled = self._pooled_losses(mean_BC * self.token_std + self.token_mean, view)
        return {"loss": token + pooled.pop("loss"), "token": token} | pooled

    def answer_losses(self, hidden_BO: torch.Tensor, view: View) -> dict[str, torch.Tensor]:
        """Return the losses of the language model's last states where the name of the subject begins.

        `thumbnail` is of colours and places, to which the teacher is nearly blind.
        """
        said = self.answer_head(hidden_BO.float()) * self.pooled_std + self.token_mean
        pixels_BP = F.adaptive_avg_pool2d(view.pixels_B3HW.float() / 255, THUMBNAIL).flatten(1)
        thumbnail = self.thumbnail_head(hidden_BO.float()) - (pixels_BP - 0.5) / THUMBNAIL_STD
        return {"answer": self._pooled_losses(said, view)["loss"], "thumbnail": thumbnail.square().mean()}

    def _pooled_losses(self, said_BC: torch.Tensor, view: View) -> dict[str, torch.Tensor]:
        """Return the losses of the teacher's mean features, and in nats of what it makes of them: classes and names."""
        pooled = ((said_BC - view.pooled_BC) / self.pooled_std).square().mean()
        logit, name = (
            divergence(opinion(said_BC), opinion(view.pooled_BC)) for opinion in (self._teacher[0].logits, self._names)
        )
        loss = pooled + LOGIT_WEIGHT * logit + NAME_WEIGHT * name
        return {"loss": loss, "pooled": pooled, "logit": logit, "name": name}

    def _names(self, pooled_BC: torch.Tensor) -> torch.Tensor:
        return F.linear(pooled_BC, self.name_weight, self.name_bias)


@torch.compile(dynamic=True, disable=not torch.cuda.is_available())
def token_loss(
    said_BTC: torch.Tensor, features_BTC: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of what is said of the teacher's features, and the mean of what is said; in standard units."""
    true_BTC = (features_BTC.float() - mean_C) / std_C
    return F.smooth_l1_loss(said_BTC, true_BTC, beta=2.0) * 2, said_BTC.mean(1)


def divergence(said: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the mean divergence of two opinions, given as logits over the last dimension."""
    said, true = said.log_softmax(-1), true.log_softmax(-1)
    return (true.exp() * (true - said)).sum(-1).mean()


@torch.no_grad()
def pooled_features(
    canvases: Canvases, side: Callable[[int], int], pooled: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Features of whole photographs, each on its own grid of tokens of `side` pixels in all."""
    by_grid: dict[Grid, list[int]] = {}
    for i, (height, width) in enumerate(canvases.sizes_N2.tolist()):
        by_grid.setdefault(image_grid(height, width), []).append(i)
    parts = [
        pooled(shrunk(canvases.pixels_N3HW[chunk].float(), side(grid[0]), side(grid[1])))
        for grid, members in by_grid.items()
        for chunk in torch.tensor(members, device=canvases.pixels_N3HW.device).split(WHOLE_BATCH)
    ]
    order = torch.tensor([i for members in by_grid.values() for i in members])
    return torch.cat(parts)[order.argsort()]


def student_features(vision: BatchedVision, canvases: Canvases) -> torch.Tensor:
    """The means of the tokens of whole photographs."""
    return pooled_features(
        canvases, lambda tokens: tokens * TOKEN_SIDE, lambda pixels: vision(pixels).merged_BTO.float().mean(1)
    )


def teacher_features(teacher: Teacher, canvases: Canvases) -> torch.Tensor:
    """The means of the cells of whole photographs."""
    return pooled_features(canvases, teacher_side, lambda pixels: teacher(pixels).float().mean((2, 3)))
