"""Bases in bfloat16 that are quantised to fp8 as they are read: every byte is that of a published file.

pytest tests/contract/test_fp8_at_load.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.factories import MIXED, cross_entropy, datum, make_renderer, prompt, words
from tests.fp8_scores import assert_scored_alike
from tests.models import DIVIDED_IN_FP8, FAMILIES, make_tiny_text, make_tiny_vl, publish_in_fp8
from tests.ranks import Stepped, on_slices, two_steps
from tests.trainers import LORA, assert_same, config
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.model_spec import Mesh
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.loading import load
from tinker_server.backends.trainer.rank import TrainerRank

MODELS: dict[str, Callable[[Path], Path]] = {
    "Qwen3": make_tiny_text,
    "Qwen3-VL": make_tiny_vl,
    "Qwen3-VL MoE": partial(make_tiny_vl, moe=True),
    **{
        kind: FAMILIES[kind] for kind in ("Qwen2 MoE", "Qwen3.5", "Qwen3.5 MoE", "Qwen3-Next", "DeepSeek-V3", "Gemma 3")
    },
}
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module", params=MODELS)
def sources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in bfloat16, and the same as it would be published in fp8."""
    directory = tmp_path_factory.mktemp("fp8")
    source = MODELS[request.param](directory / "whole")
    for path in source.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(path).items()}, path, {"format": "pt"})
    return source, publish_in_fp8(source, directory / "published")


def test_a_base_that_is_quantised_at_load_is_bitwise_the_published_base(sources) -> None:
    found = []
    for source in sources:
        renderer = make_renderer(source)
        spec = replace(config(source), dtype="bfloat16", base_precision="fp8")
        model = load(spec, find_family(renderer.config, str(source)), ALONE, is_sharded=False).model
        found.append(dict(model.named_parameters()))
    got, wanted = found
    assert got.keys() == wanted.keys()
    assert sum(one.dtype == torch.uint8 for one in got.values()) > 6
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and got[name].equal(tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["Qwen3-VL MoE", "Qwen3.5", "Qwen3-Next", "DeepSeek-V3"], indirect=True)
async def test_the_engine_scores_a_base_that_is_quantised_at_load_as_the_trainer(sources, tmp_path: Path) -> None:
    await assert_scored_alike(replace(config(sources[0]), base_precision="fp8"), tmp_path)


def in_layout(world: World, source: Path, is_sharded: bool) -> Stepped:
    """Outputs of two steps and the adapter after them, of ranks that share the base, or have it whole each."""
    ranks = {"shard": world.size} if is_sharded else {"replicate": world.size}
    spec = replace(config(source, 60), base_precision="fp8", mesh=Mesh(**ranks, context=world.num_slices))
    rank, renderer = TrainerRank(spec, world), make_renderer(source)
    packed = [one for one in rank.base.scorer.model.parameters() if one.dtype == torch.uint8]
    assert packed and all(isinstance(one, DTensor) == (is_sharded and world.size > 1) for one in packed)
    rank.create_model("m", LORA)
    texts = [prompt(words(length, length)) for length in (5, 23)]
    inputs = [*MIXED.values()] if renderer.takes_images else texts
    return two_steps(rank, "m", cross_entropy([datum(one, renderer, seed) for seed, one in enumerate(inputs)]))


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["Qwen3-VL MoE", "Qwen3-Next"], indirect=True)
def test_two_ranks_with_a_base_that_is_quantised_at_load_are_as_one(sources) -> None:
    wanted, wanted_weights = in_layout(ALONE, sources[0], False)
    for is_sharded, num_slices in product((True, False), (1, 2)):
        (found, weights), _ = on_slices(num_slices, 2, in_layout, sources[0], is_sharded)
        for step, wanted_step in zip(found, wanted, strict=True):
            for scores, wanted_scores in zip(step, wanted_step, strict=True):
                np.testing.assert_allclose(scores, wanted_scores, atol=1e-4)
        assert_same(weights, wanted_weights)


@pytest.mark.slow
async def test_an_engine_of_two_ranks_scores_a_base_that_is_quantised_at_load_as_the_trainer(tmp_path: Path) -> None:
    make, num_ranks = DIVIDED_IN_FP8["Qwen3 MoE"]
    spec = replace(config(make(tmp_path / "model")), base_precision="fp8")
    await assert_scored_alike(spec, tmp_path, num_ranks)
