"""No body stalls the event loop: all other clients are answered by it meanwhile.

pytest tests/contract/test_event_loop.py -s    prints the longest stall of each body
"""

import asyncio
import base64
import json
import posixpath
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.factories import photo
from tests.fake_server import Running
from tests.stalls import longest_stall_until
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas.inputs import QUICK_CHUNKS
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.api_schemas.wire import PROTOBUF
from tinker_server.backends.protocol import PromptSize

LONGEST_STALL_S = 0.1
"""A copy of a body on the loop stalls it for 0.4 s; a busy machine for 0.08."""
JSON = "application/json"
MIB = 1 << 20
CHAT = "../../v1"
LONG = "x" * (15 * MIB)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("loop"), max_body_bytes=256 * MIB)
    yield running
    running.stop()


def ones(size_bytes: int) -> bytes:
    return b"[" + b"1," * (size_bytes // 2) + b"1]"


def sample(prompt: bytes, **fields: Any) -> bytes:
    body = {"sampling_session_id": "s", "seq_id": 1, "sampling_params": {}, "prompt": "PROMPT"} | fields
    return json.dumps(body).encode().replace(b'"PROMPT"', prompt)


def chat(length: int) -> bytes:
    message = {"role": "user", "content": "x" * length}
    return json.dumps({"model": "tiny", "max_tokens": 1, "messages": [message]}).encode()


def named(**fields: Any) -> bytes:
    """A chat, completion or response."""
    return json.dumps({"model": "tiny", "prompt" if "model" in fields else "input": "x"} | fields).encode()


def batch(*data: pb.Datum, model_id: str = "m", loss_fn: str = "cross_entropy") -> bytes:
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, data=data, loss_fn=loss_fn)
    return request.SerializeToString()


def named_tensor() -> pb.Datum:
    return pb.Datum(loss_fn_inputs={"x" * (60 * MIB): pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0])})


def datum(length: int, num_tensors: int = 2) -> pb.Datum:
    tokens = np.ones(length, "<i4").tobytes()
    values = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[length], dense=np.ones(length, "<f4").tobytes())
    return pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))],
        loss_fn_inputs={f"t{index}": values for index in range(num_tensors)},
    )


def long_text() -> pb.Datum:
    return pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(200 * MIB)))])


def long_tensor() -> pb.Datum:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[50 * MIB], dense=bytes(200 * MIB))
    return pb.Datum(loss_fn_inputs={"weights": tensor})


def long_image() -> pb.Datum:
    return pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk(data=photo(64, 64) + bytes(100 * MIB), format="png"))])


def bomb() -> pb.Datum:
    """Cells without end in a few bytes."""
    csr = pb.SparseCsr(crow_indices=bytes(16))
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1, 2**27], sparse_csr=csr)
    return pb.Datum(loss_fn_inputs={f"weights{index}": tensor for index in range(6)})


Bodies = dict[str, tuple[str, str, bytes, str]]
"""By what it is: route, content type, body, and a further header."""


def small_requests() -> Bodies:
    """Of telemetry, sessions and results."""
    words = ('{"session_id":"a","events":[{"message":"' + "é, no?" * 8_000 + '"}]}').encode()
    nested = json.dumps({"user_metadata": {"a": [[{"b": 1}] for _ in range(8_000)]}}).encode()
    acknowledged = {"sampling_session_id": "s", "type": "sampling_session"}
    poll = {"target": acknowledged, "retrieved_request_ids": [f"{number:032x}" for number in range(8_000)]}
    deep = b"[" * 60 + b"]" * 60 + b","
    return {
        "24 MiB without a key": ("telemetry", JSON, b'{"events":' + ones(24 * MIB) + b"}", "X-Key: none"),
        "96 MiB of telemetry": ("telemetry", JSON, b'{"events":' + ones(96 * MIB) + b"}", ""),
        "telemetry of 80 kB of text": ("telemetry", JSON, words, ""),
        "metadata of 8,000 lists": ("create_session", JSON, nested, ""),
        "metadata of 8,000 lists 60 deep": ("create_session", JSON, b'{"a":[' + deep * 8000 + b"1]}", ""),
        "8,000 acknowledgements": ("retrieve_futures", JSON, json.dumps(poll).encode(), ""),
    }


def chats() -> Bodies:
    """Of the chat endpoints."""
    lists = b'{"prompt":[' + b"[[[[[[1]]]]]]," * 900_000 + b"1]}"
    return {
        "a chat of 5 million lists": (f"{CHAT}/completions", JSON, lists, ""),
        "a chat that is called protobuf": (f"{CHAT}/completions", PROTOBUF, b'{"prompt":' + ones(24 * MIB) + b"}", ""),
        "a chat of 60,000 values": (f"{CHAT}/chat/completions", JSON, b'{"tools":[{"a":' + ones(120_000) + b"}]}", ""),
        "a chat of 250 MB of text": (f"{CHAT}/chat/completions", JSON, chat(250_000_000), ""),
        "a chat whose model has a name of 15 MiB": (f"{CHAT}/completions", JSON, named(model=LONG), ""),
        "a chat with a field of a name of 15 MiB": (f"{CHAT}/chat/completions", JSON, named(**{LONG: 1}), ""),
        "a message with a verbosity of 15 MiB": (f"{CHAT}/responses", JSON, named(text={"verbosity": LONG}), ""),
        "a response's metadata of 15 MiB": (f"{CHAT}/responses", JSON, named(metadata={"a": LONG}), ""),
        "a response's metadata of 900,000 values": (
            f"{CHAT}/responses",
            JSON,
            named(metadata="ONES").replace(b'"ONES"', ones(1_800_000)),
            "",
        ),
        "a response with a text of 900,000 fields": (
            f"{CHAT}/responses",
            JSON,
            named(text={"format": {"type": "text", "a": "ONES"}}).replace(b'"ONES"', ones(1_800_000)),
            "",
        ),
    }


def samples() -> Bodies:
    """Of samples."""
    image = base64.b64encode(photo(64, 64) + bytes(8 * MIB))
    chunk = b'{"chunks":[{"type":"image","format":"png","data":"' + image + b'"}]}'
    ids = b'{"chunks":[{"tokens":' + ones(2 * MIB - 100) + b"}]}"
    return {
        "a sampling session of a name of 100 MiB": (
            "asample",
            JSON,
            sample(b'{"chunks":[{"tokens":[1]}]}', sampling_session_id="x" * (100 * MIB)),
            "",
        ),
        "a sample with a field of a name of 100 MiB": (
            "asample",
            JSON,
            sample(b'{"chunks":[{"tokens":[1]}]}', **{"x" * (100 * MIB): 1}),
            "",
        ),
        "0.8 MiB of wrong chunks": ("asample", JSON, sample(b'{"chunks":' + ones(8 * MIB // 10) + b"}"), ""),
        "a prompt of a million tokens": ("asample", JSON, sample(ids), ""),
        "60 MiB of tokens": ("asample", JSON, sample(b'{"chunks":[{"tokens":' + ones(60 * MIB) + b"}]}"), ""),
        "an image of 8 MiB in base64": ("asample", JSON, sample(chunk), ""),
        "100,000 samples": ("asample", JSON, sample(b'{"chunks":[{"tokens":[1]}]}', num_samples=100_000), ""),
    }


def batches() -> Bodies:
    """Of forward_backward."""
    old = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"loss_fn": "cross_entropy", "data": "DATA"}}
    target = {"shape": [2**18], "dtype": "float32", "data": "ONES"}
    old_datum = json.dumps([{"model_input": {"chunks": []}, "loss_fn_inputs": {"t": target}}]).encode()
    old_body = json.dumps(old).encode().replace(b'"DATA"', old_datum.replace(b'"ONES"', ones(MIB // 2 - 2)))
    refused = {"model_id": "m", "seq_id": 1, "forward_backward_input": 1, "more": "ONES"}
    large = [datum(4000) for _ in range(256)]
    images = pb.Datum(
        model_input=[pb.Chunk(image=pb.ImageChunk(data=photo(64, 64) + bytes(3 * MIB), format="png"))] * 63
    )
    return {
        "a model_id of 60 MiB": ("forward_backward", PROTOBUF, batch(model_id="é" * (30 * MIB)), ""),
        "a loss of 60 MiB": ("forward_backward", PROTOBUF, batch(loss_fn="é" * (30 * MIB)), ""),
        "a tensor's name of 60 MiB": ("forward_backward", PROTOBUF, batch(named_tensor()), ""),
        "a batch in JSON": ("forward_backward", JSON, old_body, ""),
        "a refused batch in JSON": (
            "forward_backward",
            JSON,
            json.dumps(refused).encode().replace(b'"ONES"', ones(2 * MIB - 100)),
            "",
        ),
        "sparse tensors of 2^27 cells": ("forward_backward", PROTOBUF, batch(bomb()), ""),
        "a batch of 190 MiB": ("forward_backward", PROTOBUF, batch(*[datum(2**15)] * 500), ""),
        "190 MiB of images in a datum": ("forward_backward", PROTOBUF, batch(images), ""),
        "a batch of 12 MiB": ("forward_backward", PROTOBUF, batch(*large), ""),
        "4,000 empty datums": ("forward_backward", PROTOBUF, batch(*[pb.Datum()] * 4000), ""),
        "1 KiB of datums": ("forward_backward", PROTOBUF, batch(*[pb.Datum()] * 490), ""),
        "1024 datums": ("forward_backward", PROTOBUF, batch(*[datum(16, 3)] * 1024), ""),
        "2 million empty datums": ("forward_backward", PROTOBUF, b"\x1a\x00" * 2_000_000, ""),
        "a text of 200 MiB": ("forward_backward", PROTOBUF, batch(long_text()), ""),
        "a tensor of 200 MiB": ("forward_backward", PROTOBUF, batch(long_tensor()), ""),
        "an image of 100 MiB": ("forward_backward", PROTOBUF, batch(long_image()), ""),
        "a text of 200 MiB in zstd": (
            "forward_backward",
            PROTOBUF,
            zstandard.compress(batch(long_text())),
            "Content-Encoding: zstd",
        ),
        "a zstd bomb": (
            "forward_backward",
            PROTOBUF,
            zstandard.compress(bytes(512 * MIB)),
            "Content-Encoding: zstd",
        ),
    }


def post(server: Running, path: str, content_type: str, body: bytes, header: str) -> int:
    """Status of the answer. Plain sockets, so that the client itself does not hold the interpreter."""
    key = "" if header.startswith("X-Key") else "X-API-Key: tml-test\r\n"
    url = posixpath.normpath(f"/api/v1/{path}")
    head = (
        f"POST {url} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n{key}"
        f"Content-Length: {len(body)}\r\n{header}{chr(13) + chr(10) if header else ''}\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(head.encode())
        connection.sendall(body)
        return int(connection.recv(65536).split()[1])


def stall_under(server: Running, body: tuple[str, str, bytes, str]) -> tuple[int, float]:
    done = asyncio.Event()
    watch = asyncio.run_coroutine_threadsafe(longest_stall_until(done), server.loop)
    status = post(server, *body)
    time.sleep(0.02)
    server.loop.call_soon_threadsafe(done.set)
    return status, watch.result(60)


@pytest.mark.parametrize("make", [small_requests, chats, samples, batches])
def test_the_loop_comes_round_while_a_body_is_read_checked_and_refused(
    server: Running, make: Callable[[], Bodies]
) -> None:
    """The bodies are made here: two gigabytes, which each worker of a run would keep from its start."""
    for name, body in make().items():
        stalls: list[float] = []
        for _ in range(4):  # the machine is shared: one quiet time is enough
            status, stall_s = stall_under(server, body)
            stalls.append(stall_s)
            assert 200 <= status < 500, name
            if stall_s < LONGEST_STALL_S / 4:
                break
        print(f"\n{name}: answered {status}, longest stall {min(stalls) * 1e3:.1f} ms")
        assert min(stalls) < LONGEST_STALL_S, (name, stalls)
        assert server.http.get("/healthz").status_code == 200, name


@pytest.mark.parametrize("num_polls", [1, 8])
def test_the_loop_comes_round_while_large_results_are_sent_as_json(server: Running, num_polls: int) -> None:
    """The results are log probabilities, fifteen megabytes for a single poll, for clients that take no protobuf."""
    length = 2_000_000 if num_polls == 1 else 150_000
    numbers = np.ones(length, "<f4").tobytes()
    one = pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.ones(length, "<i4").tobytes()))],
        loss_fn_inputs={
            "target_tokens": pb.Tensor(dtype=pb.DTYPE_INT64, shape=[length], dense=np.ones(length, "<i8").tobytes()),
            "weights": pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[length], dense=numbers),
        },
    )
    request = pb.ForwardBackwardRequest(model_id=server.model(), seq_id=1, data=[one, one], loss_fn="cross_entropy")
    protobuf = {"content-type": PROTOBUF}
    submitted = server.http.post("/forward_backward", content=request.SerializeToString(), headers=protobuf)
    poll = json.dumps({"request_id": server.result(submitted) and submitted.json()["request_id"]}).encode()
    stalls: list[float] = []
    headers = {"accept": JSON, "content-type": JSON}
    while len(stalls) < 4 and min(stalls, default=1) > LONGEST_STALL_S:  # the machine is shared
        done = asyncio.Event()
        watch = asyncio.run_coroutine_threadsafe(longest_stall_until(done), server.loop)
        with ThreadPoolExecutor(num_polls) as polls:
            asked = [
                polls.submit(server.http.post, "/retrieve_future", content=poll, headers=headers, timeout=120)
                for _ in range(num_polls)
            ]
            answers = [one.result() for one in asked]
        server.loop.call_soon_threadsafe(done.set)
        stalls.append(watch.result(60))
    print(f"{num_polls} x {len(answers[0].content) / 1e6:.0f} MB as JSON: longest stall {min(stalls) * 1e3:.1f} ms")
    assert all(answer.content == answers[0].content for answer in answers)
    outputs = answers[0].json()["loss_fn_outputs"]
    assert [len(output["logprobs"]["data"]) for output in outputs] == [length] * 2
    assert min(stalls) < LONGEST_STALL_S, stalls


@pytest.mark.parametrize(("num_chunks", "is_inline"), [(QUICK_CHUNKS, True), (16_000, False)])
def test_a_prompt_of_many_chunks_is_laid_out_beside_the_loop(
    server: Running, num_chunks: int, is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real processor 16,000 chunks take a tenth of a second."""
    threads: list[str] = []
    tiny = server.backend.tiny
    check_sample = tiny.check_sample

    def noting(request: SampleRequest) -> PromptSize:
        threads.append(threading.current_thread().name)
        return check_sample(request)

    monkeypatch.setattr(tiny, "check_sample", noting)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}] * num_chunks}
    server.result(server.post("/asample", base_model="tiny", prompt=prompt, sampling_params={"max_tokens": 1}))
    assert [one == server._thread.name for one in threads] == [is_inline]
