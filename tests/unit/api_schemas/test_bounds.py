"""Small bodies cost little: what they ask to be expanded, and what is wrong with them, is counted first."""

import json
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.base import Request
from tinker_server.api_schemas.futures import RetrieveFuturesRequest
from tinker_server.api_schemas.inputs import MAX_CELLS, MAX_COLUMNS, TensorData
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.api_schemas.service import TelemetryRequest
from tinker_server.api_schemas.sessions import CreateSessionRequest, SearchSessionsRequest
from tinker_server.api_schemas.training import ForwardBackwardRequest

FORWARD_BACKWARD = {"model_id": "m", "seq_id": 1}
SAMPLE = {"sampling_session_id": "s", "seq_id": 1, "sampling_params": {}}


def empty_rows(rows: int, columns: int, dtype: pb.DType = pb.DTYPE_FLOAT32) -> pb.Tensor:
    """A sparse tensor without values."""
    csr = pb.SparseCsr(crow_indices=np.zeros(rows + 1, "<i8").tobytes())
    return pb.Tensor(dtype=dtype, shape=[rows, columns], sparse_csr=csr)


def batch(*data: pb.Datum) -> bytes:
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=data, loss_fn="cross_entropy")
    return request.SerializeToString()


def refuses(text: str, body: bytes, mib: float = 8) -> None:
    """The body is refused for that reason, soon and in little memory."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(wire.MalformedBody, match=text):
            wire.decode_forward_backward(body)
        assert tracemalloc.get_traced_memory()[1] < mib * 2**20 and time.monotonic() - started < 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("columns", [2**27, MAX_COLUMNS + 1])
def test_a_sparse_tensor_of_a_few_bytes_is_not_made_dense(columns: int) -> None:
    tensors = {f"weights{index}": empty_rows(1, columns) for index in range(6)}
    body = batch(pb.Datum(loss_fn_inputs=tensors))
    assert len(body) < 400
    refuses(rf"datum 0: weights\d: .* {columns} columns; at most {MAX_COLUMNS}", body)
    with pytest.raises(ValueError, match=f"at most {MAX_COLUMNS}"):
        TensorData(data=[], dtype="int64", shape=[1, columns], sparse_crow_indices=[0, 0]).to_array()


def test_the_sparse_tensors_of_a_request_are_counted_together_before_any_is_made_dense() -> None:
    rows = MAX_CELLS // MAX_COLUMNS // 8
    datum = pb.Datum(loss_fn_inputs={"weights": empty_rows(rows, MAX_COLUMNS)})
    assert len(wire.decode_forward_backward(batch(*[datum] * 8)).forward_backward_input.data) == 8
    refuses(f"{MAX_CELLS} cells", batch(*[datum] * 9))


def test_the_sparse_tensors_of_a_json_request_are_counted_together_too() -> None:
    rows = MAX_CELLS // MAX_COLUMNS // 8
    tensor = {"data": [], "dtype": "float32", "shape": [rows, MAX_COLUMNS], "sparse_crow_indices": [0] * (rows + 1)}
    datum = {"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": tensor | {"sparse_col_indices": []}}}
    body = FORWARD_BACKWARD | {"forward_backward_input": {"data": [datum] * 9, "loss_fn": "cross_entropy"}}
    tracemalloc.start()
    with pytest.raises(ValidationError, match=f"{MAX_CELLS} cells"):
        ForwardBackwardRequest.model_validate_json(json.dumps(body))
    assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    tracemalloc.stop()


@pytest.mark.heavy
def test_a_protobuf_of_countless_parts_is_refused_before_it_is_parsed() -> None:
    for body in (b"\x1a\x00" * 2_000_000, b"\x1a\x80\x80\x40" + b"\x0a\x00" * (1 << 19), b"\x2a\x00" * 1_000_000):
        refuses("parts", body)
    many_sizes = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[1] * 500_000)
    refuses("dimensions", batch(pb.Datum(loss_fn_inputs={"weights": many_sizes})))


def flood(depth_of_list: dict[str, Any], at: list[str], value: Any) -> bytes:
    """A request with `value` at a place within."""
    body = json.loads(json.dumps(depth_of_list))
    place = body
    for key in at[:-1]:
        place = place.setdefault(key, {})
    place[at[-1]] = value
    return json.dumps(body).encode()


ONES, TEXTS = [1] * 100_000, ["a"] * 100_000
KEYS: dict[str, Any] = {f"k{index}": [] for index in range(100_000)}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (SampleRequest, flood(SAMPLE, ["prompt", "chunks"], ONES)),
        (SampleRequest, flood(SAMPLE, ["prompt", "chunks"], [{"tokens": TEXTS}])),
        (SampleRequest, flood(SAMPLE | {"prompt": {"chunks": []}}, ["sampling_params", "stop"], [[]] * 100_000)),
        (SampleRequest, flood(SAMPLE | {"prompt": {"chunks": []}}, ["target_prompt_logprobs", "data"], TEXTS)),
        (SampleRequest, json.dumps(SAMPLE | KEYS).encode()),
        (ForwardBackwardRequest, flood(FORWARD_BACKWARD, ["forward_backward_input", "data"], ONES)),
        (ForwardBackwardRequest, flood(FORWARD_BACKWARD, ["forward_backward_input", "loss_fn_config"], KEYS)),
        (
            ForwardBackwardRequest,
            flood(FORWARD_BACKWARD, ["forward_backward_input", "data"], [{"loss_fn_inputs": KEYS}]),
        ),
        (TelemetryRequest, flood({"session_id": "a"}, ["events"], ONES)),
        (CreateSessionRequest, flood({}, ["tags"], ONES)),
        (SearchSessionsRequest, flood({}, ["user_metadata"], KEYS)),
        (RetrieveFuturesRequest, flood({}, ["retrieved_request_ids"], ONES)),
    ],
)
def test_a_flood_of_errors_is_reported_by_its_first_few(model: type[Request], body: bytes) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(body)
    assert caught.value.error_count() <= 32
    with pytest.raises(ValidationError) as caught:
        model.model_validate(json.loads(body))
    assert caught.value.error_count() <= 32


def test_many_numbers_are_read_as_exactly_as_few() -> None:
    numbers = [*range(70_000), -1, 2**62]
    many = TensorData(data=numbers, dtype="int64").to_array()
    assert many.dtype == np.int64 and many.tolist() == numbers
    halves = [value / 2 for value in range(70_000)]
    assert TensorData(data=halves, dtype="float32").to_array().tolist() == halves
    wrong: list[tuple[float, str]] = [(0.5, "no integer"), (2**63, "64 bits|does not fit")]
    for bad, text in wrong:
        with pytest.raises(ValueError, match=text):
            TensorData(data=[*[0] * 70_000, bad], dtype="int64").to_array()
    for value in ("1", True, None, float("nan"), float("inf"), [1]):
        with pytest.raises(ValidationError):
            TensorData.model_validate_json(json.dumps({"data": [0] * 70_000 + [value], "dtype": "float32"}))
