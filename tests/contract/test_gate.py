"""The head of a request decides access and size, before its body is read or anything is parsed.

pytest tests/contract/test_gate.py
"""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fake_server import Running, forward_backward_body
from tinker_server.auth import keys
from tinker_server.models import admission
from tinker_server.release import release
from tinker_server.routes import health
from tinker_server.web import connections, http

OPEN = ("/api/v1/healthz", "/api/v1/files/", "/api/v1/archives/", "/api/v1/traces/", "/api/v1/uploads/")
KEY = "X-API-Key: tml-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Without keys, on the loopback interface."""
    running = Running(tmp_path_factory.mktemp("open"), max_body_bytes=8 << 20)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With keys."""
    data_dir = tmp_path_factory.mktemp("guarded")
    keys.add(data_dir / "keys", "alice")
    running = Running(data_dir)
    yield running
    running.stop()


def answer_to(
    server: Running, start: str, *headers: str, body: bytes = b"", host: str = "localhost"
) -> tuple[int, str]:
    """Status and body of the answer to what may be half a request. Raises TimeoutError where none comes."""
    head = "\r\n".join([f"{start} HTTP/1.1", f"Host: {host}", *headers, "", ""])
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=3) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(65536)
            assert part, f"closed after {received!r}"
            received += part
        head_bytes, _, content = received.partition(b"\r\n\r\n")
        length = int(head_bytes.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if start.startswith("HEAD "):  # the length is that of GET's answer
            length = 0
        while len(content) < length:
            content += connection.recv(65536)
    return int(head_bytes.split()[1]), content.decode()


def posts(server: Running) -> list[str]:
    paths = server.http.get(f"{server.url}/openapi.json").json()["paths"]
    return [path for path, operations in paths.items() if "requestBody" in operations.get("post", {})]


@pytest.mark.parametrize("framing", ["Content-Length: 100000000", "Transfer-Encoding: chunked"])
def test_a_wrong_key_is_refused_before_any_of_the_body_is_sent(guarded: Running, framing: str) -> None:
    assert len(posts(guarded)) > 20
    for path in posts(guarded):
        for key in ("X-Other: none", "X-API-Key: tml-wrong"):
            status, text = answer_to(guarded, f"POST {path}", framing, "Content-Type: application/json", key)
            assert status == 401 and "key" in json.loads(text)["detail"].lower(), (path, text)


def test_every_route_but_health_and_signed_links_asks_for_a_key(guarded: Running) -> None:
    paths = guarded.http.get(f"{guarded.url}/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for method in operations:
            status, text = answer_to(guarded, f"{method.upper()} {path.replace('{', '').replace('}', '')}")
            assert (status != 401) == path.startswith(OPEN), (method, path, status, text)
    assert answer_to(guarded, "GET /api/v1/nothing")[0] == 401


def test_health_and_version_are_told_without_a_key(guarded: Running) -> None:
    for path, said in (("/health", {"status": "ok"}), ("/version", release()._asdict())):
        assert answer_to(guarded, f"GET {path}") == (200, json.dumps(said, separators=(",", ":")))
        assert answer_to(guarded, f"POST {path}")[0] == 405


def test_only_batches_and_prompts_may_be_large(server: Running) -> None:
    large = {"/api/v1/forward_backward", "/api/v1/forward", "/api/v1/asample"}
    for path in posts(server):
        limit = 8 << 20 if path in large else 4096 if path == "/login" else 1 << 20
        status, text = answer_to(server, f"POST {path}", f"Content-Length: {limit + 1}", KEY)
        assert status == 413 and f"larger than {limit} bytes" in json.loads(text)["detail"], (path, text)


def test_a_small_body_of_too_many_values_is_refused_before_it_is_parsed(server: Running) -> None:
    events = json.dumps({"session_id": "a", "events": [{"a": [1] * 200_000}]}).encode()
    for chunked in (events, iter([events[:1000], events[1000:]])):
        refused = server.http.post("/telemetry", content=chunked, headers={"content-type": "application/json"})
        assert refused.status_code == 413 and "values" in refused.json()["detail"], refused.text


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "LOCALHOST"])
def test_without_keys_local_names_are_let_in(server: Running, host: str) -> None:
    assert answer_to(server, "GET /api/v1/get_server_capabilities", KEY, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "", "192.168.0.1", "localhost.evil", "["]
)
def test_without_keys_a_page_that_took_over_a_name_is_kept_out(server: Running, host: str) -> None:
    status, text = answer_to(server, "GET /api/v1/get_server_capabilities", KEY, host=host)
    assert status == 403 and "Host" in json.loads(text)["detail"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://localhost:3000", 200), ("http://127.0.0.1", 200)],
)
def test_without_keys_pages_of_other_origins_are_kept_out(server: Running, origin: str, status: int) -> None:
    assert answer_to(server, "GET /api/v1/get_server_capabilities", KEY, f"Origin: {origin}")[0] == status


def test_with_keys_any_name_and_origin_will_do(guarded: Running) -> None:
    key = keys.add(guarded.settings.resolve_keys_file(), "alice")
    time.sleep(keys.RELOAD_S)
    found = answer_to(
        guarded,
        "GET /api/v1/get_server_capabilities",
        f"X-API-Key: {key}",
        "Origin: https://a.example",
        host="my.server",
    )
    assert found[0] == 200


def test_while_keys_cannot_be_read_clients_are_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    key = keys.add(tmp_path / "keys", "alice")
    server = Running(tmp_path)
    try:
        server.http.headers["x-api-key"] = key
        assert server.http.get("/get_server_capabilities").status_code == 200
        (tmp_path / "keys").rename(tmp_path / "aside")
        assert server.http.get("/get_server_capabilities").status_code == 200
        monkeypatch.setattr(keys, "UNREADABLE_S", 0.0)
        for path in ("/api/v1/get_server_capabilities", "/v1/models"):
            refused = server.http.get(f"{server.url}{path}", headers={"authorization": f"Bearer {key}"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "cannot read its API keys" in refused.text and str(tmp_path) not in refused.text
        (tmp_path / "aside").rename(tmp_path / "keys")
        assert server.http.get("/get_server_capabilities").status_code == 200
    finally:
        server.stop()


def sent(server: Running, *parts: bytes, pause_s: float = 0) -> bytes:
    """The bytes that come back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:  # it was closed with data on its way
            pass
        return received


@pytest.mark.parametrize(
    "head",
    [
        [b"GET / HTTP/1.1\r\nX-Long: ", *[b"x" * 65536] * 200],
        [b"GET / HTTP/1.1\r\n", *[b"X-Many: y\r\n" * 1000] * 200],
        [b"GET /", *[b"x" * 65536] * 200],
        [b"x" * 65536] * 100,
        [
            b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ",
            *[b"x" * 65536] * 200,
        ],
        [b"POST /api/v1/telemetry HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", *[b"x" * 65536] * 200],
    ],
    ids=["one header", "many headers", "a URL", "no request", "a trailer", "an extension"],
)
def test_a_head_without_end_is_cut_off(server: Running, head: list[bytes]) -> None:
    received = sent(server, *head)
    assert not received or received.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 403"))
    assert server.http.get("/healthz").status_code == 200


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: loc", b"\r\n\r\n"])
def test_a_head_that_does_not_come_in_time_is_not_waited_for(
    server: Running, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.3)
    started = time.monotonic()
    assert sent(server, head) == b""
    assert time.monotonic() - started < 3


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_a_head_that_dribbles_is_not_waited_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.3)
    started = time.monotonic()
    sent(server, b"GET / HTTP/1.1\r\n", *[b"X: y\r\n"] * 100, pause_s=0.05)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(("number", "answered"), [(1 + http.NUM_WAITING, True), (20_000, False)])
def test_a_connection_holds_few_requests_that_wait(server: Running, number: int, answered: bool) -> None:
    requests = [b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"] * (number - 1)
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = sent(server, b"".join(requests) + last)
    assert received.count(b"HTTP/1.1 200") == (number if answered else 0), received[:1000]


def opened(server: Running, address: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of this machine, once the server has it."""
    port = int(server.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=3, source_address=(address, 0))
    connection.setblocking(False)
    return connection


def received(connection: socket.socket) -> bytes:
    """What has come so far."""
    try:
        return connection.recv(65536)
    except BlockingIOError:
        return b""


def num_open(sockets: list[socket.socket]) -> int:
    """How many of these the server has not ended."""
    number = 0
    for one in sockets:
        try:
            number += one.recv(1) != b""
        except BlockingIOError:
            number += 1
        except ConnectionError:
            pass
    return number


def test_a_crowd_of_connections_ends_its_own_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 8
    monkeypatch.setattr(connections, "MOST_STRANGERS", most)
    server = Running(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        other = stack.enter_context(opened(server, "127.0.0.2"))
        known = stack.enter_context(opened(server))
        known.sendall(f"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\n\r\n".encode())
        assert waits_until(lambda: received(known).startswith(b"HTTP/1.1 200"))
        crowd = [stack.enter_context(opened(server)) for _ in range(50)]
        # A connection that the server has not accepted yet is not ended yet.
        assert waits_until(lambda: num_open(crowd) == most - 1)
        assert num_open([other, known]) == 2 and num_open(crowd[-3:]) == 3, "the oldest of the crowd had to go"
        head = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        other.setblocking(True)
        other.sendall(head)
        assert other.recv(100).startswith(b"HTTP/1.1 200")
        assert server.http.get("/healthz").status_code == 200


def waits_until(holds: Callable[[], bool], limit_s: float = 5) -> bool:
    until_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def test_a_held_poll_and_an_idle_connection_outlast_the_time_for_a_head(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.1)
    server.set_gate(server.backend.tiny.sampler.gate, is_open=False)
    with httpx.Client(base_url=server.http.base_url, headers=server.http.headers) as client:
        sampled = server.sample(server.sampler()).json()["request_id"]
        for _ in range(2):  # each is held for longer, and the second comes on the first one's connection
            assert client.post("/retrieve_future", json={"request_id": sampled}).status_code == 408
            time.sleep(0.3)
    server.set_gate(server.backend.tiny.sampler.gate, is_open=True)


def test_health_says_when_there_is_no_room(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.http.get("/healthz").json() == {"status": "ok"}
    monkeypatch.setattr(health, "MIN_FREE_BYTES", 1 << 60)
    full = server.http.get("/healthz")
    assert full.status_code == 503 and "MiB left" in full.json()["detail"]
    assert str(server.settings.data_dir) not in full.text


def test_a_telemetry_request_writes_a_few_bounded_lines(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    events = [{"event": f"{number}\nERROR forged", "text": "x" * 1000} for number in range(900)]
    with caplog.at_level(logging.INFO):
        answer = server.post("/telemetry", session_id="s\nERROR forged", sdk_version="1" * 500, events=events)
    assert answer.json() == {"status": "accepted"}
    lines = [record.getMessage() for record in caplog.records if "client of session" in record.getMessage()]
    assert 1 < len(lines) < 40 and sum(map(len, lines)) < 50_000 and "880 more kinds of events" in lines[-1]
    assert not any("\n" in line for line in lines)


STACK = "Traceback (most recent call last):\n" + '  File "train.py", line 7, in <module>\n' * 30


def test_events_that_differ_only_in_their_request_share_a_short_line(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    polls = [
        {
            "event": "GENERIC_EVENT",
            "event_name": "APIFuture.result_async.api_status_error",
            "event_id": str(number),
            "severity": "WARNING",
            "event_data": {"request_id": str(number), "exception_stack": STACK},
        }
        for number in range(99)
    ]
    fatal = {
        "event": "UNHANDLED_EXCEPTION",
        "severity": "CRITICAL",
        "error_type": "KeyError",
        "error_message": "'loss'",
        "traceback": STACK,
    }
    with caplog.at_level(logging.INFO):
        server.post("/telemetry", session_id="s", sdk_version="0.38.0", events=[*polls, fatal])
    lines = [record.getMessage() for record in caplog.records if "client of session" in record.getMessage()]
    assert len(lines) == 2
    client = "client of session s (SDK 0.38.0): "
    first = 'WARNING APIFuture.result_async.api_status_error request_id="0"'
    assert lines[0] == f"{client}99 of a kind, the first: {first}"
    assert lines[1] == client + """CRITICAL UNHANDLED_EXCEPTION error_type="KeyError" error_message="'loss'\""""


def test_health_is_answered_while_every_thread_decodes(server: Running) -> None:
    done = threading.Event()

    async def fill() -> None:
        for _ in range(64):
            server.loop.run_in_executor(None, done.wait)

    asyncio.run_coroutine_threadsafe(fill(), server.loop).result(5)
    try:
        assert server.http.get("/healthz", timeout=3).json() == {"status": "ok"}
    finally:
        done.set()


def test_an_owner_has_so_many_operations_waiting_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_QUEUED", 5)
    owners = [keys.add(tmp_path / "keys", name) for name in ("alice", "bob")]
    server = Running(tmp_path, gap_grace_s=30)
    statuses = []
    try:
        for key in owners:
            server.http.headers["x-api-key"] = key
            model_id = server.model()
            for number in (3, 4, 5, 6, 7, 8, 2):  # number 1 does not come, so all of them wait
                body, kind = forward_backward_body(model_id, number), {"content-type": "application/x-protobuf"}
                statuses.append(server.http.post("/forward_backward", content=body, headers=kind).status_code)
    finally:
        server.stop()
    assert statuses == [200, 200, 200, 200, 200, 429, 200] * 2, "what all others wait for is let in"
