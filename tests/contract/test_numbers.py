"""A number stands for one operation of its owner, also if it is sent again; waiting operations are bounded.

pytest tests/contract/test_numbers.py
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_server import Running, forward_backward_body
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.auth import keys

PROTOBUF = {"content-type": "application/x-protobuf"}


class WithBob(Running):
    """A server with the keys of two owners: it is asked as alice, and here as bob."""

    bob = ""

    def post_as_bob(self, path: str, **request: Any) -> httpx.Response:
        headers = {"x-api-key": self.bob} | request.pop("headers", {})
        return self.http.post(path, headers=headers, **request)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["WithBob"]:
    data_dir = tmp_path_factory.mktemp("numbers")
    alice, bob = (keys.add(data_dir / "keys", name) for name in ("alice", "bob"))
    running = WithBob(data_dir, gap_grace_s=1.0)
    running.http.headers["x-api-key"] = alice
    running.bob = bob
    yield running
    running.stop()


def train(server: Running, body: bytes) -> httpx.Response:
    return server.http.post("/forward_backward", content=body, headers=PROTOBUF)


def body_of(model_id: str, seq_id: int, names: list[str]) -> bytes:
    """A request whose datum's tensors are written in the order of `names`."""
    message = pb.ForwardBackwardRequest.FromString(forward_backward_body(model_id, seq_id))
    target = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[1], dense=b"\1" + b"\0" * 7)
    weights = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1], dense=b"\0" * 4)
    del message.data[:]
    # A map's entries are fields like others: messages that follow each other are read as one.
    whole = message.SerializeToString()
    datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(128)))]).SerializeToString()
    for name in names:
        datum += pb.Datum(loss_fn_inputs={name: target if name == "target_tokens" else weights}).SerializeToString()
    assert 128 <= len(datum) < 1 << 14, "so that its length takes two bytes"
    return whole + bytes([_DATA_TAG, 128 | len(datum) & 127, len(datum) >> 7]) + datum


_DATA_TAG = (pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number << 3) | 2


def test_the_lane_of_an_unload_is_no_model(server: Running) -> None:
    model_id = server.model()
    for path, number in (("/optim_step", {"seq_id": 1}), ("/unload_model", {})):
        refused = server.post(path, model_id=f"{model_id}:unload", **number)
        assert refused.status_code == 404 and "UnknownModel" in refused.text, refused.text
    assert server.result(server.post("/optim_step", model_id=model_id, seq_id=1)).status_code == 200


def test_the_same_message_with_its_map_in_another_order_is_a_repeat(server: Running) -> None:
    model_id = server.model()
    one, other = (body_of(model_id, 1, names) for names in (["target_tokens", "weights"], ["weights", "target_tokens"]))
    assert one != other and pb.ForwardBackwardRequest.FromString(one) == pb.ForwardBackwardRequest.FromString(other)
    first = train(server, one)
    assert first.status_code == 200 and train(server, other).json() == first.json()
    server.result(first)
    assert train(server, other).json() == first.json()


def test_another_body_under_a_used_number_is_400_before_and_after_its_end(server: Running) -> None:
    model_id = server.model()
    first = train(server, forward_backward_body(model_id, 1))
    others = [
        forward_backward_body(model_id, 1, tokens=b"\2\0\0\0"),
        forward_backward_body(model_id, 1, loss_fn="ppo"),
        pb.ForwardBackwardRequest(
            model_id=model_id, seq_id=1, loss_fn="cross_entropy", forward_only=True
        ).SerializeToString(),
    ]
    for _ in range(2):
        for other in others:
            refused = train(server, other)
            assert refused.status_code == 400 and "before" in refused.json()["detail"]
        server.result(first)
    step = server.post("/optim_step", model_id=model_id, seq_id=2, adam_params={"learning_rate": 1e-3})
    refused = server.post("/optim_step", model_id=model_id, seq_id=2, adam_params={"learning_rate": 5.0})
    assert step.status_code == 200 and refused.status_code == 400
    sampler_id = server.sampler()
    assert server.sample(sampler_id, 0).status_code == 200
    assert server.sample(sampler_id, 0, sampling_params={"max_tokens": 2}).status_code == 400


def test_what_is_refused_under_another_owners_model_does_not_reorder_it(server: WithBob) -> None:
    model_id = server.model()
    for seq_id, kind in ((1, "forward_backward"), (1, "optim_step")):
        body = forward_backward_body(model_id, seq_id, tokens=b"\1\0\0")
        refused = server.post_as_bob("/forward_backward", content=body, headers=PROTOBUF)
        assert refused.status_code == 400, kind
    malformed = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": -1}}
    assert server.post_as_bob("/optim_step", json=malformed).status_code == 422
    second = train(server, forward_backward_body(model_id, 2, loss_fn="second"))
    time.sleep(0.3)
    first = train(server, forward_backward_body(model_id, 1, loss_fn="first"))
    for answer in (first, second):
        assert server.result(answer).status_code == 200
    calls = [name for name, model in server.backend.tiny.trainer.calls if model == model_id]
    assert calls == ["create_model", "first", "second"]


def test_what_waits_is_bounded_by_owner_and_a_number_that_was_put_off_is_waited_for(tmp_path: Path) -> None:
    """Bodies of 0.6 MB, at most 4 MiB of them: the SDK sends chunks 2 to 12 first, and chunk 1 last."""
    server = Running(tmp_path, gap_grace_s=0.2)
    try:
        model_id, other = server.model(), server.model()
        gate = server.backend.tiny.trainer.gates["held"]
        server.set_gate(gate, is_open=False)
        held = train(server, forward_backward_body(other, 1, loss_fn="held"))
        bodies = {
            number: forward_backward_body(model_id, number, tokens=bytes(600_000), loss_fn=f"chunk {number}")
            for number in range(1, 13)
        }
        answers = {number: train(server, bodies[number]) for number in range(2, 13)}
        put_off = [number for number, answer in answers.items() if answer.status_code == 429]
        assert put_off and put_off == list(range(put_off[0], 13)) and 4 < put_off[0] < 10
        assert "send this one again" in answers[12].json()["detail"]
        answers[1] = train(server, bodies[1])
        assert answers[1].status_code == 200, "what all others wait for is let in"
        server.set_gate(gate, is_open=True)

        def send_again(number: int) -> httpx.Response:
            while (answer := train(server, bodies[number])).status_code == 429:
                time.sleep(0.3)  # longer than the grace
            return answer

        time.sleep(0.5)
        with ThreadPoolExecutor() as pool:
            answers |= dict(zip(put_off, pool.map(send_again, put_off), strict=True))
        for number in range(1, 13):
            assert server.result(answers[number]).status_code == 200
        server.result(held)
        calls = [name for name, model in server.backend.tiny.trainer.calls if model == model_id]
        assert calls == ["create_model", *(f"chunk {number}" for number in range(1, 13))]
        step = server.result(server.post("/optim_step", model_id=model_id, seq_id=13)).json()
        assert "error" not in step
    finally:
        server.stop()


def test_bodies_that_wait_are_in_the_database_and_not_in_memory(tmp_path: Path) -> None:
    server = Running(tmp_path)
    try:
        model_id = server.model()
        gate = server.backend.tiny.trainer.gates["held"]
        server.set_gate(gate, is_open=False)
        answers = [train(server, forward_backward_body(model_id, 1, loss_fn="held"))]
        answers += [train(server, forward_backward_body(model_id, n, tokens=bytes(600_000))) for n in range(2, 6)]
        lane = server.app.state.services.scheduler.actor(model_id).lane
        assert [(one.body, one.request) for one in lane.waiting.values()] == [(None, None)] * 4
        server.set_gate(gate, is_open=True)
        for answer in answers:
            assert server.result(answer).headers["content-type"] == "application/x-protobuf"
    finally:
        server.stop()


def test_a_flood_of_samples_of_one_owner_gives_another_no_429(tmp_path: Path) -> None:
    alice, bob = (keys.add(tmp_path / "keys", name) for name in ("alice", "bob"))
    server = Running(tmp_path)
    try:
        gate = server.backend.tiny.sampler.gate
        server.set_gate(gate, is_open=False)
        server.http.headers["x-api-key"] = alice
        flood, number = server.sampler(), 0
        fields: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [999] * 200_000}]}}
        while (refused := server.sample(flood, number, **fields)).status_code != 429:
            number += 1
            assert number < 20
        assert "are in flight" in refused.json()["detail"]
        server.http.headers["x-api-key"] = bob
        mine = server.sample(server.sampler(), **fields)
        assert mine.status_code == 200
        server.set_gate(gate, is_open=True)
        assert server.result(mine).status_code == 200
    finally:
        server.stop()


def test_training_is_granted_to_owners_in_turn_for_any_number_of_models(tmp_path: Path) -> None:
    alice, bob = (keys.add(tmp_path / "keys", name) for name in ("alice", "bob"))
    server = Running(tmp_path)
    try:
        gate = server.backend.tiny.trainer.gates["held"]
        server.http.headers["x-api-key"] = bob
        his = server.model()
        server.http.headers["x-api-key"] = alice
        models = [server.model() for _ in range(10)]
        server.set_gate(gate, is_open=False)
        answers = [train(server, forward_backward_body(models[0], 1, loss_fn="held"))]
        answers += [train(server, forward_backward_body(model, 1, loss_fn="alice")) for model in models[1:]]
        server.http.headers["x-api-key"] = bob
        mine = train(server, forward_backward_body(his, 1, loss_fn="bob"))
        time.sleep(0.1)
        server.set_gate(gate, is_open=True)
        assert server.result(mine).status_code == 200
        calls = [name for name, _ in server.backend.tiny.trainer.calls if name != "create_model"]
        assert calls[:2] == ["held", "bob"]
    finally:
        server.stop()
