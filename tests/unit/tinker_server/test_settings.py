"""Settings by environment and command line, and the messages for wrong ones."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from tinker_server.__main__ import listen
from tinker_server.command_line import parse, read_settings
from tinker_server.errors import StartFailed
from tinker_server.settings import Settings

MAX_SETTINGS = 46


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TINKER_SERVER_"):
            monkeypatch.delenv(name)


def leaves(model: type[BaseModel]) -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation)
        else:
            yield name, field.description


def test_settings_are_few_and_described() -> None:
    found = dict(leaves(Settings))
    assert len(found) <= MAX_SETTINGS
    assert all(found.values()), [name for name, description in found.items() if not description]


def test_the_command_line_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_SERVER_PORT", "9000")
    monkeypatch.setenv("TINKER_SERVER_DRAIN_S", "3")
    monkeypatch.setenv("TINKER_SERVER_BACKEND__DEVICE", "cuda")
    monkeypatch.setenv("TINKER_SERVER_BACKEND__MODELS", '{"hub": "org/name"}')
    settings = read_settings(parse(["serve", "--port", "9001", "--model", f"a/b={tmp_path}", "--device", "cpu"]))
    assert (settings.port, settings.drain_s, settings.backend.device) == (9001, 3, "cpu")
    assert settings.backend.models == {"hub": "org/name", "a/b": str(tmp_path)}


def test_everything_is_kept_in_the_data_directory_by_default(tmp_path: Path) -> None:
    settings = read_settings(parse(["serve", "--data-dir", str(tmp_path), "--model", "a=org/name"]))
    assert settings.resolved_database_url() == f"sqlite+aiosqlite:///{tmp_path}/tinker-server.db"
    assert settings.resolved_backend().scratch_dir == tmp_path / "scratch"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no models to serve: give --model NAME=DIRECTORY or NAME=HUB_ID"),
        (["--model", "name"], "--model name: write NAME=DIRECTORY"),
        (["--model", "a=/missing/dir"], "there is no directory /missing/dir"),
        (["--model", "a=./dir"], "there is no directory ./dir"),
        (["--model", "a=org/name", "--ranks", "0"], "ranks: Input should be greater than or equal to 1"),
        (["--model", "a=org/name", "--port", "70000"], "setting port: Input should be less than"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(arguments: list[str], text: str) -> None:
    with pytest.raises(StartFailed) as caught:
        read_settings(parse(["serve", *arguments]))
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_from_which_memory_is_planned_are_options_too() -> None:
    arguments = ["--max-context", "4096", "--max-lora-rank", "16", "--models-at-once", "2", "--kv-cache", "1.5"]
    arguments += ["--trainer-gpus", "0,1", "--sampler-gpus", "2"]
    backend = read_settings(parse(["serve", "--model", "a=org/name", *arguments])).backend
    assert (backend.max_context_length, backend.max_lora_rank, backend.models_at_once) == (4096, 16, 2)
    assert (backend.kv_cache_bytes, backend.trainer_gpus, backend.sampler_gpus) == (3 << 29, (0, 1), (2,))


def test_the_fraction_that_is_no_setting_any_more_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_SERVER_BACKEND__GPU_MEMORY_FRACTION", "0.5")
    with pytest.raises(StartFailed, match=r"gpu_memory_fraction 0\.5: .* planned from max_context_length, .*kv_cache"):
        read_settings(parse(["serve", "--model", "a=org/name"]))


def test_a_port_in_use_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", int(port))
        command = [sys.executable, "-m", "tinker_server", "serve", "--port", port, "--model", "a=org/name"]
        ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"tinker-server: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


SERVER_OF_FAKES = """
import sys, tinker_server.__main__ as main, tinker_server.app as app
from tests.fakes import FakeBackend
main.create_app = lambda settings, on_loading: app.create_app(settings, FakeBackend())
sys.exit(main.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_prints_its_url_and_stops_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER_OF_FAKES, "serve", "--port", "0", "--model", "tiny=org/name"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        server.send_signal(number)
        rest, log = server.communicate(timeout=20)
    assert (server.returncode, rest) == (0, ""), log
    assert (tmp_path / "tinker-data" / "tinker-server.db").is_file()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def documented(model: type[BaseModel], prefix: str = "TINKER_SERVER_") -> Iterator[str]:
    """One line of the page's table for each setting."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from documented(field.annotation, f"{prefix}{name.upper()}__")
        else:
            default = "" if field.default in (None, "") else f"`{field.default}`"
            description = " ".join((field.description or "").split()).replace("|", "\\|")
            yield f"| `{prefix}{name.upper()}` | {default} | {description} |"


def test_the_settings_page_lists_every_setting() -> None:
    page = (Path(__file__).parents[3] / "docs/settings.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `TINKER_SERVER_")]
    assert table == list(documented(Settings))


def test_two_servers_do_not_share_a_port_even_while_both_load() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", port)
