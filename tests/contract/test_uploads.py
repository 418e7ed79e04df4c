"""Uploads of adapters on a backend of fakes: their links, their bounds, and whose they are.

pytest tests/contract/test_uploads.py; the numbers are tested in tests/e2e/test_uploaded_adapters.py.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import save

from tests.dashboard import Owner, with_keys
from tests.fake_server import Running
from tests.fakes import ADAPTER
from tests.uploading import FILES, Started
from tests.waiting import wait_until
from tinker_server.backends.protocol import InvalidInput, LoadedModel, ModelLost
from tinker_server.store.uploads import COMING, CONFIG_BYTES, KEPT_S
from tinker_server.weights import export

CONFIG = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 32}'
CONTENT = {"adapter_config.json": CONFIG, "adapter_model.safetensors": save(ADAPTER)}
START = {"base_model": "tiny", "lora_config": {"rank": 8}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    running, made = with_keys(tmp_path, "alice", "bob")
    running.http.headers["x-api-key"] = made[0]
    running.http.headers["x-stainless-package-version"] = "0.40.0"
    with Owner(running, made[1]) as bob:
        running.bob = bob  # type: ignore[attr-defined]
        yield running
    running.stop()


def started(server: Running, **headers: str) -> dict[str, Any]:
    answer = server.http.post("/external_weights_upload_start", json=START, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def sent(server: Running) -> dict[str, Any]:
    """An upload that has been started, with all its files."""
    begun = started(server)
    for name, content in CONTENT.items():
        put(begun["urls"][name], content)
    return begun


def put(link: str | dict[str, Any], content: bytes) -> httpx.Response:
    return httpx.put(link if isinstance(link, str) else link["url"], content=content, timeout=20)


def finish(server: Running, upload_id: str) -> httpx.Response:
    return server.post("/external_weights_upload_finish", upload_id=upload_id)


def test_an_upload_becomes_weights_that_are_listed_sampled_and_trained_on(server: Running) -> None:
    finished = Started.of(server.http, "tiny").put(CONTENT).finish()
    path = finished.json()["tinker_path"]
    assert path.endswith(":train:0/external_weights/uploaded")
    (listed,) = server.post("/checkpoints/search", checkpoint_type="external").json()["checkpoints"]
    assert listed["tinker_path"] == path and listed["base_model"] == "tiny"
    info = server.post("/weights_info", tinker_path=path).json()
    assert (info["lora_rank"], info["train_attn"], info["is_lora"]) == (8, True, True)
    session_id = server.session()
    loaded = server.post("/load_weights", session_id=session_id, model_seq_id=0, path=path)
    assert server.result(loaded).json()["model_id"] == f"{session_id}:train:0"
    sampled = server.post("/create_sampling_session", session_id=session_id, sampling_session_seq_id=0, model_path=path)
    assert sampled.status_code == 200, sampled.text
    assert server.result(server.sample(sampled.json()["sampling_session_id"])).status_code == 200
    (published,) = server.backend.tiny.sampler.published
    assert published.name == "peft" and published.parent.parent.name == "external_weights"
    run_id = path.removeprefix("tinker://").partition("/")[0]
    assert run_id not in server.backend.tiny.trainer.steps, "the model that read it stayed in memory"


def test_files_that_are_streamed_without_their_length_become_weights(server: Running, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    begun = Started.of(server.http, "tiny").upload(folder)
    kept = server.settings.data_dir / "uploads" / begun.upload_id
    assert {name: (kept / name).read_bytes() for name in FILES} == CONTENT
    assert begun.finish().json()["tinker_path"].endswith("/external_weights/uploaded")


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 1000"])
def test_a_file_that_breaks_off_leaves_what_was_there(server: Running, framing: str) -> None:
    begun = started(server)
    url = begun["urls"][FILES[1]]["url"]
    link, folder = httpx.URL(url), server.settings.data_dir / "uploads" / begun["upload_id"]

    def break_off() -> None:
        with socket.create_connection((link.host, link.port)) as broken:
            head = f"PUT {link.raw_path.decode()} HTTP/1.1\r\nhost: {link.host}\r\n{framing}\r\n\r\n"
            broken.sendall(head.encode() + b"64\r\n" + b"a" * 100 + b"\r\n40\r\nabc")
            wait_until(lambda: any(path.name.startswith(".") for path in folder.iterdir()))
        wait_until(lambda: not any(path.name.startswith(".") for path in folder.iterdir()))

    break_off()
    assert [path.name for path in folder.iterdir()] == ["upload.json"]
    put(url, CONTENT[FILES[1]])
    break_off()
    assert (folder / FILES[1]).read_bytes() == CONTENT[FILES[1]]


def test_few_files_of_an_upload_come_at_once_and_those_of_others_still_do(server: Running) -> None:
    begun, other = started(server), started(server)
    url = begun["urls"][FILES[1]]["url"]
    link, num_coming = httpx.URL(url), server.app.state.services.uploads.folder._num_coming
    with contextlib.ExitStack() as connections:
        for _ in range(COMING):
            coming = connections.enter_context(socket.create_connection((link.host, link.port)))
            head = f"PUT {link.raw_path.decode()} HTTP/1.1\r\nhost: {link.host}\r\ncontent-length: 1000\r\n\r\n"
            coming.sendall(head.encode() + b"a")
        wait_until(lambda: num_coming[begun["upload_id"]] == COMING)
        refused = put(url, CONTENT[FILES[1]])
        assert refused.status_code == 429 and refused.json()["error"] == "Busy"
        assert put(other["urls"][FILES[1]], CONTENT[FILES[1]]).status_code == 200
    wait_until(lambda: not num_coming)
    assert put(url, CONTENT[FILES[1]]).status_code == 200


def test_a_file_does_not_bring_back_an_upload_that_is_deleted_while_it_waits(server: Running) -> None:
    begun = started(server)
    put(begun["urls"][FILES[0]], CONFIG)
    put(begun["urls"][FILES[1]], b"no tensors")
    assert finish(server, begun["upload_id"]).status_code == 400
    folder, upload_id = server.app.state.services.uploads.folder, begun["upload_id"]

    async def delete() -> None:
        async with folder.lock_of(upload_id):
            while not folder._num_coming[upload_id]:  # noqa: ASYNC110 - nobody sets an event
                await asyncio.sleep(0.01)
            shutil.rmtree(folder.path(upload_id))

    deleting = asyncio.run_coroutine_threadsafe(delete(), server.loop)
    assert put(begun["urls"][FILES[1]], CONTENT[FILES[1]]).status_code == 404
    deleting.result(20)
    assert not folder.path(upload_id).exists()


def test_an_upload_whose_weights_the_disk_does_not_take_is_finished_later(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = sent(server)

    def fail(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(export, "write_both_forms", fail)
        refused = finish(server, begun["upload_id"])
    assert refused.status_code == 503 and refused.json()["error"] == "DiskFull"
    assert not list((server.settings.data_dir / "checkpoints").glob("*/*/*"))
    assert finish(server, begun["upload_id"]).status_code == 200


def test_sdks_before_0_40_get_links_as_texts(server: Running) -> None:
    links = started(server, **{"x-stainless-package-version": "0.39.0"})["urls"]
    assert set(links) == set(FILES) and all(isinstance(link, str) for link in links.values())
    assert put(links["adapter_config.json"], CONFIG).status_code == 200


def test_a_repeated_start_and_a_repeated_finish_get_the_first_ones(server: Running) -> None:
    first, again = (started(server, **{"x-idempotency-key": "one"}) for _ in range(2))
    assert first == again != started(server, **{"x-idempotency-key": "two"})
    for name, content in CONTENT.items():
        put(first["urls"][name], content)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: finish(server, first["upload_id"]), range(4)))
    assert len({answer.json()["tinker_path"] for answer in answers}) == 1
    assert finish(server, first["upload_id"]).json() == answers[0].json()
    assert len(server.backend.tiny.sampler.published) == 1


def test_an_upload_is_its_owners_alone(server: Running) -> None:
    begun = sent(server)
    bobs = {"x-api-key": server.bob.key}  # type: ignore[attr-defined]
    stolen = server.http.post("/external_weights_upload_finish", json={"upload_id": begun["upload_id"]}, headers=bobs)
    assert stolen.status_code == 404 and stolen.json()["error"] == "UnknownUpload"
    assert finish(server, begun["upload_id"]).status_code == 200
    for wrong in ("0" * 32, "../checkpoints", "x"):
        assert finish(server, wrong).status_code == 404


def test_a_link_opens_one_file_of_one_upload_for_an_hour(server: Running) -> None:
    one, other = started(server), started(server)
    config, model = (one["urls"][name]["url"] for name in FILES)
    query = config.partition("?")[2]
    for wrong in (
        f"{model.partition('?')[0]}?{query}",
        f"{other['urls'][FILES[0]]['url'].partition('?')[0]}?{query}",
        config.replace("expires=", "expires=1"),
        config.partition("?")[0] + "?expires=1&signature=0",
    ):
        refused = put(wrong, CONFIG)
        assert refused.status_code == 403 and refused.json()["error"] == "LinkRefused"
    links = server.app.state.services.links
    signed = links.sign(f"uploads/{one['upload_id']}/upload.json", int(time.time()) + 60)
    assert put(f"{server.url}/api/v1/{signed}", b"{}").status_code == 400
    ended = links.sign(f"uploads/{one['upload_id']}/{FILES[0]}", int(time.time()) - 1)
    assert "expired" in put(f"{server.url}/api/v1/{ended}", CONFIG).text


def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(server: Running) -> None:
    begun = started(server)
    config, model = (begun["urls"][name]["url"] for name in FILES)
    folder = server.settings.data_dir / "uploads" / begun["upload_id"]
    limit = json.loads((folder / "upload.json").read_text())["max_bytes"]
    assert limit < 100_000
    assert put(config, b" " * (CONFIG_BYTES + 1)).status_code == 413
    for content in (b" " * (limit + 1), iter([b" " * limit, b" "])):  # with its length, and without
        refused = httpx.put(model, content=content, timeout=20)
        assert refused.status_code == 413 and f"larger than {limit} bytes" in refused.text
    assert [path.name for path in folder.iterdir()] == ["upload.json"]
    assert put(model, b" " * limit).status_code == 200


@pytest.mark.parametrize(
    ("named", "source", "is_same"),
    [
        (None, "org/tiny", True),
        ("", "org/tiny", True),
        ("tiny", "org/tiny", True),
        ("org/tiny", "org/tiny", True),
        ("copies/Tiny", "org/tiny", True),
        ("/home/me/adapted", "org/tiny", True),
        ("./outputs/merged", "org/tiny", True),
        ("org/tiny-base", "/models/tiny", True),  # the operator's own name: nothing says what it is
        ("org/tiny-base", "org/tiny", False),
        ("org/tiny-base", "/cache/models--org--tiny/snapshots/0a1b", False),
        ("org/tiny", "/cache/models--org--tiny/snapshots/0a1b", True),
        ("/home/me/.cache/models--org--tiny-base/snapshots/0a1b", "org/tiny", False),
        ("outputs/merged", "org/tiny", False),  # looks like a name of the hub
        (["org/tiny"], "org/tiny", False),
    ],
)
def test_an_adapter_that_names_another_base_is_refused_by_name(
    server: Running, named: object, source: str, is_same: bool
) -> None:
    server.backend.tiny.info = replace(server.backend.tiny.info, source=source)
    config = json.dumps({**json.loads(CONFIG), "base_model_name_or_path": named}).encode()
    finished = Started.of(server.http, "tiny").put(CONTENT | {"adapter_config.json": config}).finish()
    assert finished.status_code == (200 if is_same else 400), finished.text
    if not is_same:
        assert "adapter_config.json: base_model_name_or_path " in finished.json()["detail"]
        assert not server.backend.tiny.trainer.calls


def test_an_adapter_that_names_another_name_of_the_same_files_is_taken(server: Running) -> None:
    served = server.app.state.services.models.served
    served["org/alias"] = served["tiny"]
    config = json.dumps({**json.loads(CONFIG), "base_model_name_or_path": "org/alias"}).encode()
    finished = Started.of(server.http, "tiny").put(CONTENT | {"adapter_config.json": config}).finish()
    assert finished.status_code == 200, finished.text


@pytest.mark.parametrize("content", [b"[" * 60_000, b"", b"{", b"\xff"])
def test_a_config_that_is_no_json_is_refused(server: Running, content: bytes) -> None:
    refused = Started.of(server.http, "tiny").put(CONTENT | {"adapter_config.json": content}).finish()
    assert refused.status_code == 400 and "adapter_config.json is no JSON" in refused.json()["detail"]


def test_a_config_that_is_hard_to_match_holds_up_nobody(server: Running) -> None:
    """Matched in every way, it would keep the interpreter for half a minute."""
    config = json.dumps({"base_model_name_or_path": "/models--" + "a--" * 21_000 + "!"}).encode()
    begun = Started.of(server.http, "tiny").put(CONTENT | {"adapter_config.json": config})
    since = time.monotonic()
    assert begun.finish().status_code == 200
    assert time.monotonic() - since < 10


def test_a_file_of_more_bytes_than_all_bodies_in_memory_may_have_comes_while_others_work(server: Running) -> None:
    server.backend.tiny.info = replace(server.backend.tiny.info, adapter_bytes=1 << 22)
    begun = started(server)
    content = bytes(range(256)) * (1 << 16)
    half_came, go_on = threading.Event(), threading.Event()

    def halves() -> Iterator[bytes]:
        yield content[: 1 << 23]
        half_came.set()
        assert go_on.wait(20)
        yield content[1 << 23 :]

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        url, size = begun["urls"][FILES[1]]["url"], {"content-length": str(1 << 24)}
        coming = thread.submit(httpx.put, url, content=halves(), headers=size, timeout=20)
        assert half_came.wait(20)
        try:
            assert server.post("/create_session").status_code == 200
        finally:
            go_on.set()
        assert coming.result().json() == {"size_bytes": 1 << 24}
    file = server.settings.data_dir / "uploads" / begun["upload_id"] / FILES[1]
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "adapter_model.safetensors did not come"),
        (b"", "no safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "its header is longer than"),
    ],
)
def test_files_that_are_no_adapter_are_refused_before_the_trainer_reads_them(
    server: Running, content: bytes | None, message: str
) -> None:
    files = {"adapter_config.json": CONFIG} | ({} if content is None else {"adapter_model.safetensors": content})
    refused = Started.of(server.http, "tiny").put(files).finish()
    assert refused.status_code == 400 and message in refused.json()["detail"]
    assert not server.backend.tiny.trainer.calls


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"base_model": "other"}, 404, "other"),
        ({"lora_config": {"rank": 0}}, 400, "lora_config.rank is 0; this server takes 1 to 64"),
        ({"lora_config": {"rank": 65}}, 400, "lora_config.rank is 65"),
        ({"lora_config": None}, 422, "lora_config"),
        ({"files": []}, 422, "files"),
    ],
)
def test_a_start_that_cannot_end_is_refused(
    server: Running, change: dict[str, object], status: int, message: str
) -> None:
    refused = server.http.post("/external_weights_upload_start", json=START | change)
    assert refused.status_code == status and message in refused.text
    assert not (server.settings.data_dir / "uploads").exists()


def test_an_owner_has_four_uploads_and_others_have_theirs(server: Running) -> None:
    begun = [started(server) for _ in range(4)]
    full = server.http.post("/external_weights_upload_start", json=START)
    assert full.status_code == 400 and full.json()["error"] == "LimitReached"
    started(server, **{"x-api-key": server.bob.key})  # type: ignore[attr-defined]
    for name, content in CONTENT.items():
        put(begun[0]["urls"][name], content)
    assert finish(server, begun[0]["upload_id"]).status_code == 200
    assert put(begun[0]["urls"][FILES[0]], CONFIG).status_code == 400
    started(server)


def test_an_upload_that_the_disk_does_not_take_is_to_be_started_later(server: Running) -> None:
    """503, which the SDK tries again."""
    uploads = server.settings.data_dir / "uploads"
    uploads.write_text("in place of the folder, as no disk is full here")
    refused = server.http.post("/external_weights_upload_start", json=START)
    assert refused.status_code == 503 and refused.json()["error"] == "DiskFull"
    uploads.unlink()
    started(server)


def test_a_start_takes_the_place_of_the_upload_that_was_refused_first(server: Running) -> None:
    begun = [started(server) for _ in range(4)]
    for upload in begun[:3]:
        put(upload["urls"][FILES[0]], CONFIG)
        put(upload["urls"][FILES[1]], b"no tensors")
        assert finish(server, upload["upload_id"]).status_code == 400
    put(begun[0]["urls"][FILES[1]], CONTENT[FILES[1]])  # mended: it is no longer refused
    started(server)
    assert finish(server, begun[1]["upload_id"]).status_code == 404
    assert finish(server, begun[2]["upload_id"]).status_code == 400
    assert finish(server, begun[0]["upload_id"]).status_code == 200
    assert put(begun[3]["urls"][FILES[0]], CONFIG).status_code == 200
    started(server), started(server)
    full = server.http.post("/external_weights_upload_start", json=START)
    assert full.json()["error"] == "LimitReached"


def test_an_upload_under_which_the_trainer_ends_twice_is_refused(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = sent(server)

    async def die(*_: object, **__: object) -> None:
        raise ModelLost("the trainer has ended")

    monkeypatch.setattr(server.backend.tiny.trainer, "load_state", die)
    assert [finish(server, begun["upload_id"]).status_code for _ in range(3)] == [500, 500, 400]
    assert not list((server.settings.data_dir / "checkpoints").glob("*/*/*"))


def test_a_file_that_comes_while_an_upload_is_finished_does_not_replace_a_checked_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = sent(server)
    link = httpx.URL(begun["urls"]["adapter_model.safetensors"]["url"])
    body, seen = b"another file", []
    with socket.create_connection((link.host, link.port)) as late:
        head = f"PUT {link.raw_path.decode()} HTTP/1.1\r\nhost: {link.host}\r\ncontent-length: {len(body)}\r\n\r\n"
        late.sendall(head.encode() + body[:-1])  # it has begun before the upload is finished
        load = server.backend.tiny.trainer.load_state
        folder = server.settings.data_dir / "uploads" / begun["upload_id"]
        wait_until(lambda: len(list(folder.iterdir())) > len(CONTENT) + 1)

        async def noted(model: LoadedModel, directory: Path, **more: Any) -> None:
            seen.append((directory / "adapter_model.safetensors").read_bytes())
            await load(model, directory, **more)

        monkeypatch.setattr(server.backend.tiny.trainer, "load_state", noted)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            finishing = thread.submit(finish, server, begun["upload_id"])
            time.sleep(0.3)
            assert not seen, "the file that comes is waited for, and checked"
            late.sendall(body[-1:])
            assert finishing.result().status_code == 400 and not seen


def test_an_upload_that_engines_have_no_slots_for_is_refused_with_the_remedy(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise InvalidInput("experts have factors of their own (setting backend.lora_layout service; own takes both)")

    monkeypatch.setattr(server.backend.tiny.sampler, "publish", refuse)
    refused = Started.of(server.http, "tiny").put(CONTENT).finish()
    assert refused.status_code == 400
    assert "(setting backend.lora_layout service; own takes both)" in refused.json()["detail"]


def test_uploads_are_deleted_some_time_after_their_links_have_ended(server: Running) -> None:
    begun = started(server)
    put(begun["urls"][FILES[0]], CONFIG)
    services, folder = server.app.state.services, server.settings.data_dir / "uploads"

    def sweep(after_s: float) -> None:
        sweeping = services.housekeeper.sweep_weights(time.time() + after_s)
        asyncio.run_coroutine_threadsafe(sweeping, server.loop).result(20)

    sweep(3600 + KEPT_S - 60)
    assert [path.name for path in folder.iterdir()] == [begun["upload_id"]]
    sweep(3600 + KEPT_S + 60)
    assert not list(folder.iterdir())


def test_a_damaged_record_of_an_upload_harms_no_other_upload_and_is_deleted_later(server: Running) -> None:
    damaged = server.settings.data_dir / "uploads" / started(server)["upload_id"]
    (damaged / "upload.json").write_bytes(b"{")
    begun = sent(server)
    assert finish(server, begun["upload_id"]).status_code == 200
    assert finish(server, damaged.name).status_code == 404
    sweeping = server.app.state.services.housekeeper.sweep_weights
    for after_s, is_there in ((0, True), (25 * 3600, False)):
        asyncio.run_coroutine_threadsafe(sweeping(time.time() + after_s), server.loop).result(20)
        assert damaged.exists() == is_there


def test_an_upload_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Running(tmp_path / "data")
    begun = started(first)
    put(begun["urls"][FILES[0]], CONFIG)
    first.stop()
    second = Running(tmp_path / "data")
    moved = begun["urls"][FILES[1]]["url"].replace(first.url, second.url)
    assert put(moved, CONTENT[FILES[1]]).status_code == 200
    second.set_gate(second.backend.tiny.sampler.publish_gate, is_open=False)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        asking = thread.submit(httpx.post, **asked(second, begun["upload_id"]))
        wait_until(lambda: bool(second.backend.tiny.sampler.published))
        second.stop()  # in the middle of the finish
        assert asking.exception() is not None or asking.result().status_code >= 500
    third = Running(tmp_path / "data")
    assert finish(third, begun["upload_id"]).json()["tinker_path"].endswith("/uploaded")
    assert len(list((tmp_path / "data/checkpoints").glob("*/external_weights/*"))) == 1
    third.stop()


def asked(server: Running, upload_id: str) -> dict[str, Any]:
    url = f"{server.url}/api/v1/external_weights_upload_finish"
    return {"url": url, "json": {"upload_id": upload_id}, "headers": {"x-api-key": "tml-test"}, "timeout": 30}
