"""Bodies that are cut, changed, blown up or nested without end: always a refusal, and the server lives.

pytest tests/contract/test_malformed.py
"""

import math
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import photo, present
from tests.fake_server import Running, forward_backward_body
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.inputs import MAX_COLUMNS
from tinker_server.api_schemas.training import ForwardBackwardRequest
from tinker_server.web import submission

# Threads of other tests' SDK clients draw random numbers at any time, which hypothesis takes for its strategies'.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
PROTOBUF = {"content-type": wire.PROTOBUF}
MANY = settings(max_examples=500, derandomize=True, deadline=None, database=None)
FEW = settings(max_examples=60, derandomize=True, deadline=None, database=None)

SMALL = st.integers(-3, 6) | st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)])
PACKED = st.binary(max_size=24) | st.lists(st.integers(0, 5), max_size=5).map(
    lambda numbers: b"".join(number.to_bytes(8, "little") for number in numbers)
)
TENSOR = st.builds(
    lambda dtype, shape, dense, csr: pb.Tensor(
        dtype=dtype, shape=shape, **({"dense": dense} if csr is None else {"sparse_csr": csr})
    ),
    st.sampled_from(pb.DType.values()),
    st.lists(SMALL, max_size=3),
    PACKED,
    st.none() | st.builds(pb.SparseCsr, values=PACKED, crow_indices=PACKED, col_indices=PACKED),
)
DTYPES: dict[pb.DType, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


@st.composite
def nearly_fitting(draw: st.DrawFn) -> pb.Tensor:
    """Of the right sizes, but that a number of its shape or indices may be another."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    stored = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    is_sparse = len(shape) == 2 and draw(st.booleans())
    cells = np.flatnonzero(stored) if is_sparse else np.arange(len(stored))
    crow = np.searchsorted(cells, np.arange(0, len(stored) + 1, shape[-1])).tolist()
    parts = [shape, crow, (cells % shape[-1]).tolist()]
    if draw(st.booleans()) and (changed := parts[draw(st.integers(0, 2 if is_sparse else 0))]):
        changed[draw(st.integers(0, len(changed) - 1))] = draw(SMALL)
    size_bytes = len(cells) * DTYPES[dtype].itemsize
    values = draw(st.binary(min_size=size_bytes, max_size=size_bytes))
    if not is_sparse:
        return pb.Tensor(dtype=dtype, shape=shape, dense=values)
    crow_indices, col_indices = (np.array(one, "<i8").tobytes() for one in parts[1:])
    csr = pb.SparseCsr(values=values, crow_indices=crow_indices, col_indices=col_indices)
    return pb.Tensor(dtype=dtype, shape=shape, sparse_csr=csr)


CHUNK = st.one_of(
    st.builds(lambda tokens: pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens)), st.binary(max_size=12)),
    st.builds(
        lambda data, format: pb.Chunk(image=pb.ImageChunk(data=data, format=format)),
        st.binary(max_size=12),
        st.sampled_from(["png", "jpeg", "gif", ""]),
    ),
    st.just(pb.Chunk()),
)
DATUM = st.builds(
    lambda chunks, tensors: pb.Datum(model_input=chunks, loss_fn_inputs=tensors),
    st.lists(CHUNK, max_size=3),
    st.dictionaries(st.sampled_from(["target_tokens", "weights", ""]), TENSOR | nearly_fitting(), max_size=2),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("malformed"), gap_grace_s=0.02)
    yield running
    running.stop()


@pytest.fixture
def alive(server: Running) -> Iterator[None]:
    yield
    assert server.http.get("/healthz").status_code == 200


def valid_body() -> bytes:
    """One of everything."""
    message = pb.ForwardBackwardRequest.FromString(forward_backward_body("model", 1))
    message.data[0].model_input.append(pb.Chunk(image=pb.ImageChunk(data=photo(8, 8), format="png")))
    sparse = pb.SparseCsr(values=b"\0" * 4, crow_indices=b"\0" * 8 + b"\1" + b"\0" * 7, col_indices=b"\0" * 8)
    message.data[0].loss_fn_inputs["weights"].CopyFrom(
        pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1, 2], sparse_csr=sparse)
    )
    message.loss_fn_config["clip"] = 0.2
    return message.SerializeToString()


BODY = valid_body()
CHANGES = st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(0, 255)), max_size=4)


@st.composite
def damaged(draw: st.DrawFn, body: bytes = BODY) -> bytes:
    """Some bytes are others, and the end may be missing or come twice."""
    changed = bytearray(body)
    for place, value in draw(CHANGES):
        changed[place % len(body)] = value
    cut = draw(st.integers(0, len(body)))
    return bytes(changed[:cut]) + draw(st.sampled_from([b"", b"\xff", bytes(changed[cut:]), bytes(changed)]))


def decoded(body: bytes) -> ForwardBackwardRequest | None:
    """What is read of a body; None of one that is refused."""
    try:
        return wire.decode_forward_backward(body)
    except wire.MalformedBody as error:
        assert str(error)
        return None


def assert_holds(request: ForwardBackwardRequest, message: pb.ForwardBackwardRequest) -> None:
    """A request says what protobuf itself reads in its body."""
    inner = request.forward_backward_input
    envelope = (request.model_id, request.seq_id, request.forward_only, inner.loss_fn)
    assert envelope == (message.model_id, message.seq_id, message.forward_only, message.loss_fn)
    texts = {key: one.text if one.HasField("text") else one.number for key, one in message.loss_fn_config_v2.items()}
    assert repr(inner.loss_fn_config or {}) == repr(texts or dict(message.loss_fn_config))  # NaN is not itself
    for datum, sent in zip(inner.data, message.data, strict=True):
        for chunk, part in zip(datum.model_input.chunks, sent.model_input, strict=True):
            assert chunk.type == part.WhichOneof("chunk")
            if chunk.type == "encoded_text":
                assert chunk.tokens.dtype == np.int32 and chunk.tokens.tobytes() == part.encoded_text.tokens
            elif chunk.type == "image":
                assert (chunk.data, chunk.format) == (part.image.data, part.image.format)
        assert datum.loss_fn_inputs.keys() == sent.loss_fn_inputs.keys()
        for name, tensor in datum.loss_fn_inputs.items():
            wanted = dense(sent.loss_fn_inputs[name])
            assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def dense(tensor: pb.Tensor) -> np.ndarray:
    """A tensor that fits, cell by cell."""
    dtype = DTYPES[tensor.dtype]
    if not tensor.HasField("sparse_csr"):
        return np.frombuffer(tensor.dense, dtype).reshape(tuple(tensor.shape) or -1)
    values = np.frombuffer(tensor.sparse_csr.values, dtype)
    crow, col = (np.frombuffer(one, "<i8") for one in (tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices))
    filled = np.zeros(tuple(tensor.shape), dtype)
    for row in range(len(crow) - 1):
        for at in range(crow[row], crow[row + 1]):
            filled[row, col[at]] = values[at]
    return filled


def fits(tensor: pb.Tensor) -> bool:
    """Its bytes are as many numbers as its shape has cells; or its indices are those of that many rows and columns."""
    size = DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 0
    if not size or any(one < 0 for one in tensor.shape):
        return False
    if not tensor.HasField("sparse_csr"):
        return len(tensor.dense) == size * math.prod(tensor.shape) if tensor.shape else len(tensor.dense) % size == 0
    csr = tensor.sparse_csr
    if len(tensor.shape) != 2 or len(csr.values) % size or len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        return False
    rows, columns = tensor.shape
    crow, col = (np.frombuffer(one, "<i8").tolist() for one in (csr.crow_indices, csr.col_indices))
    stored = len(csr.values) // size
    rises = len(crow) == rows + 1 and crow[0] == 0 and crow[-1] == stored and crow == sorted(crow)
    return rises and columns <= MAX_COLUMNS and len(col) == stored and all(0 <= one < columns for one in col)


def is_known(chunk: pb.Chunk) -> bool:
    whole = len(chunk.encoded_text.tokens) % 4 == 0
    return whole if chunk.HasField("encoded_text") else chunk.image.format in ("png", "jpeg")


def test_the_undamaged_body_is_read() -> None:
    assert_holds(present(decoded(BODY)), pb.ForwardBackwardRequest.FromString(BODY))
    assert decoded(BODY[:-1]) is None


@MANY
@given(damaged())
def test_a_damaged_protobuf_is_read_as_protobuf_reads_it_or_refused(body: bytes) -> None:
    envelope = wire.envelope_of(body)
    if (request := decoded(body)) is not None:
        message = pb.ForwardBackwardRequest.FromString(body)
        assert_holds(request, message)
        assert envelope == (message.model_id, message.seq_id, message.forward_only)


@MANY
@given(st.lists(DATUM, max_size=2))
def test_tensors_are_read_if_their_sizes_agree_and_else_refused(data: list[pb.Datum]) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=data, loss_fn="ppo")
    request = decoded(message.SerializeToString())
    agree = all(fits(tensor) for datum in data for tensor in datum.loss_fn_inputs.values())
    assert (request is not None) == (agree and all(is_known(chunk) for datum in data for chunk in datum.model_input))
    if request is not None:
        assert_holds(request, message)


@MANY
@given(damaged(zstandard.compress(BODY)))
def test_a_damaged_zstd_frame_is_read_or_refused(body: bytes) -> None:
    try:
        assert len(wire.decompress(body, 1 << 20)) <= 1 << 20
    except wire.MalformedBody as error:
        assert "zstd" in str(error)


def test_every_cut_of_a_zstd_frame_is_refused_and_so_is_what_follows_it() -> None:
    frame = zstandard.compress(BODY)
    assert wire.decompress(frame, 1 << 20) == BODY
    for body in [frame[:length] for length in range(len(frame))] + [frame + b"\0", frame + frame]:
        with pytest.raises(wire.MalformedBody, match="zstd"):
            wire.decompress(body, 1 << 20)


@FEW
@given(damaged())
def test_the_server_refuses_what_is_damaged(server: Running, body: bytes) -> None:
    for content, headers in (
        (body, PROTOBUF),
        (zstandard.compress(body), PROTOBUF | {"content-encoding": "zstd"}),
        (body, PROTOBUF | {"content-encoding": "zstd"}),
        (body, {"content-type": "application/json"}),
    ):
        answer = server.http.post("/forward_backward", content=content, headers=headers)
        assert answer.status_code in (400, 404, 422) and answer.json()["detail"]


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.usefixtures("alive")
def test_a_bomb_is_refused_before_it_fills_the_memory(server: Running) -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join([*(compressor.compress(bytes(1 << 24)) for _ in range(64)), compressor.flush()])
    assert len(bomb) < 200_000  # of a gibibyte
    started = time.monotonic()
    refused = server.http.post("/forward_backward", content=bomb, headers=PROTOBUF | {"content-encoding": "zstd"})
    assert refused.status_code == 400 and "grows past" in refused.json()["detail"]
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("opening", ["[", '{"a":', '{"user_metadata":{"a":[', '{"prompt":{"chunks":['])
def test_brackets_without_end_are_refused_by_every_route(server: Running, opening: str) -> None:
    paths = server.http.get(f"{server.url}/openapi.json").json()["paths"]
    posts = [path for path, operations in paths.items() if "requestBody" in operations.get("post", {})]
    assert len(posts) > 20
    for path in posts:
        for closing in ("", "]" * 100_000):
            content = opening + "[" * 100_000 + closing
            headers = {"content-type": "application/json"}
            refused = server.http.post(f"{server.url}{path}", content=content, headers=headers)
            assert refused.status_code in (400, 422) and refused.json()["detail"], (path, refused.text)


@pytest.mark.usefixtures("alive")
def test_a_client_that_declares_a_gibibyte_and_leaves_costs_nothing(server: Running) -> None:
    address = httpx.URL(server.url)
    for sent in (b"", b"x" * 1000):
        with socket.create_connection((address.host, address.port or 0), timeout=10) as connection:
            head = "POST /api/v1/optim_step HTTP/1.1\r\nHost: test\r\nContent-Length: 1073741824\r\n\r\n"
            connection.sendall(head.encode() + sent)
        assert server.http.get("/healthz").status_code == 200


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize(
    "path",
    [
        "/sessions/a%00",
        "/samplers/%00",
        "/training_runs/a%00b",
        "/checkpoints?project_id=%00",
        "/training_runs?project_id=a%00",
        "/billing/usage/checkpoints/current?project_id=%00",
        "/files/%00?expires=1&signature=a",
        "/sessions/%ed%a0%80",
        "/sessions?offset=" + "9" * 30,
        "/files/a?expires=" + "9" * 5000 + "&signature=a",
    ],
)
def test_what_a_database_cannot_hold_is_refused_in_urls_too(server: Running, path: str) -> None:
    refused = server.http.get(path)
    assert refused.status_code in (404, 422) and refused.json()["detail"]
    assert "%00" not in path or ("NUL" in refused.json()["detail"] and refused.status_code == 422)


def test_an_odd_version_of_the_sdk_is_no_version(server: Running) -> None:
    headers = {"x-stainless-package-version": "9" * 5000 + ".1"}
    assert server.http.get("/checkpoints", headers=headers).status_code == 200


def test_a_refused_sample_is_not_parsed_again_for_a_number(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million numbers take half a second, in which Python runs nothing else."""
    parsed: list[bytes] = []
    monkeypatch.setattr(submission, "_number_of", lambda body, content_type: parsed.append(body))
    for path, num_parsed in (("/asample", 0), ("/optim_step", 1)):
        refused = server.post(path, model_id="m", seq_id=1, more="x" * 2000)
        assert refused.status_code == 422 and len(parsed) == num_parsed
