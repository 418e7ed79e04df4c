"""What a tower makes of photographs held out from its training, beside those it was trained on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from augment import PLAIN
from data import Canvases, Photos, load_canvases
from distil import Distillation, View, common_grids, make_view, student_features, teacher_features
from probe import linear_probe
from teacher import Teacher
from vision import BatchedVision

WATCHED_GRIDS = 3  # the commonest


@dataclass(frozen=True)
class Judge:
    kept: Canvases
    kept_labels: torch.Tensor
    aside: Canvases
    aside_labels: torch.Tensor
    watched: dict[str, list[View]]
    """Plain views of as many photographs of either kind, by column of the log."""

    def probe(self, features: Callable[[Canvases], torch.Tensor]) -> float:
        """Return the accuracy on held-out photographs of a linear probe of `features`."""
        return linear_probe(features(self.kept), self.kept_labels, features(self.aside), self.aside_labels).overall

    def probe_of_teacher(self, teacher: Teacher) -> float:
        return self.probe(partial(teacher_features, teacher))

    @torch.no_grad()
    def judged(self, vision: BatchedVision, distillation: Distillation) -> dict[str, float]:
        """Return columns of the log: losses on photographs seen and unseen, and the probe."""
        columns = {}
        for name, views in self.watched.items():
            losses = [float(distillation(vision(view.pixels_B3HW), view)["loss"]) for view in views]
            columns[name] = round(sum(losses) / len(losses), 4)
        return columns | {"probe": self.probe(partial(student_features, vision))}


def make_judge(teacher: Teacher, photos: Photos, kept: Canvases, aside: Photos) -> Judge:
    held_out = load_canvases(aside, kept.pixels_N3HW.device)
    every, grids = torch.arange(len(aside.labels)), common_grids(kept)[0][:WATCHED_GRIDS]
    watched = {
        name: [make_view(teacher, canvases, every, grid, PLAIN) for grid in grids]
        for name, canvases in {"seen": kept, "unseen": held_out}.items()
    }
    return Judge(kept, photos.label_tensor(), held_out, aside.label_tensor(), watched)
