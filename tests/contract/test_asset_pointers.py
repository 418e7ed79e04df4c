"""Images that requests name by their address, `image_asset_pointer` chunks, are read where the operator allows it.

pytest tests/contract/test_asset_pointers.py
"""

import base64
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.factories import as_text, photo
from tests.fake_server import Running
from tinker_server.api_schemas.inputs import ImageChunk
from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends.protocol import EncodedBatch, LoadedModel, SamplingTask
from tinker_server.backends.trainer.step.decoding import decode_batch
from tinker_server.image_addresses import ImageAddresses


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is allowed, with what should and should not be read from it."""
    directory = tmp_path_factory.mktemp("allowed") / "pictures"
    (directory / "inner").mkdir(parents=True)
    (directory / "inner" / "a b.png").write_bytes(photo(32, 32))
    (directory.parent / "secret.png").write_bytes(photo(32, 32))
    (directory / "link.png").symlink_to(directory.parent / "secret.png")
    os.mkfifo(directory / "pipe.png")
    with (directory / "huge.png").open("wb") as file:
        file.truncate(21 << 20)
    return directory


@pytest.fixture(scope="module")
def server(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("server"), image_directories=[pictures])
    yield running
    running.stop()


@pytest.fixture
def batches(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[EncodedBatch]:
    """The batches that the trainer gets."""
    seen, trainer = [], server.backend.tiny.trainer
    run = trainer.forward_backward

    async def noted(model: LoadedModel, batch: EncodedBatch, **rest: Any) -> Any:
        seen.append(batch)
        return await run(model, batch, **rest)

    monkeypatch.setattr(trainer, "forward_backward", noted)
    return seen


def by_address(location: str) -> dict[str, Any]:
    return {"type": "image_asset_pointer", "format": "png", "location": location}


def batch_of(chunk: dict[str, Any]) -> dict[str, Any]:
    """In JSON, as old clients send it: those that send protobuf send no addresses."""
    weights = np.array([0.1, 1 / 3, np.pi, 1e-30, -0.0], np.float32)
    tensors = {
        "target_tokens": {"data": [0, 1, 2, 3, 4], "dtype": "int64", "shape": [5]},
        "weights": {"data": weights.tolist(), "dtype": "float32", "shape": [5]},
    }
    chunks = [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}, chunk]
    return {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}], "loss_fn": "cross_entropy"}


def test_a_datum_with_an_address_is_the_datum_with_the_file(server: Running, pictures: Path, batches) -> None:
    model_id, numbers = server.model(), itertools.count(1)
    data = base64.b64encode((pictures / "inner" / "a b.png").read_bytes()).decode()
    file = {"type": "image", "format": "png", "data": data}
    for location in (f"{pictures}/inner/a b.png", f"file://{pictures}/inner/a%20b.png"):
        for chunk in (file, by_address(location)):
            batch = batch_of(chunk | {"expected_tokens": 1})
            fields = {"model_id": model_id, "seq_id": next(numbers), "forward_backward_input": batch}
            assert server.result(server.post("/forward_backward", **fields)).status_code == 200
        inline, read = (decode_batch(batch) for batch in batches[-2:])
        assert inline.loss_fn == read.loss_fn
        (one,), (other,) = inline.data, read.data
        assert [chunk.type for chunk in other.model_input.chunks] == ["encoded_text", "image"]
        assert one.model_input.chunks[1] == other.model_input.chunks[1]
        assert np.array_equal(as_text(one.model_input.chunks[0]).tokens, as_text(other.model_input.chunks[0]).tokens)
        for name, expected in one.loss_fn_inputs.items():
            got = other.loss_fn_inputs[name]
            assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes(), name


def test_a_sample_sees_the_file(server: Running, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, sampler = [], server.backend.tiny.sampler
    draw = sampler.sample

    async def noted(task: SamplingTask) -> SampleResponse:
        tasks.append(task)
        return await draw(task)

    monkeypatch.setattr(sampler, "sample", noted)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}, by_address(f"{pictures}/inner/a b.png")]}
    assert server.result(server.sample(server.sampler(), prompt=prompt)).status_code == 200
    chunk = tasks[-1].prompt.chunks[1]
    assert isinstance(chunk, ImageChunk) and chunk.data == (pictures / "inner" / "a b.png").read_bytes()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/etc/passwd", "image_directories"),
        ("{}/../secret.png", "image_directories"),
        ("file://{}/%2e%2e/secret.png", "image_directories"),
        ("{}/link.png", "image_directories"),
        ("file://elsewhere{}/inner/a b.png", "image_directories"),
        ("http://127.0.0.1:1/a.png", "image_hosts"),
        ("inner/a b.png", "image_directories"),
        ("{}/absent.png", "cannot be read"),
        ("{}/inner", "cannot be read"),
        ("{}/pipe.png", "cannot be read"),
        ("{}/huge.png", "more than"),
        ("http://[", "image_hosts"),
    ],
)
def test_nothing_else_is_read(server: Running, pictures: Path, name: str, reason: str) -> None:
    refused = server.sample(server.sampler(), prompt={"chunks": [by_address(name.format(pictures))]})
    assert refused.status_code == 400 and reason in refused.text
    assert refused.json()["detail"].startswith("prompt, chunk 0: "), refused.text


def test_where_the_operator_names_nothing_the_refusal_says_how(tmp_path: Path) -> None:
    running = Running(tmp_path)
    try:
        refused = running.sample(running.sampler(), prompt={"chunks": [by_address("/etc/passwd")]})
    finally:
        running.stop()
    assert refused.status_code == 400
    assert "image_hosts" in refused.text and "image_directories" in refused.text


def test_a_refused_image_makes_the_gradient_incomplete_and_the_model_goes_on(server: Running) -> None:
    model_id = server.model()
    batch = batch_of({"type": "encoded_text", "tokens": [5]})
    batch["data"] += batch_of(by_address("/etc/passwd"))["data"]
    refused = server.post("/forward_backward", model_id=model_id, seq_id=1, forward_backward_input=batch)
    assert refused.status_code == 400 and "datum 1, chunk 1: the image '/etc/passwd'" in refused.text
    adam = {"learning_rate": 1e-4}
    step = server.result(server.post("/optim_step", model_id=model_id, seq_id=2, adam_params=adam))
    assert "incomplete" in step.text


def chat_part(address: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": address}}]


def chat(server: Running, content: list[dict[str, Any]]) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return server.http.post(f"{server.url}/v1/chat/completions", json=body)


def test_an_image_that_a_chat_names_often_is_read_once_and_counts_as_often(tmp_path: Path, monkeypatch) -> None:
    """Its data URI is one text, which the sampler gets once."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.png").write_bytes(photo(8, 8) + bytes(300_000))
    running = Running(tmp_path / "data", image_directories=[tmp_path], max_body_bytes=1 << 20)
    read: list[str] = []
    plain = ImageAddresses.read

    async def noted(addresses: ImageAddresses, address: str, owner: str) -> bytes:
        read.append(address)
        return await plain(addresses, address, owner)

    monkeypatch.setattr(ImageAddresses, "read", noted)
    one, two = (chat_part(f"{tmp_path}/{name}.png") for name in ("one", "two"))
    try:
        assert chat(running, one * 3).status_code == 200
        assert len(read) == 1
        [sent] = running.backend.tiny.sampler.chats
        uris = [part["image_url"]["url"] for part in sent.body["messages"][0]["content"]]
        assert uris[0].startswith("data:image/png;base64,") and len(set(map(id, uris))) == 1
        for content in (one * 4, one * 2 + two * 2):
            refused = chat(running, content)
            error = refused.json()["error"]
            assert refused.status_code == 400 and error["param"] == "messages"
            assert error["message"] == "the images that messages name have more than 1048576 bytes in all"
        chunks = [{"type": "image_asset_pointer", "location": f"{tmp_path}/one.png", "format": "png"}] * 4
        refused = running.sample(running.sampler(), prompt={"chunks": chunks})
        assert "image_asset_pointer chunks name have more than 1048576 bytes in all" in refused.text
    finally:
        running.stop()


def test_images_that_chats_name_count_as_bytes_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(photo(8, 8) + bytes(300_000))
    running = Running(tmp_path / "data", image_directories=[tmp_path])
    gate, samples = running.backend.tiny.sampler.gate, running.app.state.services.admission.samples
    try:
        running.set_gate(gate, is_open=False)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(chat, running, chat_part(f"{tmp_path}/one.png"))
            while not running.backend.tiny.sampler.running:
                time.sleep(0.01)
            assert samples.totals[1] > 300_000
            running.set_gate(gate, is_open=True)
            assert answer.result().status_code == 200
        assert samples.totals == [0, 0, 0]
    finally:
        running.set_gate(gate, is_open=True)
        running.stop()
