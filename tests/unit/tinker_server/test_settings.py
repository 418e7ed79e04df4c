"""Settings by environment and command line, and the messages for wrong ones."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import make_url

from tinker_server.__main__ import listen, main, require_keys_beyond_loopback
from tinker_server.backends.config import BackendConfig
from tinker_server.command_line import option_of, parse, read_settings
from tinker_server.errors import StartFailed
from tinker_server.release import release
from tinker_server.settings import Settings
from tinker_server.settings_sources import from_file, setting_names, variable_of

MAX_SETTINGS = 60


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
    assert make_url(settings.resolve_database_url()).database == f"{tmp_path}/tinker-server.db"
    assert settings.resolve_backend().scratch_dir == tmp_path / "scratch"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no models to serve: give --model NAME=DIRECTORY or NAME=HUB_ID"),
        (["--model", "name"], "--model name: write NAME=DIRECTORY"),
        (["--model", "a=/missing/dir"], "there is no directory /missing/dir"),
        (["--model", "a=./dir"], "there is no directory ./dir"),
        (["--model", "a=org/name", "--ranks", "0"], "--ranks: Input should be greater than or equal to 1; it is 0"),
        (["--model", "a=org/name", "--max-context", "0"], "--max-context: Input should be .* 16; it is 0"),
        (["--model", "a=org/name", "--max-lora-rank", "9"], "--max-lora-rank: Input should be 8, 16, .*; it is 9"),
        (["--model", "a=org/name", "--port", "70000"], "--port: Input should be less than"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(arguments: list[str], text: str) -> None:
    with pytest.raises(StartFailed) as caught:
        read_settings(parse(["serve", *arguments]))
    assert re.match(f"(model a: )?{text}", str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("typed", ["-1", "0", "0.0005", "nan", "inf"])
def test_a_size_that_is_none_is_refused_as_it_was_typed(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--model", "a=org/name", "--kv-cache", typed])
    assert f"argument --kv-cache: invalid number of GiB, at least 0.001 value: '{typed}'" in capsys.readouterr().err


def test_a_machine_that_joins_is_asked_for_its_own_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["join", "server:8100", "--token-file", "token"])
    assert "the following arguments are required: --model" in capsys.readouterr().err


def test_an_option_is_named_as_the_parser_reads_it() -> None:
    values = {"device": "cpu", "base_precision": "fp8", "base_copies": "1", "max_lora_rank": "8"}
    flags = {"cluster", "train_vision", "replay_routing"}
    options = {*vars(parse(["serve"]))} & {*Settings.model_fields, *BackendConfig.model_fields}
    for name in options:
        typed = [option_of(name)] if name in flags else [option_of(name), values.get(name, "2")]
        assert vars(parse(["serve", *typed]))[name] is not None


def test_sizes_from_which_memory_is_planned_are_options_too() -> None:
    arguments = ["--max-context", "4096", "--max-lora-rank", "16", "--models-at-once", "2", "--kv-cache", "1.5"]
    arguments += ["--trainer-gpus", "0,1", "--sampler-gpus", "2", "--gpu-memory", "23.5"]
    backend = read_settings(parse(["serve", "--model", "a=org/name", *arguments])).backend
    assert (backend.max_context_length, backend.max_lora_rank, backend.models_at_once) == (4096, 16, 2)
    assert (backend.kv_cache_bytes, backend.trainer_gpus, backend.sampler_gpus) == (3 << 29, (0, 1), (2,))
    assert backend.gpu_memory_bytes == 47 << 29


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("TINKER_SERVER_DATADIR", "/data", 'did you mean "TINKER_SERVER_DATA_DIR"'),
        ("TINKER_SERVER_DEVICE", "cpu", 'did you mean "TINKER_SERVER_BACKEND__DEVICE"'),
        ("TINKER_SERVER_BACKEND__RANK", "2", 'did you mean "TINKER_SERVER_BACKEND__RANKS"'),
        ("tinker_server_prot", "1", r'unknown setting "TINKER_SERVER_PROT" \(did you mean "TINKER_SERVER_PORT"\?\)'),
        (
            "TINKER_SERVER_BACKEND__GPU_MEMORY_FRACTION",
            "0.5",
            r"unknown setting .* \(memory is planned from max_context_length",
        ),
        ("TINKER_SERVER_XYLOPHONE", "1", "docs/settings.md has them all"),
        (
            "TINKER_SERVER_PORT",
            "high",
            "environment variable TINKER_SERVER_PORT: Input should be a valid integer, .*; it is 'high'",
        ),
        ("TINKER_SERVER_IMAGE_HOSTS", "a.example", 'field "image_hosts" .* write a list as JSON'),
    ],
)
@pytest.mark.parametrize("command", [["serve", "--model", "a=org/name"], ["keys", "list"], ["backup", "/tmp/none"]])
def test_a_wrong_variable_is_refused_with_the_nearest_right_one(
    command: list[str], variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartFailed, match=text) as caught:
        read_settings(parse(command))
    assert "\n" not in str(caught.value)


def test_a_file_is_overridden_by_the_environment_and_that_by_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'port = 1\ndrain_s = 2\nhost = "::1"\nimage_hosts = ["a.example"]\n'
        '[backend]\nranks = 2\ndevice = "cpu"\nengines = 3\n[backend.models]\n"in/file" = "org/name"\n'
    )
    monkeypatch.setenv("TINKER_SERVER_DRAIN_S", "3")
    monkeypatch.setenv("TINKER_SERVER_PORT", "4")
    monkeypatch.setenv("TINKER_SERVER_BACKEND__RANKS", "5")
    flags = ["--config", str(file), "--port", "6", "--engines", "7", "--model", "by/flag=org/name"]
    found = read_settings(parse(["serve", *flags]))
    assert (found.host, found.port, found.drain_s, found.image_hosts) == ("::1", 6, 3, ["a.example"])
    assert (found.backend.device, found.backend.ranks, found.backend.engines) == ("cpu", 5, 7)
    assert found.backend.models == {"in/file": "org/name", "by/flag": "org/name"}


def test_rays_own_variable_names_its_cluster_unless_the_setting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    arguments = parse(["serve", "--model", "a=org/name"])
    assert read_settings(arguments).backend.cluster_ray_address == "10.0.0.1:6379"
    monkeypatch.setenv("TINKER_SERVER_BACKEND__CLUSTER_RAY_ADDRESS", "auto")
    assert read_settings(arguments).backend.cluster_ray_address == "auto"
    monkeypatch.delenv("TINKER_SERVER_BACKEND__CLUSTER_RAY_ADDRESS")
    monkeypatch.delenv("RAY_ADDRESS")
    assert read_settings(arguments).backend.cluster_ray_address is None


def test_a_file_takes_every_setting(tmp_path: Path) -> None:
    names = list(setting_names())
    assert {variable_of(name) for name in names} == {line.split("`")[1] for line in documented(Settings)}
    for name in names:
        file = tmp_path / "one.toml"
        file.write_text(f'{name} = "some text"\n')
        *tables, last = name.split(".")
        found: Any = from_file(file)
        for table in tables:
            found = found[table]
        assert found == {last: "some text"}


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("prot = 1", r'unknown setting "prot" \(did you mean "port"\?\)'),
        ("[backend]\nrank = 1", r'unknown setting "backend.rank" \(did you mean "backend.ranks"\?\)'),
        ("ranks = 1", r'unknown setting "ranks" \(did you mean "backend.ranks"\?\)'),
        ("backend = 1", 'unknown setting "backend"'),
        (
            "[backend]\ngpu_memory_fraction = 0.5",
            r'unknown setting "backend.gpu_memory_fraction" \(memory is planned from',
        ),
        ("port = ", "cannot be read: Invalid value"),
        ('port = "high"', "settings.toml: port: Input should be a valid integer, .* it is 'high'"),
        ("[backend]\nsampler_gpus = [0, -1.5]", r"settings.toml: backend.sampler_gpus\[1\]: Input should be"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, refusal: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(text)
    with pytest.raises(StartFailed, match=refusal):
        read_settings(parse(["keys", "list", "--config", str(tmp_path / "settings.toml")]))


def test_a_command_whose_output_is_no_longer_read_ends_without_a_traceback(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tinker_server", "keys", "list", "--json", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("models", "refusal"),
    [
        ("3", r"backend.models: Input should be a valid dictionary; it is 3"),
        ('["a=b"]', r"backend.models: Input should be a valid dictionary"),
        ("{a = 3}", r"backend.models\[a\]: Input should be a valid string; it is 3"),
    ],
)
def test_models_of_a_file_that_name_no_directories_are_refused_by_name(
    models: str, refusal: str, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(f"[backend]\nmodels = {models}\n")
    with pytest.raises(StartFailed, match=refusal):
        read_settings(parse(["serve", "--config", str(tmp_path / "settings.toml"), "--model", "b=org/name"]))


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        (["keys", "list"], {"TINKER_SERVER_PORT": "high"}, "environment variable TINKER_SERVER_PORT: "),
        (["keys", "add", "a"], {"TINKER_SERVER_IMAGE_HOSTS": "a"}, "the environment: "),
        (["keys", "list", "--config", "missing.toml"], {}, "the settings file missing.toml cannot be read"),
        (["status", "--key", "\xe9"], {}, "the API key has characters"),
    ],
)
def test_a_command_that_cannot_run_says_so_in_one_line(
    arguments: list[str],
    more: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinker-server", *arguments])
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"tinker-server: {said}") and printed.err.count("\n") == 1 and not printed.out


def test_keys_that_cannot_be_read_are_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    settings = Settings(keys_file=tmp_path)
    with listen("127.0.0.1", 0) as listener, pytest.raises(StartFailed, match=r"the keys file .* cannot be read"):
        require_keys_beyond_loopback(settings, listener)


def test_the_hint_makes_a_key_that_the_server_then_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's data directory is not the one that the commands take by default."""
    monkeypatch.chdir(tmp_path)
    settings = read_settings(parse(["serve", "--data-dir", "elsewhere", "--model", "tiny=org/name"]))
    with listen("0.0.0.0", 0) as listener:
        with pytest.raises(StartFailed, match=r"no API keys in elsewhere/keys") as refused:
            require_keys_beyond_loopback(settings, listener)
        (hint,) = re.findall(r"`(tinker-server .*?)`", str(refused.value))
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        monkeypatch.setattr(sys, "argv", shlex.split(hint.replace("NAME", "alice")))
        assert main() == 0
        monkeypatch.chdir(tmp_path)
        require_keys_beyond_loopback(settings, listener)


def test_what_is_no_name_of_a_host_is_refused_by_name() -> None:
    with pytest.raises(StartFailed, match=r"cannot listen on a\.\.b port 8000: .*label empty"):
        listen("a..b", 8000)


@pytest.mark.heavy
def test_a_port_in_use_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", int(port))
        command = [sys.executable, "-m", "tinker_server", "serve", "--port", port, "--model", "a=org/name"]
        ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (os.EX_TEMPFAIL, "")
    assert ended.stderr == f"tinker-server: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


SERVER_OF_FAKES = """
import sys, tinker_server.__main__ as main, tinker_server.app as app
from tests.fakes import FakeBackend
main.create_app = lambda settings, on_loading: app.create_app(settings, FakeBackend())
sys.exit(main.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.heavy
def test_a_server_prints_its_url_and_stops_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER_OF_FAKES, "serve", "--port", "0", "--model", "tiny=org/name"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline()
        assert url.startswith("http://127.0.0.1:")
        server.send_signal(number)
        rest, log = server.communicate(timeout=20)
    assert (server.returncode, rest) == (0, ""), log
    (ready,) = [line for line in log.splitlines() if "Ready in" in line]
    for said in (
        url.strip(),
        "Models: tiny.",
        f"Data: {tmp_path}/tinker-data.",
        "No API keys: any tml-… key works, from this machine only.",
    ):
        assert said in ready, ready
    assert log.splitlines()[-1].endswith("__main__: stopped")
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


def test_the_file_of_the_settings_page_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/settings.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "settings.toml").write_text(block.replace("/models/Qwen3-VL-4B-Instruct", str(tmp_path)))
    settings = read_settings(parse(["serve", "--config", str(tmp_path / "settings.toml")]))
    assert (settings.port, settings.drain_s, settings.backend.max_lora_rank) == (8000, 20, 64)
    assert settings.backend.models == {"Qwen/Qwen3-VL-4B-Instruct": str(tmp_path)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --prot 3", "serve: error: unrecognized arguments: --prot 3; did you mean --port?"),
        ("keys add alice --scoep=all", "keys add: error: unrecognized arguments: --scoep=all; did you mean --scope?"),
        ("serve more", "serve: error: unrecognized arguments: more"),
    ],
)
def test_an_unknown_option_is_refused_by_its_command_with_the_nearest(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(words.split())
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].endswith(said) and printed.startswith(
        f"usage: tinker-server {said.partition(':')[0]} "
    )


def test_the_help_of_serve_leads_to_the_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["serve", "--help"])
    assert "docs/settings.md" in capsys.readouterr().out


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tinker-server", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"tinker-server {release().label}\n")


def test_two_servers_do_not_share_a_port_even_while_both_load() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", port)
