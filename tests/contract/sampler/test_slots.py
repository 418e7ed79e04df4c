"""In bfloat16 no text distinguishes a wrong adapter from the right one, so each slot of the engine is compared with
the adapter's files."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from vllm.v1.engine.async_llm import AsyncLLM

from tests.slots import BFLOAT16_NATS, running_engine, seeing_trainer, trained_scores
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.engine.adapters import AdapterLoader
from tinker_server.backends.sampler.engine.sequences import score
from tinker_server.backends.sampler.engine.versions import VersionCache
from tinker_server.backends.trainer.rank import TrainerRank

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = list(range(10, 40))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tiny_vl: Path, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncLLM]:
    async with running_engine(tiny_vl, renderer, tmp_path_factory.mktemp("scratch")) as running:
        yield running


@pytest.fixture(scope="module")
def rank(tiny_vl: Path) -> TrainerRank:
    """Of three models that train towers: small as after a few steps."""
    return seeing_trainer(tiny_vl, 1e-4, 1e-4, 1e-4)


@pytest.fixture(scope="module")
def saved(rank: TrainerRank, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The models' weights."""
    directories = [tmp_path_factory.mktemp(name) / "saved" for name in rank.models]
    for name, directory in zip(rank.models, directories, strict=True):
        rank.save_sampler_weights(name, directory, for_elsewhere=False)
    return directories


@pytest.fixture(scope="module")
def adapters(engine: AsyncLLM, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> VersionCache:
    return VersionCache(tmp_path_factory.mktemp("scratch"), AdapterLoader(engine, renderer, "bfloat16"))


async def test_what_was_trained_and_saved_is_what_the_slots_hold(engine, adapters, saved, rank):
    found = []
    for weights in (*saved, *saved):  # more than there are slots, so that each is filled again
        async with adapters.hold(weights) as held:
            found.append((await score(engine, TEXT, await adapters.load(held))).tolist())
    assert found[:3] == found[3:]
    for scores, name in zip(found, rank.models, strict=False):
        np.testing.assert_allclose(scores, trained_scores(rank, name, TEXT), rtol=0, atol=BFLOAT16_NATS)


@pytest.mark.parametrize(
    ("how", "part_of_name"),
    [
        ("missing", "layers.1.self_attn.o_proj"),
        ("missing", "lm_head"),
        ("missing", "visual.blocks.0.mlp"),
        ("doubled", "layers.0.mlp.down_proj"),
        ("doubled", "visual.merger"),
        ("another layer's", "self_attn.qkv_proj"),
        ("slices turned", "layers.0.mlp.gate_up_proj"),
        ("left from before", "layers.0.self_attn.o_proj"),
    ],
)
async def test_an_adapter_that_is_put_wrongly_into_its_slot_is_not_sampled_from(
    engine, adapters, saved, how, part_of_name, tmp_path
):
    weights = shutil.copytree(saved[0], tmp_path / "never loaded")
    (names,) = await engine.collective_rpc("fill_wrongly", args=(how, part_of_name, 2))
    assert names
    async with adapters.hold(weights) as held:
        with pytest.raises(BackendFailed, match=f"in the engine's slot .*{names[0]}.* hold other values than the file"):
            await adapters.load(held)
    async with adapters.hold(weights) as held:
        await adapters.load(held)


async def test_a_slot_that_was_filled_wrongly_once_is_filled_again(engine, adapters, saved):
    async with adapters.hold(saved[0]) as held:
        right = await score(engine, TEXT, await adapters.load(held))
    await adapters_leave(engine, adapters, saved)
    await engine.collective_rpc("fill_wrongly", args=("doubled", "layers.0.mlp.down_proj", 1))
    async with adapters.hold(saved[0]) as held:
        assert (await score(engine, TEXT, await adapters.load(held))).tolist() == right.tolist()


async def test_a_slot_that_stays_wrong_in_a_step_gives_its_own_sequences_nan_and_others_their_numbers(
    engine, adapters, saved
):
    async with adapters.hold(saved[0]) as held, adapters.hold(saved[1]) as other:
        lora, others = await adapters.load(held), await adapters.load(other)
        right = await score(engine, TEXT, lora)
        others_right = await score(engine, TEXT, others)
        await adapters_leave(engine, adapters, saved)
        await engine.collective_rpc("fill_wrongly", args=("missing", "layers.0.mlp.down_proj", 2))
        assert np.isnan(await score(engine, [*TEXT, 5], lora)).all()
        assert (await score(engine, TEXT, others)).tolist() == others_right.tolist()
        await adapters_leave(engine, adapters, saved)
        assert (await score(engine, TEXT, lora)).tolist() == right.tolist()


async def adapters_leave(engine: AsyncLLM, adapters: VersionCache, saved: list[Path]) -> None:
    """All slots are taken by others."""
    for weights in saved[1:]:
        async with adapters.hold(weights) as held:
            await score(engine, TEXT, await adapters.load(held))
