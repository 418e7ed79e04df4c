"""A server that is not ready yet: probes are answered, all other requests wait, and a failed start refuses them.

pytest tests/contract/test_starting.py
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
import tinker

from tests.factories import present
from tests.fake_server import Running
from tests.fakes import FakeBackend
from tests.servers import KEY, MODEL
from tinker_server.backends.protocol import Loading
from tinker_server.release import release
from tinker_server.web import connections
from tinker_server.web.connections import Connections

READS = Loading("reads weights", 3 << 30, 9 << 30)
HELD_S = 0.4
"""Time after which a request that has no answer is held: others are answered within milliseconds."""


class SlowBackend(FakeBackend):
    """Starts once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    async def start(self) -> None:
        await asyncio.to_thread(self.gate.wait)
        await super().start()


class Starting:
    """A server whose services start until `finish`."""

    def __init__(self, data_dir: Path) -> None:
        self.backend = SlowBackend()
        self.server = Running(data_dir, backend=self.backend, is_awaited=False)

    def finish(self) -> None:
        self.backend.gate.set()
        self.server.wait_until_ready()

    def send(self, request: bytes, address: str = "127.0.0.1") -> socket.socket:
        """Send a request on a connection of its own."""
        to = ("127.0.0.1", int(self.server.url.rpartition(":")[2]))
        connection = socket.create_connection(to, timeout=20, source_address=(address, 0))
        connection.sendall(request)
        return connection

    def probe(self) -> httpx.Response:
        return httpx.get(f"{self.server.url}/health", timeout=20)


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    made = Starting(tmp_path)
    try:
        yield made
    finally:
        made.finish()
        made.server.stop()


def post(path: str, **body: object) -> bytes:
    content = json.dumps(body)
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nContent-Length: {len(content)}"
    return f"{head}\r\nContent-Type: application/json\r\n\r\n{content}".encode()


SESSION = post("create_session", sdk_version="0.38.0")


def answer_on(connection: socket.socket) -> tuple[int, Message, str]:
    """Status, headers and body of the answer that comes."""
    answer = HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.headers, answer.read().decode()


def status(connection: socket.socket) -> int:
    return answer_on(connection)[0]


def is_held(connection: socket.socket) -> bool:
    connection.settimeout(HELD_S)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(20)
    return False


def waits_until(holds: Callable[[], bool], limit_s: float = 30) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_probes_are_answered_at_once_and_say_what_starts(starting: Starting) -> None:
    server = starting.server
    waits_until(lambda: starting.probe().json()["loading"] == [])
    server.loop.call_soon_threadsafe(server.processes.note, "trainer org/secret rank 0", READS)
    for url in (f"{server.url}/health", f"{server.url}/api/v1/healthz"):
        unready = httpx.get(url, timeout=20)
        assert unready.status_code == 503 and unready.headers["retry-after"] == "10"
        assert unready.json()["error"] == "StillStarting" and "has been starting for" in unready.json()["detail"]
        assert unready.json()["loading"] == [{"doing": "reads weights", "done_bytes": 3 << 30, "total_bytes": 9 << 30}]
        assert "secret" not in unready.text
        assert httpx.head(url, timeout=20).status_code == 503
    version = httpx.get(f"{server.url}/version", timeout=20)
    assert version.status_code == 200 and version.json() == release()._asdict()
    starting.finish()
    assert httpx.get(f"{server.url}/version").json() == version.json()
    for url in (f"{server.url}/health", f"{server.url}/api/v1/healthz"):
        assert httpx.get(url).json() == {"status": "ok"}


def test_all_other_requests_wait_until_the_server_is_ready(starting: Starting) -> None:
    page = b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with starting.send(SESSION) as posted, starting.send(page) as got, ThreadPoolExecutor(1) as thread:
        client = tinker.ServiceClient(base_url=starting.server.url, api_key=KEY)
        sampler = thread.submit(lambda: client.create_sampling_client(base_model="tiny").result())
        assert is_held(posted) and is_held(got) and not sampler.done()
        starting.finish()
        assert status(posted) == status(got) == 200
        assert sampler.result(20).get_base_model() == "tiny"
        posted.sendall(SESSION)
        assert status(posted) == 200, "the connection goes on"


def test_a_held_body_of_any_size_arrives_whole(starting: Starting) -> None:
    body = post("telemetry", session_id="s", events=[{"event": "x" * 500_000}])
    with starting.send(SESSION) as small, ThreadPoolExecutor(1) as thread:
        large = thread.submit(starting.send, body)
        assert is_held(small)
        starting.finish()
        with large.result(20) as connection:
            assert status(connection) == status(small) == 200


def test_beyond_the_bound_the_address_with_the_most_loses_the_request_that_waited_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_HELD", 3)
    starting = Starting(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(starting.server.stop)
        stack.callback(starting.finish)
        other = stack.enter_context(starting.send(SESSION, "127.0.0.2"))
        crowd = []
        for _ in range(4):
            crowd.append(stack.enter_context(starting.send(SESSION)))
            assert is_held(crowd[-1]) and is_held(other)
        for refused in crowd[:2]:
            code, headers, text = answer_on(refused)
            assert (code, headers["Retry-After"]) == (503, "10")
            assert "StillStarting" in text and "3 other requests wait" in text
        assert starting.probe().status_code == 503, "probes need no place"
        starting.finish()
        assert [status(one) for one in (other, *crowd[2:])] == [200] * 3


def test_a_client_that_hangs_up_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_HELD", 2)
    starting = Starting(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(starting.server.stop)
        stack.callback(starting.finish)
        first = stack.enter_context(starting.send(SESSION))
        assert is_held(first)
        for _ in range(3):
            with starting.send(SESSION) as gone:
                assert is_held(gone)
            assert starting.probe().status_code == 503
        second = stack.enter_context(starting.send(SESSION))
        assert is_held(first) and is_held(second)
        starting.finish()
        assert status(first) == status(second) == 200


def test_few_descriptors_leave_room_beside_held_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Connections().most_held == connections.MOST_HELD
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    assert Connections().most_held == 37, "half of the 75 that connections may take"


SLOW_SERVER = """
import asyncio, sys, tinker_server.__main__ as main, tinker_server.app as app
from pathlib import Path
from tinker_server.backends.protocol import BackendFailed, Unavailable
from tests.fakes import FakeBackend

file = Path(sys.argv.pop(1))

class SlowBackend(FakeBackend):
    async def start(self):
        while not file.exists():
            await asyncio.sleep(0.02)
        exec(file.read_text())
        await super().start()

main.create_app = lambda settings, on_loading: app.create_app(settings, SlowBackend(), on_loading=on_loading)
sys.exit(main.main())
"""


class Child:
    """A server in a process of its own, which starts until `decide`."""

    def __init__(self, folder: Path, *command: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.file, self.log = folder / "decision", folder / "log"
        self._command = [sys.executable, *command, "serve", "--port", str(self.port)]
        self._command += ["--data-dir", str(folder / "data")]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, model: str) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*self._command, "--model", model],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        self._timer = threading.Timer(120, self.process.kill)
        self._timer.start()
        waits_until(self._answers)

    def end(self) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()

    def decide(self, statement: str) -> None:
        self.file.with_suffix(".tmp").write_text(statement)
        self.file.with_suffix(".tmp").rename(self.file)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.ConnectError):
            return httpx.get(f"{self.url}/version", timeout=20).status_code == 200
        return False


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(tmp_path, "-c", SLOW_SERVER, str(tmp_path / "decision"))
    made.start("tiny=org/name")
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise Unavailable('the hub does not answer')", os.EX_TEMPFAIL, "tinker-server: the hub does not answer"),
        ("raise BackendFailed('too little memory')", 2, "tinker-server: too little memory"),
        ("raise ZeroDivisionError('division by zero')", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_failed_start_refuses_what_it_held_and_ends_with_its_code(
    statement: str, code: int, said: str, child: Child
) -> None:
    with socket.create_connection(("127.0.0.1", child.port), timeout=20) as held:
        held.sendall(SESSION)
        assert is_held(held)
        child.decide(statement)
        refused, _, text = answer_on(held)
        assert refused == 503 and "ShuttingDown" in text
        assert held.recv(1) == b"", "the connection is closed"
        output, _ = child.process.communicate(timeout=20)
    assert (child.process.returncode, output) == (code, "")
    assert child.log.read_text().splitlines()[-1] == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_that_holds_requests(number: signal.Signals, child: Child) -> None:
    with socket.create_connection(("127.0.0.1", child.port), timeout=20) as held:
        held.sendall(SESSION)
        assert is_held(held)
        child.process.send_signal(number)
        assert status(held) == 503
        output, _ = child.process.communicate(timeout=20)
    assert (child.process.returncode, output) == (130, "")


def test_the_address_is_printed_once_the_server_is_ready(child: Child) -> None:
    stdout = present(child.process.stdout)
    os.set_blocking(stdout.fileno(), False)
    assert httpx.get(f"{child.url}/health").status_code == 503
    with pytest.raises(BlockingIOError):
        os.read(stdout.fileno(), 1)
    os.set_blocking(stdout.fileno(), True)
    assert "Ready in" not in child.log.read_text()
    child.decide("")
    assert stdout.readline().strip() == child.url and "Ready in" in child.log.read_text()
    assert httpx.get(f"{child.url}/health").status_code == 200
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(20) == 0


@pytest.mark.flaky(reruns=1)  # the machine may be too busy to answer in time
def test_a_server_that_loads_a_model_answers_probes_and_stops(tmp_path: Path, tiny_vl: Path) -> None:
    """Also while it imports PyTorch, which takes seconds."""
    loading = Child(tmp_path, "-m", "tinker_server")
    loading.start(f"{MODEL}={tiny_vl}")
    doing: set[str] = set()
    slowest_s = 0.0
    try:
        while not doing & {"starts", "reads weights"}:
            began = time.monotonic()
            health = httpx.get(f"{loading.url}/health", timeout=20)
            slowest_s = max(slowest_s, time.monotonic() - began)
            assert health.status_code == 503
            doing |= {one["doing"] for one in health.json()["loading"]}
            time.sleep(0.02)
        loading.process.send_signal(signal.SIGTERM)
        assert loading.process.wait(60) == 130
    finally:
        loading.end()
    print(f"the slowest answer took {slowest_s:.2f} s; seen: {sorted(doing)}")
    assert "imports PyTorch" in doing and slowest_s < 3
