"""A trainer that trains all weights of its base, and what transformers and torch.optim do in its place."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from api_schemas.inputs import Datum
from api_schemas.training import AdamParams, Trainable
from backends.inputs.rendering import Renderer
from backends.trainer.distributed import World
from backends.trainer.rank import TrainerRank
from tests.factories import MIXED, cross_entropy, datum
from tests.trainers import config, forward_backward, reference_logprobs

FULL = Trainable(rank=32, seed=1, full=True)
ADAM = AdamParams(learning_rate=1e-2, beta2=0.99, eps=1e-3, weight_decay=0.1, grad_clip_norm=3.0)


def full_trainer(source: Path, world: World | None = None, max_tokens: int = 64) -> TrainerRank:
    """Rows of few tokens, so that a batch is several of them."""
    world = world or World(0, 1, torch.device("cpu"))
    return TrainerRank(replace(config(source, max_tokens, num_ranks=world.size), full=True), world)


def mixed_data(renderer: Renderer, seed: int = 0) -> list[Datum]:
    return [datum(one, renderer, seed + index) for index, one in enumerate(MIXED.values())]


def train(rank: TrainerRank, data: list[Datum], num_steps: int, adam: AdamParams = ADAM) -> None:
    for _ in range(num_steps):
        forward_backward(rank, "m", cross_entropy(data))
        rank.optim_step("m", adam)


def assert_scores(model, renderer: Renderer, data: list[Datum], got: Sequence[np.ndarray]) -> None:
    for item, values in zip(data, got, strict=True):
        with torch.no_grad():
            expected = reference_logprobs(renderer, item, model)[:, 0]
        np.testing.assert_allclose(values, expected, atol=1e-4)
