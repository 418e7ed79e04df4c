"""A disk that becomes read-only: the start names it, and under a running server nothing is lost that was acknowledged.

Files are made immutable, which stops writers that have them open too, as a read-only disk does.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_server import Running
from tests.servers import KEY, Server

FAKES = """
import sys, tinker_server.__main__ as main, tinker_server.app as app
from tests.fakes import FakeBackend
main.create_app = lambda settings, on_loading: app.create_app(settings, FakeBackend())
sys.exit(main.main())
"""


@contextlib.contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    def change(flag: str) -> bool:
        return subprocess.run(["chattr", flag, *paths], capture_output=True, check=False).returncode == 0

    if shutil.which("chattr") is None or not change("+i"):
        pytest.skip("no file can be made immutable here: that takes root, chattr and a disk with this flag")
    try:
        yield
    finally:
        assert change("-i")


@pytest.mark.parametrize(
    ("read_only", "said"),
    [
        (".", "the data directory {} cannot be used: Operation not permitted"),
        ("tinker-server.db", "the database sqlite+aiosqlite:///{}/tinker-server.db cannot be used: "),
    ],
)
def test_a_start_on_a_read_only_disk_names_it(read_only: str, said: str, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    Running(data_dir).stop()
    (data_dir / ".lock").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-c",
        FAKES,
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(data_dir),
        "--model",
        "tiny=org/name",
    ]
    with immutable(data_dir / read_only):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"tinker-server: {said.format(data_dir)}") and "Traceback" not in ended.stderr, ended.stderr


class Client:
    """Keeps what was acknowledged."""

    def __init__(self, server: Server) -> None:
        self._http = httpx.Client(base_url=f"{server.base_url}/api/v1", headers={"x-api-key": KEY}, timeout=30)
        self.acknowledged: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def post(self, path: str, /, **body: object) -> httpx.Response:
        return self._http.post(path, json=body)

    def submit(self, path: str, /, **body: object) -> str:
        answer = self.post(path, **body).raise_for_status().json()
        self.acknowledged.append((path, body, answer))
        request_id: str = answer["request_id"]
        return request_id

    def result(self, request_id: str) -> dict[str, Any]:
        while (answer := self.post("/retrieve_future", request_id=request_id)).status_code == 408:
            pass
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


def test_nothing_acknowledged_is_lost_where_the_database_becomes_read_only(tmp_path: Path) -> None:
    """SQLite maps its index of the log into memory, and the kernel ends the process that writes to it then."""
    server = Server(tmp_path / "data", {"tiny": tmp_path}, program=("-c", FAKES)).start()
    client = Client(server)
    session_id = client.post("/create_session", sdk_version="0.38.0").json()["session_id"]
    created = client.submit(
        "/create_model", session_id=session_id, model_seq_id=0, base_model="tiny", lora_config={"rank": 8}
    )
    model_id = client.result(created)["model_id"]
    results = [client.result(client.submit("/save_weights", model_id=model_id, seq_id=1, path="a"))]
    with immutable(*(tmp_path / "data").glob("tinker-server.db*")):
        with contextlib.suppress(httpx.TransportError):
            refused = client.post("/save_weights", model_id=model_id, seq_id=2, path="b")
            assert refused.status_code == 503, refused.text
        time.sleep(0.5)
        ended = server.process.poll()
    if ended is None:
        server.stop()
    else:
        server.kill()
    server.start()
    again = Client(server)
    for path, body, answer in client.acknowledged:
        assert again.post(path, **body).json() == answer
    assert again.result(client.acknowledged[-1][2]["request_id"]) == results[-1]
    assert "error" not in again.result(again.submit("/save_weights", model_id=model_id, seq_id=2, path="b"))
    assert server.stop() == 0
    assert ended in (None, -signal.SIGBUS)
