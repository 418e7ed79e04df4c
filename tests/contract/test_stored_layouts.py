"""Stored runs go on in their own LoRA layout under a server whose new models have another.

pytest tests/contract/test_stored_layouts.py
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import make_tiny_qwen3_5
from tests.recovery import RealTrainer, create, finished, server, train
from tests.submitting import Client
from tinker_server.api_schemas.training import Layout, LoraConfig
from tinker_server.api_schemas.weights import LoadWeightsRequest, SaveWeightsRequest, TinkerPath

pytestmark = pytest.mark.usefixtures("forked_ranks")

OTHER: dict[Layout, Layout] = {"own": "service", "service": "own"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with experts: both its linears and its experts differ in the layouts."""
    return make_tiny_qwen3_5(tmp_path_factory.mktemp("hybrid") / "model", moe=True)


def backend(source: Path, layout: Layout) -> RealTrainer:
    """Whose new models have this layout."""
    made = RealTrainer(source)
    made.tiny.info = replace(made.tiny.info, lora_layout=layout, numerics={})
    return made


async def done(client: Client, request_id: str) -> None:
    result = await finished(client, request_id)
    assert not result.failed, result.body


@pytest.fixture(scope="module", params=OTHER)
def layout(request: pytest.FixtureRequest) -> Layout:
    name: Layout = request.param
    return name


@pytest.fixture(scope="module")
def undisturbed(layout: Layout, source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[bytes]]:
    """The results of three steps of a run of this layout on a server of the same."""

    async def run() -> list[list[bytes]]:
        async with server(tmp_path_factory.mktemp("undisturbed"), backend(source, layout)) as client:
            await create(client)
            results = [await train(client, 1)]
            await done(client, await client.save(4, "first"))
            return [*results, await train(client, 5), await train(client, 8)]

    return asyncio.run(run())


async def train_once(data_dir: Path, source: Path, layout: Layout) -> str:
    """Leave a run of one step with a checkpoint; return its session."""
    async with server(data_dir, backend(source, layout)) as client:
        await create(client)
        await train(client, 1)
        await done(client, await client.save(4, "first"))
        return client.session_id


async def test_a_run_goes_on_in_its_layout_and_is_replayed_in_it(
    layout: Layout, source: Path, tmp_path: Path, undisturbed: list[list[bytes]]
) -> None:
    session_id = await train_once(tmp_path, source, layout)
    other = backend(source, OTHER[layout])
    async with server(tmp_path, other, session_id) as client:
        second = await train(client, 5)
        other.kill()
        assert [second, await train(client, 8)] == undisturbed[1:]


async def count_up(client: Client, number: int, seq_ids: range) -> str:
    """Use these numbers of a model for saves: the data of a step are chosen by its number. Return the model's id."""
    model_id = f"{client.session_id}:train:{number}"
    for seq_id in seq_ids:
        request = SaveWeightsRequest(model_id=model_id, seq_id=seq_id, path=f"{seq_id}")
        await done(client, await client.submit("save_weights", request, seq_id, model_id))
    return model_id


async def load(client: Client, number: int, path: str) -> None:
    """Load a checkpoint into a fresh model, as SDKs before 0.16 resume a run."""
    await done(client, await client.create_model(number, lora_config=LoraConfig(rank=8, seed=2)))
    model_id = await count_up(client, number, range(1, 4))
    request = LoadWeightsRequest(model_id=model_id, seq_id=4, path=path, optimizer=True)
    await done(client, await client.submit("load_weights", request, 4, model_id))


async def test_a_checkpoint_gives_a_model_its_layout_however_it_is_loaded(
    layout: Layout, source: Path, tmp_path: Path, undisturbed: list[list[bytes]]
) -> None:
    session_id = await train_once(tmp_path, source, layout)
    other = backend(source, OTHER[layout])
    async with server(tmp_path, other, session_id) as client:
        path = f"tinker://{client.model_id}/weights/first"
        await load(client, 1, path)
        await done(client, await client.load_as(2, path, optimizer=True))
        await count_up(client, 2, range(1, 5))
        models = [f"{session_id}:train:{number}" for number in (1, 2)]
        runs, checkpoints = client.services.runs, client.services.checkpoints
        for model_id in models:
            assert (await runs.get(model_id)).trainable.layout == layout
        saved = await checkpoints.find(TinkerPath(models[1], "weights", "4"))
        assert saved is not None and saved.trainable.layout == layout
        found = [await train(client, 5, model_id) for model_id in models]
        other.kill()  # the snapshot that took the place of the loading is of its layout
        for second, model_id in zip(found, models, strict=True):
            assert [second, await train(client, 8, model_id)] == undisturbed[1:]
