"""Bases in bfloat16 that are quantised to fp8 as they are read: every byte is that of a published file.

pytest tests/contract/test_fp8_at_load.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.factories import make_renderer
from tests.fp8_scores import assert_scored_alike
from tests.models import DIVIDED_IN_FP8, FAMILIES, make_tiny_text, make_tiny_vl, publish_in_fp8
from tests.trainers import config
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.loading import load

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


@pytest.mark.slow
async def test_an_engine_of_two_ranks_scores_a_base_that_is_quantised_at_load_as_the_trainer(tmp_path: Path) -> None:
    make, num_ranks = DIVIDED_IN_FP8["Qwen3 MoE"]
    spec = replace(config(make(tmp_path / "model")), base_precision="fp8")
    await assert_scored_alike(spec, tmp_path, num_ranks)
