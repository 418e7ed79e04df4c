"""Models and checkpoints of a base model that is served no longer, or by other weights under the same name."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes import FakeBackend, FakeBaseModel
from tests.submitting import Client, server
from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.app import serving
from tinker_server.auth.keys import LOCAL
from tinker_server.errors import OtherBaseModel
from tinker_server.operations.housekeeping import SNAPSHOT_KEPT_S
from tinker_server.settings import Settings
from tinker_server.weights.lookup import find_weights


async def saved_and_suspended(data_dir: Path) -> tuple[str, str]:
    """The id of a model that is on disk, and the path of its checkpoint."""
    async with server(data_dir) as before:
        await before.result(await before.create_model())
        path = json.loads((await before.result(await before.save(1, "a"))).body)["path"]
        await before.services.scheduler.suspend(before.model_id)
        return before.model_id, path


def settings_in(data_dir: Path) -> Settings:
    return Settings(data_dir=data_dir, gap_grace_s=0.1, drain_s=0.1)


@pytest.mark.parametrize("other", [True, False])
async def test_neither_checkpoint_nor_suspended_model_is_loaded_on_other_weights(tmp_path: Path, other: bool) -> None:
    model_id, path = await saved_and_suspended(tmp_path)
    backend = FakeBackend()
    if other:
        backend.tiny.info = replace(backend.tiny.info, fingerprint="1" * 64)
    async with serving(settings_in(tmp_path), backend) as services:
        session_id = model_id.partition(":")[0]
        client = Client(services, backend, session_id)
        outcomes = [await client.result(await client.load_as(1, path)), await client.result(await client.optim_step(2))]
        assert [outcome.failed for outcome in outcomes] == [other, other]
        if not other:
            await find_weights(services.weights, None, path, LOCAL)
            return
        for outcome in outcomes:
            error = json.loads(outcome.body)
            assert error["category"] == "user" and "its weights differ" in error["error"]
        with pytest.raises(OtherBaseModel, match="its weights differ"):
            await find_weights(services.weights, None, path, LOCAL)


async def test_a_model_whose_base_is_no_longer_served_is_dropped_in_time_like_all_others(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.models["retired"] = FakeBaseModel("retired")
    async with serving(settings_in(tmp_path), backend) as services:
        session_id = await services.sessions.create(CreateSessionRequest(), None, LOCAL)
        client = Client(services, backend, session_id)
        for number, name in enumerate(("retired", "tiny")):
            await client.result(await client.create_model(number, base_model=name))
    assert len(snapshots(tmp_path)) == 2
    async with serving(settings_in(tmp_path), FakeBackend()) as services:
        await services.housekeeper.sweep_models(time.time() + SNAPSHOT_KEPT_S + 60)
        assert [(await services.runs.get(f"{session_id}:train:{number}")).status for number in range(2)] == ["lost"] * 2
        assert snapshots(tmp_path) == []


def snapshots(data_dir: Path) -> list[Path]:
    return [one for one in data_dir.glob("checkpoints/*/snapshots/model~*") if one.is_dir()]
