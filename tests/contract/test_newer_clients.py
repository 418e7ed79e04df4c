"""What a newer client may say and this server does not know is refused, and the refusal names it.

pytest tests/contract/test_newer_clients.py
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_server import Running, forward_backward_body
from tinker_server.api_schemas import tinker_wire_pb2 as pb

PROTOBUF = {"Content-Type": "application/x-protobuf"}
UNKNOWN = {"type": "unrecognized", "raw_object": {"type": "video", "frames": 3}}
"""Stands in SDK 0.39.1 for an object that this SDK cannot parse. A client that sends back what it has got sends it."""
NINTH = b"\x4a\x03abc"
"""A field 9 of three bytes, which no message has."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("newer"))
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/sessions/search", {"statuses": [UNKNOWN]}, "statuses.0.type: Input should be 'active', 'cancelled'"),
        ("/sessions/search", {"owner": UNKNOWN}, "owner.type: Input should be 'own', 'accessible' or 'user'"),
        (
            "/checkpoints/search",
            {"checkpoint_type": "shared"},
            "checkpoint_type: Input should be 'training', 'sampler'",
        ),
        ("/sessions/s/finish", {"reason": UNKNOWN}, "reason.type: Input should be 'success', 'errored'"),
    ],
)
def test_an_object_of_an_unknown_type_is_refused_by_name(
    server: Running, path: str, body: dict[str, Any], message: str
) -> None:
    refused = server.post(path, **body)
    assert refused.status_code == 422 and message in refused.text


@pytest.mark.parametrize("chunk", [UNKNOWN, {"type": "video", "data": "aGVsbG8="}])
def test_a_chunk_of_an_unknown_type_is_refused_by_name(server: Running, chunk: dict[str, Any]) -> None:
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {}}
    batch = {"data": [datum], "loss_fn": "cross_entropy"}
    for refused, where in (
        (server.sample(server.sampler(), prompt={"chunks": [chunk]}), "prompt"),
        (
            server.post("/forward_backward", model_id=server.model(), seq_id=1, forward_backward_input=batch),
            "forward_backward_input.data.0.model_input",
        ),
    ):
        named = f"{where}.chunks.0: is no chunk: type must be encoded_text, image, image_asset_pointer or dmel"
        assert refused.status_code == 422 and named in refused.text


def test_an_optimizer_of_an_unknown_type_is_refused_by_name(server: Running) -> None:
    create = {"session_id": server.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
    failed = server.result(server.post("/create_model", **create, optimizer_config=UNKNOWN)).json()
    assert failed["category"] == "user" and "'unrecognized'" in failed["error"] and "'adamw'" in failed["error"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("request", "field 9 of ForwardBackwardRequest is not known here"),
        ("datum", "data: field 9 of Datum is not known here"),
        ("chunk", "datum 1: model_input: field 9 of Chunk is not known here"),
        ("text", "datum 1: model_input: field 9 of EncodedTextChunk is not known here"),
        ("tensor", "datum 1: target_tokens: field 9 of Tensor is not known here"),
        ("dtype", "datum 1: target_tokens: dtype must be float32, int64 or int32"),
    ],
)
def test_a_field_of_protobuf_that_is_not_known_is_refused_by_name(server: Running, place: str, message: str) -> None:
    """What it means could change the numbers."""
    body = pb.ForwardBackwardRequest.FromString(forward_backward_body(server.model(), 1))
    body.data.add().CopyFrom(body.data[0])
    datum = body.data[1]
    tensor = datum.loss_fn_inputs["target_tokens"]
    if place == "dtype":
        tensor.dtype = 9  # type: ignore[assignment]
    else:
        text = datum.model_input[0].encoded_text
        places = {"request": body, "datum": datum, "chunk": datum.model_input[0], "text": text, "tensor": tensor}
        places[place].MergeFromString(NINTH)
    refused = server.http.post("/forward_backward", content=body.SerializeToString(), headers=PROTOBUF)
    assert refused.status_code == 400 and message in refused.json()["detail"]
