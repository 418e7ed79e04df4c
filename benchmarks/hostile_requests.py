"""Hostile requests of one owner: large, malformed or slow bodies, and work that grows from a few bytes."""

import base64
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.factories import photo
from tinker_server.api_schemas import tinker_wire_pb2 as pb

MIB = 1 << 20
PROTOBUF = "application/x-protobuf"
CONTEXT = 2048


@dataclass
class Client:
    """One owner's requests."""

    port: int
    key: str
    images: Path
    """A directory that the server may read images from."""
    image_port: int
    """Port of this machine from which it may fetch images."""
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"x-api-key": self.key, "authorization": f"Bearer {self.key}"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=300)

    def post(self, path: str, body: bytes, content_type: str = "application/json", **headers: str) -> httpx.Response:
        """Send a body as it is."""
        return self.http.post(path, content=body, headers={"content-type": content_type, **headers})

    def call(self, path: str, **body: object) -> Any:
        """Send a request of the API; return its answer, which must be right."""
        answer = self.http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text[:500]
        return answer.json()

    def chat(self, **fields: object) -> httpx.Response:
        """Ask for one token."""
        messages = [{"role": "user", "content": "what is this"}]
        body: dict[str, object] = {"model": "tiny", "max_tokens": 1, "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    @contextmanager
    def begun(self, path: str, size_bytes: int, body: bytes = b"", **headers: str) -> Iterator[socket.socket]:
        """Send the head of a request, and the part of its body that is given."""
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {self.key}", f"Content-Length: {size_bytes}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        with socket.create_connection(("127.0.0.1", self.port), timeout=300) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            yield connection


Attack = Callable[[Client], None]


def at_once(count: int, do: Callable[[int], object]) -> list[object]:
    """Do it so many times side by side."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(do, range(count)))


def wrong_chats(client: Client) -> None:
    """S1: lists of a million values where objects belong."""
    zeros = b"[" + b"0," * (MIB - 1) + b"0]"
    for field_name in (b"messages", b"tools", b"stop", b"prompt", b"input", b"metadata"):
        body = b'{"model":"tiny","max_tokens":1,"' + field_name + b'":' + zeros + b"}"
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
            client.post(path, body)


def short_wrong_chats(client: Client) -> None:
    """S1: 31 KiB, many times, at the edge of what is parsed."""
    bodies: list[dict[str, object]] = [
        {"messages": [{}] * 8000},
        {"messages": [{"role": "user", "content": [{}] * 8000}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 1000},
    ]
    for body in bodies * 3:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
            client.post(path, json.dumps({"model": "tiny", "max_tokens": 1} | body).encode())


def long_texts(client: Client) -> None:
    """S1: 15 MiB of text to be tokenized, each time for nothing."""
    text = "word " * (3 * MIB)
    for path, body in (
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a" * 100_000] * 100}),
    ):
        client.post(path, json.dumps({"model": "tiny", "max_tokens": 1} | body).encode())


def zstd_bombs(client: Client) -> None:
    """S2: sixteen bodies of a few kilobytes, each as large as a body may be."""
    tokens = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(200 * MIB)))
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[pb.Datum(model_input=[tokens])], loss_fn="x")
    body = zstandard.compress(request.SerializeToString())
    del request, tokens
    at_once(16, lambda _: client.post("/api/v1/forward_backward", body, PROTOBUF, **{"content-encoding": "zstd"}))


def unfinished_bodies(client: Client) -> None:
    """S2: two hundred bodies of which four megabytes come, and no more for five seconds."""

    def begin(_: int) -> None:
        try:
            with client.begun("/api/v1/forward_backward", 200 * MIB) as connection:
                connection.settimeout(5)
                connection.sendall(bytes(4 * MIB))
                time.sleep(5)
        except OSError:
            pass

    at_once(200, begin)


def json_polls(client: Client) -> None:
    """S3: four polls for a result of megabytes, by a client that takes no protobuf."""
    request_id = large_result(client)
    body = json.dumps({"request_id": request_id}).encode()
    at_once(4, lambda _: client.post("/api/v1/retrieve_future", body, accept="application/json"))


def unread_results(client: Client) -> None:
    """S3: three hundred polls for a result of megabytes, none of which is read."""
    body = json.dumps({"request_id": large_result(client)}).encode()

    def poll(_: int) -> None:
        try:
            with client.begun(
                "/api/v1/retrieve_future", len(body), body, Accept=PROTOBUF, **{"Content-Type": "application/json"}
            ) as connection:
                time.sleep(5)
                connection.close()
        except OSError:
            pass

    at_once(300, poll)


RESULTS: dict[str, str] = {}


def large_result(client: Client) -> str:
    """Return the id of a finished operation with a result of some megabytes."""
    if client.key not in RESULTS:
        session = client.call("create_session")["session_id"]
        created = client.call(
            "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config={"rank": 1}
        )
        model_id = finished(client, created["request_id"]).json()["model_id"]
        values = np.ones(CONTEXT)
        targets = np.ones((CONTEXT, 16), "<i8").tobytes()
        datum = pb.Datum(
            model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=values.astype("<i4").tobytes()))],
            loss_fn_inputs={
                "target_tokens": pb.Tensor(dtype=pb.DTYPE_INT64, shape=[CONTEXT, 16], dense=targets),
                "weights": pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[CONTEXT, 16], dense=bytes(CONTEXT * 64)),
            },
        )
        request = pb.ForwardBackwardRequest(
            model_id=model_id, seq_id=1, data=[datum] * 100, loss_fn="cross_entropy", forward_only=True
        )
        sent = client.post("/api/v1/forward_backward", request.SerializeToString(), PROTOBUF)
        assert sent.status_code == 200, sent.text
        answer = finished(client, sent.json()["request_id"])
        print(f"    a result of {len(answer.content) / 1e6:.1f} MB")
        RESULTS[client.key] = sent.json()["request_id"]
    return RESULTS[client.key]


def finished(client: Client, request_id: str) -> httpx.Response:
    """Wait for a result."""
    body = json.dumps({"request_id": request_id}).encode()
    while (answer := client.post("/api/v1/retrieve_future", body, accept=PROTOBUF)).status_code == 408:
        pass
    assert answer.status_code == 200 and not answer.content.startswith(b'{"error"'), answer.content[:500]
    return answer


def grammars(client: Client) -> None:
    """S4: patterns that are let in, and ones that are not."""

    def form(pattern: str) -> dict[str, Any]:
        value = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}

    patterns = [
        "^(([a-z ]{1,900}x?){1,900}y?){1,900}$",
        "^([a-z ]{1,100}x?){1,100}$",
        "^(([a-z ]{1,20}x?){1,20}y?){1,20}$",
        "^" + "[a-z ]?" * 500 + "$",
        "^([a-z ]*x?)*(([a-z ]*y?)*z?)*$",
    ]
    for pattern in patterns:
        client.chat(max_tokens=500, response_format=form(pattern))
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": many}}
    client.chat(max_tokens=50, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": many}})
    client.chat(max_tokens=50, tools=[tool], tool_choice="required")


def unstorable(client: Client) -> None:
    """S8: values that no database can store, on several routers."""
    for path in ("/api/v1/sessions/a%00", "/v1/models/a%00b", "/runs/a%00b", "/api/v1/training_runs?project_id=%00"):
        for _ in range(20):
            client.http.get(path)
    for _ in range(20):
        client.post("/api/v1/create_session", b'{"user_metadata":{"a":"\\u0000"}}')
        client.post("/api/v1/sessions/search", b'{"user_metadata":{"\\ud800":"a"}}')


def notes(client: Client) -> None:
    """S9: sessions with as many notes as there may be, and lists of them."""
    large = {f"k{number}": "" for number in range(1200)}
    for _ in range(150):
        client.call("create_session", user_metadata=large, tags=["x" * 100] * 150)
    client.post("/api/v1/create_session", json.dumps({"user_metadata": {"a": "x" * 1_000_000}}).encode())
    for _ in range(20):
        client.http.get("/api/v1/sessions?limit=1000")
        client.call("sessions/search", limit=200)


def gallery(client: Client) -> None:
    """S10: samples with many stop strings and many chunks."""
    chunk = {"type": "encoded_text", "tokens": [1]}
    prompt = {"chunks": [chunk] * (CONTEXT - 10)}
    stops = ["x" * 60 + str(number) for number in range(1000)]
    for _ in range(15):
        sent = client.call(
            "asample", base_model="tiny", prompt=prompt, sampling_params={"max_tokens": 1, "stop": stops}, num_samples=1
        )
        finished(client, sent["request_id"])


def many_stops(client: Client) -> None:
    """S10: sixty-four sequences at once, each with a thousand stop strings, and as many without."""
    for stops in ([], ["x" * 50 + str(number) for number in range(1000)]):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        params = {"max_tokens": 300, "stop": stops} if stops else {"max_tokens": 300}
        began = time.monotonic()
        sent = client.call("asample", base_model="tiny", prompt=prompt, sampling_params=params, num_samples=64)
        finished(client, sent["request_id"])
        print(f"    64 x 300 tokens with {len(stops)} stop strings: {time.monotonic() - began:.1f} s")


def small_floods(client: Client) -> None:
    """S11: the log, /login, telemetry, metrics, and operations that wait for a number that does not come."""
    form = "&".join(["key=x"] * 1100).encode()
    session = client.call("create_session")["session_id"]
    created = client.call(
        "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config={"rank": 1}
    )
    model_id = finished(client, created["request_id"]).json()["model_id"]
    events = [{"event": f"{number}", "text": "x" * 900} for number in range(900)]
    for _ in range(50):
        client.post("/login", form, "application/x-www-form-urlencoded")
        client.call("telemetry", session_id="s", sdk_version="1", events=events)
        client.http.post(
            f"/api/v1/training_runs/{model_id}/metrics", json={"step": 1, "metrics": {f"m{i}": 1.0 for i in range(500)}}
        )
    at_once(16, lambda part: [late(client, model_id, number) for number in range(2 + part, 3000, 16)])


def late(client: Client, model_id: str, number: int) -> httpx.Response:
    """Send a step whose first predecessor does not come."""
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=number, loss_fn="x")
    return client.post("/api/v1/forward_backward", request.SerializeToString(), PROTOBUF)


def quoted(client: Client) -> None:
    """Texts and names of megabytes in places that a refusal quotes."""
    long = "x" * (60 * MIB)
    short = "x" * (15 * MIB)
    for request in (
        pb.ForwardBackwardRequest(model_id=long, seq_id=1, loss_fn="a"),
        pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=long),
    ):
        client.post("/api/v1/forward_backward", request.SerializeToString(), PROTOBUF)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    for body in ({"sampling_session_id": long}, {long: 1}, {"base_model": long}):
        client.post("/api/v1/asample", json.dumps({"prompt": prompt, "sampling_params": {}} | body).encode())
    for path, fields in (
        ("/v1/completions", {"model": short}),
        ("/v1/chat/completions", {short: 1}),
        ("/v1/responses", {"text": {"verbosity": short}}),
        ("/v1/responses", {"metadata": {"a": short}}),
        ("/v1/responses", {"metadata": {"a": [0] * 900_000}}),
    ):
        client.post(path, json.dumps({"model": "tiny", "input": "a", "max_output_tokens": 16} | fields).encode())


def images(client: Client) -> None:
    """Images that decode to as many pixels as there may be."""
    url = f"data:image/png;base64,{base64.b64encode(photo(4000, 4000)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}] * 2
    at_once(8, lambda _: client.chat(messages=[{"role": "user", "content": content}]))


REQUESTS: dict[str, Attack] = {
    "S1 lists of a million values": wrong_chats,
    "S1 lists of 8,000 wrong objects": short_wrong_chats,
    "S1 texts of 15 MiB": long_texts,
    "S2 zstd bombs": zstd_bombs,
    "S2 unfinished bodies": unfinished_bodies,
    "S3 polls as JSON": json_polls,
    "S3 results that are not read": unread_results,
    "S4 grammars": grammars,
    "S8 what no database stores": unstorable,
    "S9 notes and lists": notes,
    "S10 stop strings and chunks": gallery,
    "S10 stop strings of many sequences": many_stops,
    "S11 log, forms, waiting operations": small_floods,
    "texts that refusals quote": quoted,
    "large images": images,
}
