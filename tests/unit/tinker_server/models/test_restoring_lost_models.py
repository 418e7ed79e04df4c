"""The server restores models of a trainer that has ended, without a request for them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.submitting import Client, server
from tests.waiting import until
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.protocol import BackendFailed, EncodedBatch, LoadedModel, ModelLost


async def two_models(client: Client) -> list[str]:
    """Each with a step."""
    for number in range(2):
        await client.result(await client.create_model(number))
        await client.result(await client.optim_step(1, f"{client.session_id}:train:{number}"))
    return [f"{client.session_id}:train:{number}" for number in range(2)]


async def test_models_come_back_without_an_operation_and_are_what_they_were(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        names = await two_models(client)
        await client.trainer.die()
        await until(lambda: client.trainer.steps == dict.fromkeys(names, 1))
        calls = list(client.trainer.calls)
        assert not (await client.result(await client.optim_step(2))).failed
        assert client.trainer.calls == [*calls, ("optim_step", names[0])], "it was restored twice"


async def test_models_on_disk_and_unloaded_ones_stay_where_they_are(tmp_path: Path) -> None:
    async with server(tmp_path) as client:
        first, second = await two_models(client)
        await client.result(await client.create_model(2))
        await client.services.scheduler.suspend(first)
        await client.services.scheduler.drop(second)
        await client.trainer.die()
        await until(lambda: client.trainer.steps == {f"{client.session_id}:train:2": 0})
        assert (await client.services.runs.get(first)).status == "suspended"


async def test_a_model_under_whose_restoration_the_trainer_ends_twice_waits_for_its_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as client:
        first, second = await two_models(client)
        create, tries = client.trainer.create_model, 0

        async def deadly(model_id: str, lora: Trainable, owner: str, snapshot: Path | None) -> LoadedModel:
            nonlocal tries
            if model_id == first:
                tries += 1
                await client.trainer.die()
                raise ModelLost("the trainer ended")
            return await create(model_id, lora, owner, snapshot)

        monkeypatch.setattr(client.trainer, "create_model", deadly)
        await client.trainer.die()
        await until(lambda: client.trainer.steps == {second: 1} and tries == 2)
        await asyncio.sleep(0.1)
        assert tries == 2
        monkeypatch.setattr(client.trainer, "create_model", create)
        assert not (await client.result(await client.optim_step(2, first))).failed


async def test_half_a_restored_model_is_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps would be gone, and all that follow would go on from there without an error."""
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        for number in (1, 3, 5):
            await client.result(await client.forward_backward(number))
            await client.result(await client.optim_step(number + 1))
        compute, count = client.trainer._forward_backward, 0

        async def fail_once(model: LoadedModel, batch: EncodedBatch, backward: bool) -> Any:
            nonlocal count
            count += 1
            if count == 2:
                raise BackendFailed("the GPU's memory is full")
            return await compute(model, batch, backward)

        monkeypatch.setattr(client.trainer, "_forward_backward", fail_once)
        client.trainer.lose(client.model_id)
        assert (await client.result(await client.forward_backward(7))).failed
        assert (await client.result(await client.optim_step(8))).failed, "a part of its batch failed"
        await client.result(await client.forward_backward(9))
        stepped = await client.result(await client.optim_step(10))
        assert json.loads(stepped.body)["metrics"]["step"] == 4
