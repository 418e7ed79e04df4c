"""Data directories of servers that trained all weights of models (`serve --full` of tinker-server 0.1.0).

pytest tests/contract/test_whole_models.py
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import sqlalchemy as sa

from tests.fake_server import Running, forward_backward_body
from tinker_server.store.database import Database

KINDS = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}
FULL = {
    "rank": 32,
    "seed": 1,
    "train_unembed": True,
    "train_mlp": True,
    "train_attn": True,
    "train_vision": False,
    "full": True,
}
"""`trainable` as that server recorded it."""
REFUSAL = (
    "cannot be loaded: all weights of the model were trained, and only tinker-server 0.1.0 started with --full can load"
    " that; an archive of its weights can still be downloaded, and deleted"
)


class Old(NamedTuple):
    """A server on the directory, the model, and the paths of its checkpoints by kind."""

    server: Running
    model_id: str
    paths: dict[str, str]

    def checkpoint(self, kind: str) -> str:
        return f"/training_runs/{self.model_id}/checkpoints/{kind}/kept"


@pytest.fixture
def old(tmp_path: Path, database_url: str) -> Iterator[Old]:
    before = Running(tmp_path / "data", database_url=database_url)
    model_id = before.model()
    content = {"content-type": "application/x-protobuf"}
    before.result(before.http.post("/forward_backward", content=forward_backward_body(model_id, 1), headers=content))
    paths = {}
    for number, (operation, kind) in enumerate(KINDS.items()):
        saved = before.post(f"/{operation}", model_id=model_id, seq_id=2 + number, path="kept")
        paths[kind] = before.result(saved).json()["path"]
    before.stop()
    asyncio.run(mark_as_whole(database_url))
    server = Running(tmp_path / "data", database_url=database_url)
    yield Old(server, model_id, paths)
    server.stop()


async def mark_as_whole(database_url: str) -> None:
    """Record the run and its checkpoints as the older server did, and the run as in memory when that was killed."""
    db = Database(database_url)
    async with db.write_rows() as connection:
        for name, values in (("training_runs", {"status": "active"}), ("checkpoints", {})):
            columns = [sa.column("trainable", sa.JSON), sa.column("status", sa.String)]
            await connection.execute(sa.update(sa.table(name, *columns)).values(trainable=FULL, **values))
    await db.close()


def require_refused(answer: httpx.Response, status: int, name: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error" if status == 200 else "detail"] == f"{name} {REFUSAL}"
    assert status != 200 or answer.json()["category"] == "user"


def test_runs_and_checkpoints_of_whole_models_are_listed_as_such(old: Old) -> None:
    run = old.server.http.get(f"/training_runs/{old.model_id}").json()
    assert (run["is_lora"], run.get("lora_rank")) == (False, None)
    listed = old.server.http.get(f"/training_runs/{old.model_id}/checkpoints").json()["checkpoints"]
    assert {checkpoint["tinker_path"] for checkpoint in listed} == {*old.paths.values()}
    for path in old.paths.values():
        info = old.server.post("/weights_info", tinker_path=path).json()
        assert (info["is_lora"], info.get("lora_rank")) == (False, None)
    page = httpx.get(f"{old.server.url}/runs/{old.model_id}", headers=dict(old.server.http.headers))
    assert page.status_code == 200 and "all weights" in page.text


def test_a_whole_model_is_neither_trained_on_nor_loaded_nor_sampled_from(old: Old) -> None:
    server, session_id, path = old.server, old.server.session(), old.paths["weights"]
    step = server.post("/optim_step", model_id=old.model_id, seq_id=4, adam_params={})
    require_refused(server.result(step), 200, old.model_id)
    for target in ({"session_id": session_id, "model_seq_id": 0}, {"model_id": server.model(), "seq_id": 1}):
        require_refused(server.result(server.post("/load_weights", path=path, **target)), 200, path)
    for path in old.paths.values():
        session = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
        require_refused(server.post("/create_sampling_session", **session), 400, path)
        sample = {"prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 1}}
        require_refused(server.post("/asample", model_path=path, seq_id=0, **sample), 400, path)
    assert server.backend.tiny.sampler.num_begun == 0
    assert old.model_id not in server.backend.tiny.trainer.models


def test_archives_of_whole_models_are_downloaded_and_both_run_and_checkpoints_deleted(old: Old) -> None:
    server = old.server
    for kind in old.paths:
        archive = server.http.get(f"{old.checkpoint(kind)}/archive", follow_redirects=True)
        assert archive.status_code == 200 and archive.content
        assert server.http.delete(old.checkpoint(kind)).status_code == 204
    unloaded = server.result(server.post("/unload_model", model_id=old.model_id))
    assert unloaded.json()["model_id"] == old.model_id
    assert server.http.get(f"/training_runs/{old.model_id}/checkpoints").json()["checkpoints"] == []
