"""A model of the hub: how much will come is logged before it comes, and refused where there is no room."""

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tinker_server.backends.formats import model_files
from tinker_server.backends.formats.model_files import local_directory
from tinker_server.backends.protocol import BackendFailed, Unavailable

COMMIT = "a" * 40
FILES = {"config.json": b"{}", "model.safetensors": bytes(3_000_000), "old.bin": bytes(9_000_000)}


class Hub(BaseHTTPRequestHandler):
    """One model, org/model, as the hub answers for it."""

    fetched: list[str]

    def do_HEAD(self) -> None:
        self._file()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/model/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        elif path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self._file()

    def _file(self) -> None:
        name = self.path.rpartition("/")[2]
        if not self.path.startswith(f"/org/model/resolve/{COMMIT}/") or name not in FILES:
            self._answer(404, b"{}")
            return
        if self.command == "GET":
            self.fetched.append(name)
        etag = hashlib.sha1(FILES[name]).hexdigest()
        self._answer(200, FILES[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The files that were downloaded from the hub of the test."""
    Hub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub.fetched
    server.shutdown()
    server.server_close()


def test_the_bytes_of_a_download_are_said_before_it_begins(
    fetched: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=model_files.__name__):
        directory = local_directory("org/model")
        assert caplog.messages == [f"downloading org/model from the hub: 2 files, 3 MB, into {tmp_path / 'hub'}"]
        assert sorted(fetched) == ["config.json", "model.safetensors"]
        assert (directory / "model.safetensors").stat().st_size == 3_000_000
        caplog.clear()
        assert local_directory("org/model") == directory
        assert not caplog.messages and len(fetched) == 2, "what is here is not announced, and does not come again"


def test_a_hub_that_does_not_answer_may_do_so_later(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendFailed) as unknown:
        local_directory("org/unknown")
    assert not isinstance(unknown.value, Unavailable)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="the model hub does not give it"):
        local_directory("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BackendFailed) as offline:
        local_directory("org/model")
    assert not isinstance(offline.value, Unavailable), "this setting keeps it away"


def test_a_download_that_the_disk_has_no_room_for_is_refused_before_it_begins(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2_000_000))
    with pytest.raises(BackendFailed, match=r"its 2 files have 3 MB, and .* has 2 MB left"):
        local_directory("org/model")
    assert not fetched
