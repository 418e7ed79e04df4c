"""Numbers on the wire, against the real trainer: order, repeats, and numbers that never come; numbers of tests are
the checklist's.

pytest tests/conformance/test_numbers_on_the_wire.py
"""

import sqlite3
import time

import httpx
import numpy as np
import pytest
import tinker

from tests.factories import MIXED, datum
from tests.servers import KEY, MODEL, Server, sdk_datum
from tests.training import ADAM, logprobs_of, step
from tinker_server.api_schemas import tinker_wire_pb2 as pb

PROTOBUF = {"Content-Type": "application/x-protobuf", "X-API-Key": KEY}


@pytest.fixture
def http(server: Server):
    with httpx.Client(base_url=f"{server.base_url}/api/v1", timeout=60, headers={"X-API-Key": KEY}) as client:
        yield client


@pytest.fixture
def client(server: Server) -> tinker.TrainingClient:
    return server.client().create_lora_training_client(MODEL, rank=8, seed=1).result()


def request(model_id: str, seq_id: int, item) -> bytes:
    """A forward_backward of one text datum."""
    (chunk,) = item.model_input.chunks
    targets, weights = (item.loss_fn_inputs[name] for name in ("target_tokens", "weights"))
    return pb.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        loss_fn="cross_entropy",
        data=[
            pb.Datum(
                model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=chunk.tokens.astype("<i4").tobytes()))],
                loss_fn_inputs={
                    "target_tokens": pb.Tensor(dense=targets.astype("<i8").tobytes(), dtype=pb.DTYPE_INT64),
                    "weights": pb.Tensor(dense=weights.astype("<f4").tobytes(), dtype=pb.DTYPE_FLOAT32),
                },
            )
        ],
    ).SerializeToString()


def submit(http: httpx.Client, body: bytes) -> str:
    response = http.post("/forward_backward", content=body, headers=PROTOBUF)
    assert response.status_code == 200, response.text
    request_id: str = response.json()["request_id"]
    return request_id


def wait(http: httpx.Client, request_id: str) -> httpx.Response:
    response = http.post(
        "/retrieve_future", json={"request_id": request_id}, headers={"Accept": "application/x-protobuf"}
    )
    assert response.status_code == 200, response.text
    return response


def finished_order(server: Server, model_id: str, count: int) -> list[int]:
    """Numbers in the order in which they ran. A result reaches its waiter a moment before the database."""
    query = "SELECT seq_id FROM futures WHERE lane = ? AND seq_id > 0 AND finished_at > 0 ORDER BY finished_at"
    for _ in range(100):
        with sqlite3.connect(server.log.with_suffix("") / "tinker-server.db") as db:
            numbers = [seq_id for (seq_id,) in db.execute(query, [model_id])]
        if len(numbers) == count:
            break
        time.sleep(0.05)
    return numbers


def test_031_chunks_posted_3_2_1_run_1_2_3_and_add_up(server, http, client, renderer):
    items = [datum(MIXED["text"], renderer, seed) for seed in range(3)]
    model_id = client.get_info().model_id
    ids = {number: submit(http, request(model_id, number, items[number - 1])) for number in (3, 2, 1)}
    for request_id in ids.values():
        wait(http, request_id)
    assert finished_order(server, model_id, 3) == [1, 2, 3]
    optim = {"model_id": model_id, "seq_id": 4, "adam_params": {"learning_rate": 3e-3}}
    wait(http, http.post("/optim_step", json=optim).json()["request_id"])

    other = server.client().create_lora_training_client(MODEL, rank=8, seed=1).result()
    step(other, items)
    third = server.client().create_lora_training_client(MODEL, rank=8, seed=1).result()
    expected = logprobs_of(other, items)
    body = request(model_id, 5, items[0])
    forward = pb.ForwardBackwardRequest.FromString(body)
    forward.forward_only = True
    result = pb.ForwardBackwardOutput.FromString(wait(http, submit(http, forward.SerializeToString())).content)
    got = np.frombuffer(result.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    np.testing.assert_allclose(got, expected[0], atol=1e-5)
    assert np.abs(expected[0] - logprobs_of(third, items)[0]).max() > 1e-3


def test_053_a_repeated_submit_runs_once(http, server, client, renderer):
    item = datum(MIXED["text"], renderer)
    model_id = client.get_info().model_id
    body = request(model_id, 1, item)
    first = submit(http, body)
    assert submit(http, body) == first
    answer = wait(http, first).content
    assert submit(http, body) == first
    assert wait(http, first).content == answer
    optim = {"model_id": model_id, "seq_id": 2}
    norm = wait(http, http.post("/optim_step", json=optim).json()["request_id"]).json()["metrics"]["grad_norm"]

    once = server.client().create_lora_training_client(MODEL, rank=8, seed=1).result()
    once.forward_backward([sdk_datum(item)], "cross_entropy").result()
    assert norm == pytest.approx(once.optim_step(ADAM).result().metrics["grad_norm"], rel=1e-5)
    conflict = http.post("/optim_step", json={"model_id": model_id, "seq_id": 1})
    assert conflict.status_code == 400
    assert "forward_backward" in conflict.json()["detail"]


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_054_a_rejected_number_does_not_block_the_next(http, client, renderer):
    item = datum(MIXED["text"], renderer)
    model_id = client.get_info().model_id
    wait(http, submit(http, request(model_id, 1, item)))
    spoiled = pb.ForwardBackwardRequest.FromString(request(model_id, 2, item))
    spoiled.data[0].loss_fn_inputs["weights"].dense = b"odd"
    refused = http.post("/forward_backward", content=spoiled.SerializeToString(), headers=PROTOBUF)
    assert refused.status_code == 400
    assert "datum 0: weights" in refused.json()["detail"]
    began = time.monotonic()
    wait(http, submit(http, request(model_id, 3, item)))
    assert time.monotonic() - began < 4, "waited for a number that the server had refused itself"


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_046_a_number_that_never_comes_is_passed_over(http, client, renderer):
    item = datum(MIXED["text"], renderer)
    model_id = client.get_info().model_id
    wait(http, submit(http, request(model_id, 1, item)))
    optim = http.post("/optim_step", json={"model_id": model_id, "seq_id": 7})
    began = time.monotonic()
    wait(http, optim.json()["request_id"])
    assert time.monotonic() - began < 4, "an optim_step settles what was missing before it"
