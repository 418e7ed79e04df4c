"""Hostile inputs that cost a thread, the disk or a connection more than they weigh."""

import base64
import http.server
import io
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.hostile_requests import CONTEXT, MIB, PROTOBUF, Attack, Client, at_once, finished
from tests.factories import photo
from tinker_server.api_schemas import tinker_wire_pb2 as pb


def patterns(client: Client) -> None:
    """Send chats with 150 patterns of four kilobytes in each, eight at once, for five seconds."""
    schema = {"properties": {str(number): {"pattern": f"{number:04}" + "(a?)" * 1023} for number in range(150)}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    until = time.monotonic() + 5
    while time.monotonic() < until:
        at_once(8, lambda _: client.chat(response_format=form))


def thumbnails(client: Client) -> None:
    """Sample a picture that fills the context, and look at its thumbnail a hundred times."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((2000, 1950, 3), np.uint8)).save(file, "PNG")
    image = {"type": "image", "format": "png", "data": base64.b64encode(file.getvalue()).decode()}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}, image]}
    sent = client.call("asample", base_model="tiny", prompt=prompt, sampling_params={"max_tokens": 1}, num_samples=1)
    finished(client, sent["request_id"])
    client.http.post("/login", data={"key": client.key})
    found = re.search(r"/samples/[0-9a-f]{32}/thumbnails/0", client.http.get("/samples").text)
    assert found is not None
    at_once(100, lambda _: client.http.get(found[0]))


def encoded_images(client: Client) -> None:
    """Name images of a host that answers with zstd: 33 kB that become a gigabyte."""
    body = zstandard.compress(bytes(1 << 30))

    class Host(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for header in (("content-type", "image/png"), ("content-encoding", "zstd")):
                self.send_header(*header)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    url = f"http://127.0.0.1:{client.image_port}/image.png"
    with http.server.ThreadingHTTPServer(("127.0.0.1", client.image_port), Host) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        at_once(4, lambda _: client.chat(messages=seeing(url)))
        host.shutdown()


def seeing(*urls: str) -> list[dict[str, Any]]:
    """Return a conversation with images by address."""
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def many_addresses(client: Client) -> None:
    """Name 4,000 files in each of four chats, all different names of one small image."""
    (client.images / "one.png").write_bytes(photo(8, 8))
    for number in range(4000):
        with suppress(FileExistsError):
            (client.images / f"{number}.png").symlink_to(client.images / "one.png")
    urls = [f"file://{client.images}/{number}.png" for number in range(4000)]
    at_once(4, lambda _: client.chat(messages=seeing(*urls)))


def pipelined(client: Client) -> None:
    """Send 20,000 requests without a key on each of thirty connections, behind a page that is not read."""
    requests = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000

    def send(_: int) -> None:
        with connected(client) as connection:
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.settimeout(5)
            connection.sendall(requests)
            time.sleep(5)

    at_once(30, send)


@contextmanager
def connected(client: Client) -> Iterator[socket.socket]:
    """Open a connection that the server may end at any time."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        yield connection


def pages_without_a_key(client: Client) -> None:
    """Ask for the pages that need no key, 200 times each."""

    def get(_: int) -> None:
        for path in ("/docs", "/openapi.json"):
            for _number in range(25):
                client.http.get(path, headers={"x-api-key": "", "authorization": ""})

    at_once(8, get)


def results_on_disk(client: Client) -> None:
    """Run two passes whose bodies have 150 bytes, and whose results have megabytes. Refusals end them."""
    session = client.call("create_session")["session_id"]
    created = client.call(
        "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config={"rank": 1}
    )
    model_id = finished(client, created["request_id"]).json()["model_id"]
    tokens = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.ones(CONTEXT, "<i4").tobytes()))
    empty = pb.SparseCsr(crow_indices=np.zeros(CONTEXT + 1, "<i8").tobytes())
    targets = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[CONTEXT, 64], sparse_csr=empty)
    weights = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[CONTEXT, 64], sparse_csr=empty)
    datum = pb.Datum(model_input=[tokens], loss_fn_inputs={"target_tokens": targets, "weights": weights})
    for number in (1, 2):
        request = pb.ForwardBackwardRequest(
            model_id=model_id, seq_id=number, data=[datum] * 60, loss_fn="cross_entropy", forward_only=True
        )
        body = zstandard.compress(request.SerializeToString())
        sent = client.post("/api/v1/forward_backward", body, PROTOBUF, **{"content-encoding": "zstd"})
        if sent.status_code != 200:
            print(f"    refused: {sent.status_code} {sent.text[:100]}")
            return
        answer = finished(client, sent.json()["request_id"])
        print(f"    {len(body)} bytes became a result of {len(answer.content) / MIB:.1f} MiB")


def client_metrics(client: Client) -> None:
    """Report 500 values 80 times to a run. Refusals end it."""
    session = client.call("create_session")["session_id"]
    created = client.call(
        "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config={"rank": 1}
    )
    path = f"/api/v1/training_runs/{finished(client, created['request_id']).json()['model_id']}/metrics"
    for step in range(80):
        metrics = {f"m{number}/{'x' * 100}": float(step) for number in range(500)}
        body = json.dumps({"step": step, "metrics": metrics}).encode()
        if client.post(path, body).status_code >= 400:
            print(f"    refused after {500 * step} values")
            return


INPUTS: dict[str, Attack] = {
    "inputs: patterns": patterns,
    "inputs: thumbnails": thumbnails,
    "inputs: encoded images of a host": encoded_images,
    "inputs: many addresses": many_addresses,
    "inputs: pipelined requests": pipelined,
    "inputs: pages without a key": pages_without_a_key,
    "inputs: results on disk": results_on_disk,
    "inputs: client metrics": client_metrics,
}
