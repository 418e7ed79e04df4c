"""A disk that takes nothing more: the server says so, stays up, and goes on once it can write again.

A limit on the size of files stands for it: every write fails, as on a disk that has become read-only.
"""

import contextlib
import resource
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.servers import KEY, MODEL, Server, runs


@contextlib.contextmanager
def written_by_nobody(process: psutil.Process) -> Iterator[None]:
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


class Model:
    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=f"{server.base_url}/api/v1", headers={"x-api-key": KEY}, timeout=60)
        session_id = self.http.post("/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
        self.model_id = self.result(self.http.post("/create_model", json=body))["model_id"]

    def submit(self, path: str, seq_id: int, /, **body: object) -> httpx.Response:
        return self.http.post(path, json={"model_id": self.model_id, "seq_id": seq_id, **body})

    def train(self, seq_id: int) -> httpx.Response:
        tokens = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}
        targets = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
        data = [{"model_input": tokens, "loss_fn_inputs": {"target_tokens": targets}}]
        work = {"data": data, "loss_fn": "cross_entropy"}
        return self.submit("/forward_backward", seq_id, forward_backward_input=work)

    def result(self, submitted: httpx.Response) -> dict[str, object]:
        assert submitted.status_code == 200, submitted.text
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            answer = self.http.post("/retrieve_future", json={"request_id": submitted.json()["request_id"]})
            if answer.status_code == 200:
                found: dict[str, object] = answer.json()
                return found
        raise AssertionError("there was no result")


@pytest.fixture
def model(server: Server) -> Iterator[Model]:
    model = Model(server)
    yield model
    model.http.close()


def test_a_server_that_cannot_write_refuses_by_name_and_goes_on_once_it_can(server: Server, model: Model) -> None:
    assert "error" not in model.result(model.train(1))
    with written_by_nobody(psutil.Process(server.process.pid)):
        for refused in (model.submit("/optim_step", 2), model.train(2), model.train(3)):
            assert refused.status_code == 503 and refused.headers["retry-after"], refused.text
            assert "cannot be written" in refused.json()["detail"]
        assert model.http.get("/healthz").status_code == 200
    first = model.submit("/optim_step", 2)
    assert "error" not in model.result(first)
    assert model.submit("/optim_step", 2).json() == first.json()
    assert "error" not in model.result(model.train(3))


def test_a_save_on_a_disk_that_takes_nothing_fails_by_name_and_alone(server: Server, model: Model) -> None:
    (rank,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if runs(child, "tinker_server.backends.trainer.process")
    ]
    assert "error" not in model.result(model.train(1))
    with written_by_nobody(rank):
        failed = model.result(model.submit("/save_weights", 2, path="a"))
        assert "cannot be read or written" in str(failed["error"]) and failed["category"] == "server"
        assert "error" not in model.result(model.submit("/optim_step", 3))
    assert "error" not in model.result(model.submit("/save_weights", 4, path="a"))
