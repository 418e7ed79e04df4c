"""An engine in bfloat16 whose slots can be filled wrongly, and models of a trainer to fill them with."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.engine.async_llm import AsyncLLM

from tests.factories import prompt, text
from tests.sampling import sampler_config
from tests.trainers import config, logprobs, lora_model
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.sampler.engine.engine import engine_args
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank


@asynccontextmanager
async def running_engine(
    source: Path, renderer: Renderer, scratch: Path, *, expert_slots: Layout = "own"
) -> AsyncIterator[AsyncLLM]:
    """With two slots, of a decoder, its head and a vision tower."""
    wanted = replace(sampler_config(source, scratch), dtype="bfloat16", adapter_slots=1, trains_vision=True)
    wanted = replace(wanted, expert_slots=expert_slots)
    arguments = engine_args(wanted, renderer.family.vision)
    arguments.worker_cls = "tests.loading_wrongly.LoadsWrongly"
    with pytest.MonkeyPatch.context() as patch:  # as the launcher starts a sampler
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        running = AsyncLLM.from_engine_args(arguments)
    await running.collective_rpc("patch_runner", args=(sorted(renderer.family.placeholders),))
    yield running
    running.shutdown()


BFLOAT16_NATS = 0.1
"""Distance of a token's log probability between trainer and engine, both in bfloat16: 0.04 was measured, and 1.8 with
another model's weights that are as after many steps."""


def trained_scores(rank: TrainerRank, model_id: str, token_ids: list[int]) -> np.ndarray:
    """Return a trainer's log probability of each token after the first, nats."""
    ids = np.array(token_ids)
    inputs = {"target_tokens": np.roll(ids, -1), "weights": np.ones(len(ids), np.float32)}
    (scores,) = logprobs(rank, [Datum(model_input=prompt(text(*token_ids)), loss_fn_inputs=inputs)], model_id)
    return scores[:-1]


def seeing_trainer(source: Path, *change_sizes: float, layouts: Sequence[Layout] = ("own", "service")) -> TrainerRank:
    """In bfloat16, of models `m0`, `m1` and so on that train the tower, each tensor off its start by so much, and of
    these layouts in turn."""
    settings = replace(config(source), dtype="bfloat16", trains_vision=True)
    rank = TrainerRank(settings, World(0, 1, torch.device("cpu")))
    for number, size in enumerate(change_sizes):
        rank.create_model(
            f"m{number}", Trainable(rank=8, seed=number, train_vision=True, layout=layouts[number % len(layouts)])
        )
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for half in lora_model(rank, f"m{number}").tensors.values():
                half.add_(torch.empty(half.shape).normal_(0, size, generator=generator))
    return rank
