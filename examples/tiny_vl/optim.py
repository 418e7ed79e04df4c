"""Muon for the matrices inside blocks, AdamW for the rest; the learning rate follows the clock."""

import time

import torch
from torch import nn

WARM_UP = 0.04
MATRIX_DECAY, OTHER_DECAY = 0.03, 0.01


class Clock:
    """The share of a time limit that has passed."""

    def __init__(self, minutes: float) -> None:
        self._started, self._seconds = time.monotonic(), minutes * 60

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def progress(self) -> float:
        return min(1.0, self.elapsed() / self._seconds)


def rate(progress: float) -> float:
    """Warm-up, a plateau, and linear decay to zero over the second half."""
    return min(1.0, progress / WARM_UP, 2 * (1 - progress))


class Optimizer:
    """Over groups of modules, each with its own learning rate (that of AdamW; Muon's is scaled to match)."""

    def __init__(self, groups: list[tuple[list[nn.Module], float]]) -> None:
        matrices, others = [], []
        for modules, learning_rate in groups:
            parameters = [item for module in modules for item in module.named_parameters()]
            # A module given by itself (an embedding, a head) is no inner matrix: its weight has a bare name.
            inner = [p for n, p in parameters if p.ndim == 2 and "." in n and not n.endswith("embed_tokens.weight")]
            chosen = {id(p) for p in inner}
            matrices.append({"params": inner, "lr": learning_rate})
            others.append({"params": [p for _, p in parameters if id(p) not in chosen], "lr": learning_rate})
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                [group for group in matrices if group["params"]],
                weight_decay=MATRIX_DECAY,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, weight_decay=OTHER_DECAY, betas=(0.9, 0.98)),
        ]
        self._base = [[group["lr"] for group in part.param_groups] for part in self._parts]
        self._parameters = [p for part in self._parts for group in part.param_groups for p in group["params"]]

    def step(self, progress: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        for part, base in zip(self._parts, self._base, strict=True):
            for group, learning_rate in zip(part.param_groups, base, strict=True):
                group["lr"] = learning_rate * rate(progress)
            part.step()
            part.zero_grad(set_to_none=True)
