"""An owner that holds as much as one may is refused by name, and deleting makes room.

pytest tests/contract/test_holdings.py
"""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests import fakes
from tests.fake_server import Running, forward_backward_body
from tinker_server import app
from tinker_server.accounts import HOUR_S, RECORDS_BYTES
from tinker_server.auth import keys
from tinker_server.operations.housekeeping import ARCHIVE_KEPT_S
from tinker_server.store import directories, disk_account, holdings
from tinker_server.store.client_metrics import VALUE_BYTES
from tinker_server.store.futures import fetched
from tinker_server.weights import archives


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    key = keys.add(tmp_path / "keys", "alice")
    running = Running(tmp_path)
    running.http.headers["x-api-key"] = key
    yield running
    running.stop()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB is free, and a little for rows. The fakes save one each: nine of them are at most nine tenths of all."""
    write_steps = fakes._write_steps

    def write(directory: Path, steps: int) -> None:
        write_steps(directory, steps)
        with (directory / "padding").open("wb") as file:
            file.truncate(1 << 20)

    monkeypatch.setattr(fakes, "_write_steps", write)
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=(1 << 20) + (1 << 16)))
    monkeypatch.setattr(disk_account, "AGAIN_S", 0)


@pytest.mark.parametrize("asks", ["a copy", "an upload"])
def test_an_archive_and_what_comes_beside_it_do_not_both_take_the_same_room(
    server: Running, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """Of 3.2 MiB, 90% may be the owner's. The weights take a MiB, the archive another: there is no third."""
    mib, begun, go_on = 1 << 20, threading.Event(), threading.Event()
    write_steps, pack = fakes._write_steps, archives._pack

    def write(directory: Path, steps: int) -> None:
        write_steps(directory, steps)
        (directory / "padding").write_bytes(os.urandom(mib))

    def find_free(root: Path) -> SimpleNamespace:
        files = [file for folder in ("checkpoints", "archives") for file in (root / folder).rglob("*")]
        return SimpleNamespace(free=16 * mib // 5 - sum(file.stat().st_size for file in files if file.is_file()))

    def pack_later(directory: Path, archive: Path) -> None:
        begun.set()
        assert go_on.wait(20)
        pack(directory, archive)

    monkeypatch.setattr(fakes, "_write_steps", write)
    monkeypatch.setattr(holdings, "disk_usage", find_free)
    monkeypatch.setattr(archives, "_pack", pack_later)
    base = server.backend.tiny
    base.info = replace(base.info, adapter_bytes=mib // 8)
    path = saved(server, server.model(), 1).json()["path"]
    run_id, _, name = path.removeprefix("tinker://").partition("/")
    copy = {"source_path": path, "destination_project_id": "p"}
    upload = {"base_model": "tiny", "lora_config": {"rank": 8}}
    more = ("/copy_weights", copy) if asks == "a copy" else ("/external_weights_upload_start", upload)
    with ThreadPoolExecutor(2) as threads:
        archive = f"/training_runs/{run_id}/checkpoints/{name}/archive"
        packing = threads.submit(server.http.get, archive, follow_redirects=True)
        assert begun.wait(20)
        asked = threads.submit(server.http.post, more[0], json=more[1])
        time.sleep(0.5)
        go_on.set()
        assert packing.result().status_code == 200
        refused = asked.result()
    assert refused.status_code == 400 and refused.json()["error"] == "LimitReached"


def created(server: Running, session_id: str, number: int) -> dict[str, str]:
    body = {"session_id": session_id, "model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 8}}
    answer: dict[str, str] = server.result(server.post("/create_model", **body)).json()
    return answer


def saved(server: Running, model_id: str, number: int) -> httpx.Response:
    return server.result(server.post("/save_weights", model_id=model_id, seq_id=number, path=f"n{number}"))


def test_an_owner_has_so_many_models_and_unloading_one_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MODELS_PER_OWNER", 2)
    alice, bob = (keys.add(tmp_path / "keys", name) for name in ("alice", "bob"))
    server = Running(tmp_path)
    try:
        server.http.headers["x-api-key"] = alice
        session_id = server.session()
        first = created(server, session_id, 0)["model_id"]
        created(server, session_id, 1)
        refused = created(server, session_id, 2)
        assert refused["category"] == "user"
        assert refused["error"].startswith("2 models of alice are in memory or on disk; 2 are allowed")
        server.http.headers["x-api-key"] = bob
        assert "model_id" in created(server, server.session(), 0)
        server.http.headers["x-api-key"] = alice
        server.result(server.post("/unload_model", model_id=first))
        assert "model_id" in created(server, session_id, 3)
    finally:
        server.stop()


def test_an_owners_part_of_the_disk_is_bounded_and_deleting_makes_room(server: Running, full_disk: None) -> None:
    model_id = server.model()
    for number in range(1, 10):
        assert saved(server, model_id, number).json()["path"].endswith(f"/weights/n{number}")
    refused = saved(server, model_id, 10).json()
    assert refused["category"] == "user" and "of alice would take" in refused["error"] and "90%" in refused["error"]
    unnamed = server.post(
        "/save_weights_for_sampler", model_id=model_id, seq_id=11, sampling_session_seq_id=5, kind="snapshot"
    )
    assert server.result(unnamed).json()["category"] == "user"
    copy = {"source_path": f"tinker://{model_id}/weights/n1", "session_id": server.session(), "model_seq_id": 0}
    assert server.post("/copy_weights", **copy).status_code == 400
    names = {path.name.partition("~")[0] for path in server.settings.data_dir.glob("checkpoints/*/*/*")}
    assert names == {f"n{number}" for number in range(1, 10)}, "nothing is left of what was refused"
    again = server.post("/save_weights", model_id=model_id, seq_id=12, path="n9", overwrite=True)
    assert "path" in server.result(again).json(), "what takes another's place needs no more room"
    assert server.http.delete(f"/training_runs/{model_id}/checkpoints/weights/n1").status_code == 204
    assert "path" in saved(server, model_id, 13).json()


def test_snapshots_are_never_refused_and_count(bob: dict[str, str], server: Running, full_disk: None) -> None:
    model_id = server.model()
    for number in range(1, 10):
        saved(server, model_id, number)
    content = {"content-type": "application/x-protobuf"}
    step = server.http.post("/forward_backward", content=forward_backward_body(model_id, 10), headers=content)
    assert server.result(step).status_code == 200
    suspended = server.app.state.services.scheduler.suspend(model_id)
    asyncio.run_coroutine_threadsafe(suspended, server.loop).result(20)
    snapshots = list(server.settings.data_dir.glob("checkpoints/*/snapshots/model~*"))
    sweep = server.app.state.services.disk.sweep(time.time())
    asyncio.run_coroutine_threadsafe(sweep, server.loop).result(20)
    again = forward_backward_body(model_id, 11)
    refused = server.http.post("/forward_backward", content=again, headers=content)
    assert refused.status_code == 429 and "retry-after" in refused.headers
    assert "results, metrics and samples of alice would take 0.010 GiB" in refused.json()["detail"]
    others = server.http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}, headers=bob).json()
    lora = {"session_id": others["session_id"], "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
    assert server.http.post("/create_model", json=lora, headers=bob).status_code == 200, "another owner's part is free"
    assert server.http.delete(f"/training_runs/{model_id}/checkpoints/weights/n1").status_code == 204
    assert len(snapshots) == 1
    step = server.http.post("/forward_backward", content=again, headers=content)
    assert server.result(step).status_code == 200, "it is sent again, and is let in"
    assert saved(server, model_id, 12).json()["category"] == "user", "eight, the snapshot, and no room for a tenth"
    step = server.http.post("/forward_backward", content=forward_backward_body(model_id, 13), headers=content)
    assert server.result(step).status_code == 200, "it is back from its snapshot"


@pytest.fixture
def bob(tmp_path: Path) -> dict[str, str]:
    """Headers of another owner, whose key is there when the server starts."""
    return {"x-api-key": keys.add(tmp_path / "keys", "bob")}


def test_reported_metrics_fill_an_owners_part_which_then_takes_neither_metrics_nor_samples(
    bob: dict[str, str], server: Running, full_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/training_runs/{server.model()}/metrics"
    metrics = {f"m{number}": 1.0 for number in range(500)}
    posts = (server.http.post(path, json={"step": step, "metrics": metrics}) for step in range(100))
    num_taken, refused = next((step, answer) for step, answer in enumerate(posts) if answer.status_code != 204)
    assert refused.status_code == 429 and "metrics and samples of alice would take" in refused.json()["detail"]
    assert num_taken * 500 * VALUE_BYTES == pytest.approx(9 << 20, rel=0.15), "nine tenths, and a tenth is free"
    monkeypatch.setattr(holdings, "disk_usage", lambda _: SimpleNamespace(free=1 << 16))
    assert server.http.post(path, json={"step": 100, "metrics": metrics}).status_code == 429, (
        "the disk is measured anew"
    )
    asked: dict[str, object] = {"base_model": "tiny", "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}}
    asked |= {"sampling_params": {"max_tokens": 1}, "num_samples": 1}
    assert server.post("/asample", **asked).status_code == 429
    assert server.http.post("/asample", json=asked, headers=bob).status_code == 200


def test_a_copy_that_the_disk_has_no_room_for_is_refused_and_its_source_is_not_called_deleted(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model_id = created(server, server.session(), 0)["model_id"]
    assert saved(server, model_id, 1).status_code == 200
    copy = {"source_path": f"tinker://{model_id}/weights/n1", "destination_project_id": "p"}
    with monkeypatch.context() as full:
        full.setattr(directories, "link", fill)
        refused = server.post("/copy_weights", **copy)
    assert refused.status_code == 503 and "the copy cannot be written" in refused.text
    assert server.post("/copy_weights", **copy).status_code == 200


def test_an_archive_that_another_owner_asked_for_is_held_for_an_hour(
    bob: dict[str, str], server: Running, tmp_path: Path
) -> None:
    model_id = created(server, server.session(), 0)["model_id"]
    assert saved(server, model_id, 1).status_code == 200
    route = f"/training_runs/{model_id}/checkpoints/weights/n1"
    assert server.http.post(f"{route}/publish").status_code == 204
    services = server.app.state.services

    def held() -> int:
        counting = services.holdings.part("alice")
        part: holdings.Part = asyncio.run_coroutine_threadsafe(counting, server.loop).result(20)
        return part.held_bytes

    def sweep(after_s: float) -> None:
        sweeping = services.housekeeper.sweep_weights(time.time() + after_s)
        asyncio.run_coroutine_threadsafe(sweeping, server.loop).result(20)

    without = held()
    link = server.http.get(f"{route}/archive", headers=bob).headers["location"]
    assert httpx.get(link).status_code == 200 and held() > without
    being_written = tmp_path / "archives" / ".being-written"
    being_written.touch()
    sweep(ARCHIVE_KEPT_S - 60)
    assert held() > without
    sweep(ARCHIVE_KEPT_S + 60)
    assert held() == without and being_written.exists()
    assert httpx.get(link).status_code == 200, "it is packed again while the link is valid"


def test_a_result_that_was_fetched_goes_and_one_that_was_not_stays(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "NOTED_BYTES", 1)
    monkeypatch.setattr(fetched, "LARGE_BYTES", 1)
    content, model_id = {"content-type": "application/x-protobuf"}, server.model()
    steps = [
        server.http.post("/forward_backward", content=forward_backward_body(model_id, number), headers=content)
        for number in (1, 2)
    ]
    first = server.result(steps[1]).content
    assert server.result(steps[1]).content == first, "its client may ask again"
    services = server.app.state.services

    def sweep(after_s: float) -> None:
        sweeping = services.disk.sweep(time.time() + after_s)
        asyncio.run_coroutine_threadsafe(sweeping, server.loop).result(20)

    sweep(fetched.RESENT_S - 60)
    assert server.result(steps[1]).content == first
    sweep(fetched.RESENT_S + 60)
    polls = [server.post("/retrieve_future", request_id=step.json()["request_id"]) for step in steps]
    assert [poll.status_code for poll in polls] == [200, 410]


ONE = "/training_runs/{model_id}/checkpoints/weights/n1"
RECORDING = {
    "a session": ("POST", "/create_session", {"tags": [], "sdk_version": "0.38.0"}),
    "a sampling session": (
        "POST",
        "/create_sampling_session",
        {"session_id": "{session_id}", "sampling_session_seq_id": 7, "base_model": "tiny"},
    ),
    "a model": (
        "POST",
        "/create_model",
        {"session_id": "{session_id}", "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 8}},
    ),
    "a project": ("PUT", "/sessions/{session_id}/project", {"project_id": "p"}),
    "publishing": ("POST", f"{ONE}/publish", None),
    "hiding": ("DELETE", f"{ONE}/publish", None),
    "expiring": ("PUT", f"{ONE}/ttl", {"ttl_seconds": 3600}),
    "downloading": ("GET", f"{ONE}/archive", None),
    "copying": (
        "POST",
        "/copy_weights",
        {"source_path": "tinker://{model_id}/weights/n1", "session_id": "{session_id}", "model_seq_id": 9},
    ),
    "deleting": ("DELETE", ONE, None),
}
"""Requests that leave a record for good."""


@pytest.mark.parametrize(("method", "path", "body"), RECORDING.values(), ids=RECORDING)
def test_an_owner_leaves_so_many_records_in_an_hour(
    bob: dict[str, str], server: Running, method: str, path: str, body: dict[str, object] | None
) -> None:
    model_id = server.model()
    saved(server, model_id, 1)
    ids = {"model_id": model_id, "session_id": model_id.partition(":")[0]}
    filled = None if body is None else {k: v.format(**ids) if isinstance(v, str) else v for k, v in body.items()}
    records = server.app.state.services.records

    def asked() -> httpx.Response:
        return server.http.request(method, path.format(**ids), json=filled)

    records._added["alice"] = RECORDS_BYTES - 1000
    refused = asked()
    assert refused.status_code == 429 and "retry-after" in refused.headers
    assert f"have {RECORDS_BYTES} bytes, which is an owner's limit" in refused.json()["detail"]
    notes = {"tags": [], "user_metadata": {"note": "x" * 5000}, "sdk_version": "0.38.0"}
    other = server.http.post("/create_session", json=notes, headers=bob)
    assert other.status_code == 200 and records._added["bob"] > 5000
    records._began -= HOUR_S
    assert asked().status_code < 400
    assert 0 < records._added["alice"] < 10_000
