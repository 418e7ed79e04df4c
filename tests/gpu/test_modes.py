"""Servers that train vision towers too, on CUDA: trainer as on the CPU, sampler as trainer.

pytest tests/gpu/test_modes.py
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.factories import MIXED, cross_entropy, datum, make_renderer, present
from tests.gpu.agreement import LARGEST, MEAN, ON_CUDA, assert_close, scoring_datum
from tests.models import FAMILIES
from tests.sampling import sample, sampler_config, scoring
from tests.trainers import config, forward_backward, logprobs, perturb
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Mode:
    """Settings of a server, and of the training on it."""

    settings: dict[str, Any]
    lora: Trainable
    kind: str | None = None
    """The kind of the tiny model; None: Qwen3-VL."""

    def source(self, tiny_vl: Path, directory: Path) -> Path:
        return tiny_vl if self.kind is None else FAMILIES[self.kind](directory)


SEEING = Trainable(rank=8, seed=1, train_vision=True)
SMOOTH = AdamParams(learning_rate=0.05, eps=1.0)
MODES = {
    "tower": Mode({"trains_vision": True}, SEEING),
    "tower of Qwen3-VL MoE": Mode({"trains_vision": True}, SEEING, "Qwen3-VL MoE"),
    "tower of Qwen2.5-VL": Mode({"trains_vision": True}, SEEING, "Qwen2.5-VL"),
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return MODES[request.param]


def trained(
    source: Path, mode: Mode, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16"], data: list[Datum]
) -> TrainerRank:
    """After two steps on the data, where there is some; the adapter is random before."""
    settings = replace(config(source, max_tokens=256), device=device, dtype=dtype, **mode.settings)
    rank = TrainerRank(settings, World(0, 1, torch.device(device, 0) if device == "cuda" else torch.device("cpu")))
    rank.create_model("m", mode.lora)
    perturb(rank, "m")
    for _ in range(2 if data else 0):
        forward_backward(rank, "m", cross_entropy(data))
        rank.optim_step("m", SMOOTH)
    return rank


def test_two_steps_are_as_on_the_cpu(mode, tiny_vl, tmp_path):
    source = mode.source(tiny_vl, tmp_path / "model")
    renderer = make_renderer(source)
    data = [datum(one, renderer, seed) for seed, one in enumerate(MIXED.values())]
    on_cpu, on_cuda = (trained(source, mode, device, "float32", data) for device in ("cpu", "cuda"))
    pairs = zip(logprobs(on_cuda, data), logprobs(on_cpu, data), strict=True)
    found = np.concatenate([np.abs(one - other) for one, other in pairs])
    print(f"mean {found.mean():.6f}, max {found.max():.5f} nats")
    assert found.mean() < 1e-3
    assert found.max() < 2e-2


async def test_the_sampler_scores_as_the_trainer(mode, tiny_vl, tmp_path):
    source = mode.source(tiny_vl, tmp_path / "model")
    renderer = make_renderer(source)
    data = [scoring_datum(one, renderer) for one in MIXED.values()]
    rank = trained(source, mode, "cuda", "bfloat16", [])  # steps of a random adapter would blow rounding up
    rank.save_sampler_weights("m", tmp_path / "m", for_elsewhere=False)
    running = SamplerPool(replace(sampler_config(source, tmp_path / "scratch"), **ON_CUDA, **mode.settings))
    await running.start()
    try:
        scores = [
            await asyncio.gather(*(sample(running, scoring(one), weights) for one in MIXED.values()))
            for weights in (None, tmp_path / "m", None)
        ]
    finally:
        await running.stop()
    of_base, of_model, again = (
        np.concatenate([np.array(present(answer.prompt_logprobs)[1:]) for answer in answers]) for answers in scores
    )
    wanted = np.concatenate([row[:-1] for row in logprobs(rank, data)])
    targets = np.concatenate([one.loss_fn_inputs["target_tokens"][:-1] for one in data])
    text = targets != renderer.config.image_token_id
    found = np.abs(of_model - wanted)[text]
    learned = np.abs(of_model - of_base)[text].mean()
    assert_close(f"{learned:.3f} nats from the base", found)
    assert learned > 5 * MEAN
    np.testing.assert_allclose(again, of_base, atol=LARGEST)
