"""Muon for the matrices inside blocks, AdamW for the rest; the learning rate follows the stage's progress."""

# mypy: disable-error-code="misc, arg-type"
# mypy takes every attribute of a torch module for a Tensor or a Module.

import time

import torch
from torch import nn

WARM_UP = 0.02
MATRIX_DECAY, OTHER_DECAY = 0.1, 0.01
MOMENTUM = 0.95
ORTHOGONAL = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic (Jordan et al. 2024, Muon)
ORTHOGONAL_STEPS = 5
SAME_SIZE_AS_ADAMW = 0.2  # root mean square of an update per unit of learning rate (arXiv:2502.16982)


class Stage:
    """A stage of training, which ends after its minutes or after its steps."""

    def __init__(self, name: str, minutes: float | None = None, steps: int | None = None) -> None:
        self.name = name
        self.steps = 0
        self._started, self._minutes, self._most = time.monotonic(), minutes, steps

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def progress(self) -> float:
        """Return the share that has passed."""
        passed, whole = (self.steps, self._most) if self._minutes is None else (self.elapsed_s() / 60, self._minutes)
        return min(1.0, passed / whole) if whole else 1.0


def rate(progress: float, decay_from: float) -> float:
    """Warm-up, a plateau, and linear decay to zero from `decay_from` of the time on."""
    return min(1.0, progress / WARM_UP, (1 - progress) / (1 - decay_from))


def orthogonal(matrices_LMN: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrices, roughly: singular values come near 1 (Newton-Schulz, bfloat16)."""
    a, b, c = ORTHOGONAL
    x = matrices_LMN.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ORTHOGONAL_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class EqualMatrices:
    """Muon over matrices of one shape, all at once: a model of equal layers needs few launches."""

    def __init__(self, parameters: list[nn.Parameter], learning_rate: float) -> None:
        self._parameters, self._learning_rate = parameters, learning_rate
        self._momentum = torch.zeros_like(torch.stack([p.detach() for p in parameters]))
        self._scale = SAME_SIZE_AS_ADAMW * max(parameters[0].shape) ** 0.5

    @torch.no_grad()
    def step(self, share: float) -> None:
        learning_rate = self._learning_rate * share
        gradients = torch.stack([p.grad for p in self._parameters])
        self._momentum.lerp_(gradients, 1 - MOMENTUM)
        update = orthogonal(gradients.lerp(self._momentum, MOMENTUM)).to(gradients.dtype)
        torch._foreach_mul_(self._parameters, 1 - learning_rate * MATRIX_DECAY)
        torch._foreach_add_(self._parameters, list(update.unbind(0)), alpha=-learning_rate * self._scale)


class Optimizer:
    """Over modules, by one learning rate (that of AdamW; Muon's is scaled to match)."""

    def __init__(self, modules: list[nn.Module], learning_rate: float, decay_from: float) -> None:
        named = [item for module in modules for item in module.named_parameters()]
        # A module given by itself (an embedding, a head) is no inner matrix: its weight has a bare name.
        inner = [p for n, p in named if p.ndim == 2 and "." in n and not n.endswith("embed_tokens.weight")]
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in inner:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        chosen = {id(p) for p in inner}
        self._matrices = [EqualMatrices(equal, learning_rate) for equal in by_shape.values()]
        self._others = torch.optim.AdamW(
            [p for _, p in named if id(p) not in chosen],
            lr=learning_rate,
            weight_decay=OTHER_DECAY,
            betas=(0.9, 0.98),
            fused=True,
        )
        self._learning_rate, self._decay_from = learning_rate, decay_from
        self._parameters = [p for _, p in named]

    def step(self, progress: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        share = rate(progress, self._decay_from)
        for matrices in self._matrices:
            matrices.step(share)
        self._others.param_groups[0]["lr"] = self._learning_rate * share
        self._others.step()
        for parameter in self._parameters:
            parameter.grad = None
