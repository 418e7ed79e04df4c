"""Weights are there as long as something refers to them, and what refers to them gets no others."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.fakes import ADAPTER
from tests.submitting import Client, server
from tinker_server.api_schemas.checkpoints import CopyWeightsRequest, UploadStartRequest
from tinker_server.api_schemas.inputs import EncodedTextChunk, ModelInput
from tinker_server.api_schemas.sampling import SampleRequest, SamplingParams
from tinker_server.api_schemas.training import LoraConfig
from tinker_server.api_schemas.weights import LoadWeightsRequest, SaveWeightsForSamplerRequest
from tinker_server.auth.keys import LOCAL
from tinker_server.backends.protocol import InvalidInput, LoadedModel, SamplingTask
from tinker_server.errors import UnknownCheckpoint
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.records import SamplingSession


async def step(client: Client, number: int, model_id: str | None = None) -> None:
    await client.result(await client.forward_backward(number, model_id=model_id))
    assert not (await client.result(await client.optim_step(number + 1, model_id))).failed


async def load_into_another(client: Client) -> str:
    """Return the id of a model that is made of the weights saved as `latest`."""
    other, path = f"{client.session_id}:train:1", f"tinker://{client.model_id}/weights/latest"
    assert not (await client.result(await client.load_as(1, path, optimizer=True))).failed
    return other


async def require_lost(client: Client, model_id: str, number: int) -> None:
    client.trainer.lose(model_id)
    failed = await client.result(await client.forward_backward(number, model_id=model_id))
    assert "cannot be restored" in str(failed.body) and "was saved anew" in str(failed.body)


async def refuse_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_model_is_not_restored_by_weights_that_were_saved_anew_under_the_path_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot failed, so that its log begins with the path that it was loaded from."""
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await step(client, 1)
        await client.result(await client.save(3, "latest"))
        monkeypatch.setattr(client.trainer, "snapshot", refuse_to_write)
        other = await load_into_another(client)
        await step(client, 4)
        assert not (await client.result(await client.save(6, "latest", overwrite=True))).failed
        await step(client, 1, other)
        await require_lost(client, other, 3)


async def test_a_model_is_not_restored_by_weights_that_were_being_saved_when_it_was_loaded_from_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await client.result(await client.save(1, "latest"))
        await step(client, 2)
        save, waits, goes_on = client.trainer.save, asyncio.Event(), asyncio.Event()

        async def wait_and_save(*arguments: Any) -> None:
            waits.set()
            await goes_on.wait()
            await save(*arguments)

        monkeypatch.setattr(client.trainer, "save", wait_and_save)
        monkeypatch.setattr(client.trainer, "snapshot", refuse_to_write)
        saving = await client.save(4, "latest", overwrite=True)
        await waits.wait()
        other = await load_into_another(client)
        goes_on.set()
        assert not (await client.result(saving)).failed
        await require_lost(client, other, 1)


async def test_a_model_is_restored_by_weights_that_were_saved_after_their_load_was_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await step(client, 1)
        path = f"tinker://{client.model_id}/weights/latest"
        monkeypatch.setattr(client.trainer, "snapshot", refuse_to_write)
        request = LoadWeightsRequest(model_id=client.model_id, seq_id=4, path=path, optimizer=True)
        loading = await client.submit("load_weights", request, 4)  # it waits for the save, which has the number before
        await client.result(await client.save(3, "latest"))
        assert not (await client.result(loading)).failed
        client.trainer.lose(client.model_id)
        assert not (await client.result(await client.forward_backward(5))).failed
        assert client.trainer.steps[client.model_id] == 1


async def test_a_copy_of_weights_that_are_deleted_meanwhile_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its files may be there."""
    async with server(tmp_path) as client:
        services = client.services
        await client.result(await client.create_model())
        await client.result(await client.save_named_for_sampler(1, "latest"))
        path = f"tinker://{client.model_id}/sampler_weights/latest"
        copy = services.storage.copy

        async def copy_what_is_left(source: str, target: str) -> None:
            directory = services.storage.path(await services.checkpoints.take(parse_path(path), LOCAL))
            (directory / "adapter_model.safetensors").unlink()
            await copy(source, target)

        monkeypatch.setattr(services.storage, "copy", copy_what_is_left)
        request = CopyWeightsRequest(source_path=path, destination_project_id="p")
        with pytest.raises(UnknownCheckpoint, match="was deleted, or saved anew, while it was copied"):
            await services.copying.copy(request, None, LOCAL, {LOCAL})


async def test_an_owners_copy_waits_for_no_other_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server(tmp_path) as client:
        services = client.services
        await client.result(await client.create_model())
        await client.result(await client.save_named_for_sampler(1, "latest"))
        path = f"tinker://{client.model_id}/sampler_weights/latest"
        copy, waits, goes_on = services.storage.copy, asyncio.Event(), asyncio.Event()

        async def copy_later(source: str, target: str) -> None:
            waits.set()
            await goes_on.wait()
            await copy(source, target)

        request = CopyWeightsRequest(source_path=path, destination_project_id="p")
        monkeypatch.setattr(services.storage, "copy", copy_later)
        slow = asyncio.create_task(services.copying.copy(request, None, LOCAL, {LOCAL}))
        await waits.wait()
        monkeypatch.setattr(services.storage, "copy", copy)
        await asyncio.wait_for(services.copying.copy(request, None, "another", {LOCAL}), 10)
        assert not slow.done()
        goes_on.set()
        await slow


async def test_a_sample_whose_engine_dies_goes_on_with_the_newer_weights_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it began with are deleted two saves later, so that another engine does not find them."""
    async with server(tmp_path) as client:
        await client.result(await client.create_model())

        async def save(number: int) -> str:
            values: dict[str, Any] = {"seq_id": number, "sampling_session_seq_id": number, "kind": "inflight"}
            request = SaveWeightsForSamplerRequest(model_id=client.model_id, **values)
            saved = await client.result(await client.submit("save_weights_for_sampler", request, number))
            return str(json.loads(saved.body)["sampling_session_id"])

        session, draw = await save(1), client.sampler.sample
        begun, died = asyncio.Event(), asyncio.Event()

        async def draw_in_another_engine(task: SamplingTask) -> Any:
            begun.set()
            await died.wait()
            if task.weights is None or not task.weights.is_dir():
                raise InvalidInput("the sampler weights no longer exist")
            return await draw(task)

        monkeypatch.setattr(client.sampler, "sample", draw_in_another_engine)
        prompt = ModelInput(chunks=[EncodedTextChunk(tokens=np.array([1, 2]))])
        request = SampleRequest(
            sampling_session_id=session, seq_id=0, prompt=prompt, sampling_params=SamplingParams(max_tokens=1)
        )
        sampling = await client.submit("sample", request, 0, session)
        await begun.wait()
        for number in (2, 3):
            await save(number)
        died.set()
        assert not (await client.result(sampling)).failed


async def test_an_upload_that_is_read_is_not_deleted_as_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as client:
        uploads = client.services.uploads
        upload = await uploads.start(
            UploadStartRequest(base_model="tiny", lora_config=LoraConfig(rank=8)), None, client.owner
        )
        directory = uploads.folder.path(upload.upload_id)
        save_file(ADAPTER, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
        create, waits, goes_on = client.trainer.create_model, asyncio.Event(), asyncio.Event()

        async def wait_and_create(*arguments: Any) -> LoadedModel:
            waits.set()
            await goes_on.wait()
            return await create(*arguments)

        monkeypatch.setattr(client.trainer, "create_model", wait_and_create)
        finishing = asyncio.create_task(uploads.finish(upload.upload_id, client.owner))
        await waits.wait()
        await uploads.folder.delete_expired(upload.expires + 3601)
        assert (directory / "adapter_model.safetensors").is_file()
        goes_on.set()
        await asyncio.wait([finishing])


async def test_a_session_of_named_weights_keeps_none_that_were_released(tmp_path: Path) -> None:
    """They are deleted by the next server where this one is killed before it deletes them."""
    async with server(tmp_path) as client:
        await client.result(await client.create_model())
        await client.result(await client.save_named_for_sampler(1, "a"))
        path = f"tinker://{client.model_id}/sampler_weights/a"
        released = await client.services.checkpoints.take(parse_path(path), LOCAL)
        made = SamplingSession(
            owner=LOCAL,
            sampling_session_id=f"{client.session_id}:sample:0",
            session_id=client.session_id,
            base_model="tiny",
            directory=released,
            created_at=time.time(),
        )
        await client.services.samplers.create(replace(made, model_path=path))
        await client.services.storage.delete_unreferenced(time.time() + 1e6)
        assert not client.services.storage.holds(released)
