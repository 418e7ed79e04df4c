"""A base model's name that stands for other weights now: what was made on the old ones is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes import FakeBackend
from tests.submitting import Client, server
from tinker_server.app import serving
from tinker_server.auth.keys import LOCAL
from tinker_server.errors import OtherBaseModel
from tinker_server.settings import Settings
from tinker_server.weights.lookup import find_weights


async def saved_and_suspended(data_dir: Path) -> tuple[str, str]:
    """The id of a model that is on disk, and the path of its checkpoint."""
    async with server(data_dir) as before:
        await before.result(await before.create_model())
        path = json.loads((await before.result(await before.save(1, "a"))).body)["path"]
        await before.services.scheduler.suspend(before.model_id)
        return before.model_id, path


@pytest.mark.parametrize("other", [True, False])
async def test_neither_checkpoint_nor_suspended_model_is_loaded_on_other_weights(tmp_path: Path, other: bool) -> None:
    model_id, path = await saved_and_suspended(tmp_path)
    backend = FakeBackend()
    if other:
        backend.tiny.info = replace(backend.tiny.info, fingerprint="1" * 64)
    settings = Settings(data_dir=tmp_path, gap_grace_s=0.1, drain_s=0.1)
    async with serving(settings, backend) as services:
        session_id = model_id.partition(":")[0]
        client = Client(services, backend, session_id)
        outcomes = [await client.result(await client.load_as(1, path)), await client.result(await client.optim_step(2))]
        assert [outcome.failed for outcome in outcomes] == [other, other]
        if not other:
            await find_weights(services.models, services.checkpoints, None, path, LOCAL)
            return
        for outcome in outcomes:
            error = json.loads(outcome.body)
            assert error["category"] == "user" and "its weights differ" in error["error"]
        with pytest.raises(OtherBaseModel, match="its weights differ"):
            await find_weights(services.models, services.checkpoints, None, path, LOCAL)
