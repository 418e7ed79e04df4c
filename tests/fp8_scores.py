"""Scores of a base in fp8, by the engine and by the trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from tests.engines import fork_sampler
from tests.factories import make_renderer
from tests.sampling import ATOL, sampler_config, score_distances
from tests.trainers import LORA, perturb
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank


async def assert_scored_alike(spec: ModelSpec, tmp_path: Path, num_ranks: int = 1) -> None:
    """The scores of the base and of an adapter, by an engine of so many ranks, are those of the trainer, which has this
    spec."""
    source = Path(spec.directory)
    renderer = make_renderer(source)
    # In which alone the engine has linear attention on the CPU.
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if renderer.family.needs_bfloat16_on_cpu else "float32"
    rank = TrainerRank(replace(spec, dtype=dtype), World(0, 1, torch.device("cpu")))
    for name in ("fresh", "a"):
        rank.create_model(name, LORA)
    perturb(rank, "a")
    rank.save_sampler_weights("a", tmp_path / "a", for_elsewhere=False)
    of_engine = replace(
        sampler_config(source, tmp_path / "scratch"),
        dtype=dtype,
        is_quantised=spec.is_quantised,
        base_precision=spec.base_precision,
        tensor_parallel=num_ranks,
    )
    running = SamplerPool(of_engine, fork_sampler)
    await running.start()
    try:
        for name, weights in (("fresh", None), ("a", tmp_path / "a")):
            apart = await score_distances(running, weights, rank, name, renderer)
            assert apart.max() < ATOL if dtype == "float32" else apart.mean() < 0.03
    finally:
        await running.stop()
