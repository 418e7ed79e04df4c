"""`tinker-server status`, `doctor`, `backup`, `restore` and the completion of a shell.

pytest tests/contract/test_operators_commands.py
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from tests.cluster.connections import serving
from tests.dashboard import Owner
from tests.databases import fresh_database
from tests.fake_server import Running
from tests.killing import run_script
from tests.models import FAMILIES
from tinker_server.__main__ import main
from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.api_schemas.training import Trainable
from tinker_server.auth import keys
from tinker_server.backends import files
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.create import examine
from tinker_server.backends.protocol import BackendFailed
from tinker_server.commands import backup, databases
from tinker_server.commands.backup import back_up, restore
from tinker_server.commands.doctor import diagnose, report
from tinker_server.commands.status import Status, runs_table
from tinker_server.commands.tables import console, keys_table
from tinker_server.dashboard.rendering import short
from tinker_server.errors import StartDelayed, StartFailed
from tinker_server.settings import Settings
from tinker_server.store.database import Database
from tinker_server.store.directories import link
from tinker_server.store.runs import RunStore
from tinker_server.store.sessions import SessionStore
from tinker_server.weights.copying import run_of_weights

AGE = "tinker_backup_age_seconds"


@pytest.fixture(params=["sqlite", "postgresql"])
def two_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """One that is used, and an empty one of the same kind."""
    if request.param == "sqlite":
        yield "", ""
        return
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed")
    with fresh_database("postgresql", tmp_path / "a") as one, fresh_database("postgresql", tmp_path / "b") as two:
        secured = [make_url(url).update_query_dict({"ssl": "prefer"}) for url in (one, two)]
        used, empty = (url.render_as_string(hide_password=False) for url in secured)
        yield used, empty


def saved(server: Running, model_id: str, seq_id: int, name: str) -> str:
    path: str = server.result(server.post("/save_weights", model_id=model_id, seq_id=seq_id, path=name)).json()["path"]
    return path


def test_a_backup_of_a_server_at_work_is_restored_whole(two_databases: tuple[str, str], tmp_path: Path) -> None:
    """Weights are saved and deleted all the while."""
    used, empty = two_databases
    server = Running(tmp_path / "data", database_url=used)
    stopped, names = threading.Event(), []
    try:
        model_id = server.model()
        kept = [saved(server, model_id, seq_id, f"kept-{seq_id}") for seq_id in (1, 2)]

        def keep_busy() -> None:
            for number in range(3, 10_000):
                if stopped.is_set():
                    return
                names.append(saved(server, model_id, number, f"passing-{number}"))
                server.http.delete(f"/training_runs/{model_id}/checkpoints/weights/passing-{number}")

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            while len(names) < 3 and busy.is_alive():
                stopped.wait(0.02)
            made = Settings(data_dir=tmp_path / "data", database_url=used)
            said = asyncio.run(back_up(made, tmp_path / "backup"))
        finally:
            stopped.set()
            busy.join(30)
        assert "weight directories" in said and not busy.is_alive()
    finally:
        server.stop()

    fresh = Settings(data_dir=tmp_path / "again", database_url=empty)
    asyncio.run(restore(fresh, tmp_path / "backup"))
    again = Running(tmp_path / "again", database_url=empty)
    try:
        listed = again.http.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"]
        assert set(kept) <= {one["tinker_path"] for one in listed}
        for one in listed:
            resumed = again.post(
                "/load_weights", path=one["tinker_path"], session_id=again.session(), model_seq_id=0, optimizer=True
            )
            assert "error" not in again.result(resumed).json()
    finally:
        again.stop()
    with pytest.raises(StartFailed, match="empty data directory"):
        asyncio.run(restore(fresh, tmp_path / "backup"))
    if empty:
        with pytest.raises(StartFailed, match="has tables already"):
            asyncio.run(restore(fresh.model_copy(update={"data_dir": tmp_path / "third"}), tmp_path / "backup"))


def test_the_first_key_says_how_runs_made_without_one_are_kept(
    two_databases: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line, and on the first page of everybody who finds no runs there."""
    used, _ = two_databases
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    if used:
        monkeypatch.setenv("TINKER_SERVER_DATABASE_URL", used)
    server = Running(tmp_path / "data", database_url=used)

    def add(name: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["tinker-server", "keys", "add", name, "--data-dir", str(tmp_path / "data")])
        assert main() == 0
        said = capsys.readouterr()
        return said.out.strip(), said.err.strip()

    try:
        run_id, _ = server.model(), server.model()
        alice, advice = add("alice")
        command = f"tinker-server keys add local --keys-file {tmp_path}/data/keys"
        assert advice == f"2 runs made without a key belong to the owner local: `{command}` makes a key that opens them"
        with Owner(server, alice) as viewer:
            assert "keys add local" in viewer.sign_in().get("/").text
        local, advice = add("local")
        assert advice == ""
        with Owner(server, local) as viewer:
            assert short(run_id) in viewer.sign_in().get("/").text
        assert add("bob")[1] == "", "a key opens them already"
    finally:
        server.stop()


def test_a_key_is_made_without_a_database_or_with_one_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinker-server", "keys", "add", "alice", "--data-dir", str(tmp_path)])
    assert main() == 0
    assert "a server reads it only with" in capsys.readouterr().err and not (tmp_path / "tinker-server.db").exists()
    (tmp_path / "tinker-server.db").write_bytes(b"no database" * 100)
    assert main() == 0
    said = capsys.readouterr()
    assert said.out.startswith("tml-") and "could not be counted" in said.err and "not a database" in said.err


def test_the_age_of_the_last_backup_is_a_metric(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")

    def age_s() -> float:
        (value,) = [sample.value for sample in Status.fetch(server.url, "tml-local").samples if sample.name == AGE]
        return value

    try:
        at = time.time() - 5000
        os.utime(tmp_path / "data/token-secret", (at, at))
        assert age_s() == pytest.approx(5000, abs=60), "without a backup, since the first start"
        asyncio.run(back_up(server.settings, tmp_path / "backup"))
        assert age_s() < 60
        os.utime(tmp_path / "data/last-backup", (at + 1000, at + 1000))
        assert age_s() == pytest.approx(4000, abs=60)
    finally:
        server.stop()


def test_missing_weights_are_named_and_no_backup_is_left(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    try:
        saved(server, server.model(), 1, "lost")
    finally:
        server.stop()
    (lost,) = (tmp_path / "data").glob("checkpoints/*/weights/lost~*")
    shutil.rmtree(lost)
    with pytest.raises(StartFailed, match=r"1 weight directories that the database names are missing, such as .*lost"):
        asyncio.run(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
    assert [one.name for one in tmp_path.iterdir()] == ["data"]


def test_weights_that_were_sampled_from_and_then_deleted_are_not_missing(tmp_path: Path) -> None:
    """The sampling session stays, and names their directory."""
    server = Running(tmp_path / "data")
    try:
        model_id = server.model()
        saving = server.post("/save_weights_for_sampler", model_id=model_id, seq_id=1, path="passing")
        path = server.result(saving).json()["path"]
        session_id = server.session()
        opened = server.post(
            "/create_sampling_session", session_id=session_id, sampling_session_seq_id=0, model_path=path
        )
        assert opened.status_code == 200, opened.text
        server.http.delete(f"/training_runs/{model_id}/checkpoints/{path.partition(f'{model_id}/')[2]}")
        assert not [*(tmp_path / "data").glob("checkpoints/*/*/passing~*")]
        asyncio.run(back_up(server.settings, tmp_path / "backup"))
    finally:
        server.stop()


def test_weights_that_cannot_be_copied_end_a_backup_and_a_restoration_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk of its own."""
    server = Running(tmp_path / "data")
    try:
        path = saved(server, server.model(), 1, "kept")
    finally:
        server.stop()
    settings, again = Settings(data_dir=tmp_path / "data"), Settings(data_dir=tmp_path / "again")
    asyncio.run(back_up(settings, tmp_path / "backup"))
    for copy in (lambda: back_up(settings, tmp_path / "other"), lambda: restore(again, tmp_path / "backup")):
        with monkeypatch.context() as full:
            full.setattr(backup, "link", partial(fail_with, errno.ENOSPC))
            with pytest.raises(StartFailed, match=r"/checkpoints/.* cannot be copied: No space left on device"):
                asyncio.run(copy())
    assert not (tmp_path / "other").exists() and not [*(tmp_path / "again").glob("checkpoints/*/*/*")]
    asyncio.run(restore(again, tmp_path / "backup"))
    assert [*(tmp_path / "again").glob("checkpoints/*/weights/kept~*")], path
    [weights] = (tmp_path / "backup").glob("checkpoints/*/weights/kept~*")
    shutil.rmtree(weights)
    with pytest.raises(StartFailed, match=r"is damaged: \d of \d weight directories are there"):
        asyncio.run(restore(Settings(data_dir=tmp_path / "third"), tmp_path / "backup"))


@pytest.mark.parametrize(
    ("driver", "failure", "said"),
    [
        (
            "+asyncpg",
            StartDelayed,
            r"postgresql\+asyncpg://somebody:\*\*\*@127.0.0.1:1/d: .*Connect call failed",
        ),
        ("", StartFailed, r"postgresql://somebody:\*\*\*@127.0.0.1:1/d: No module named 'psycopg"),
    ],
)
def test_a_database_that_cannot_be_reached_ends_a_backup_in_one_line(
    driver: str, failure: type[StartFailed], said: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    url = f"postgresql{driver}://somebody:secret@127.0.0.1:1/d"
    with pytest.raises(failure, match=said) as refused:
        asyncio.run(back_up(Settings(data_dir=tmp_path / "data", database_url=url), tmp_path / "backup"))
    assert type(refused.value) is failure and not (tmp_path / "backup").exists()


def test_doctor_refuses_what_a_server_refuses_of_routing(tiny_vl: Path) -> None:
    found = examine(BackendConfig(models={"a": str(tiny_vl)}, device="cpu", replay_routing=True))
    assert "none of the models is a mixture of experts" in str(found.problem)


def test_doctor_plans_no_gpus_for_a_device_that_has_none() -> None:
    with pytest.raises(BackendFailed, match=r"--gpu plans for CUDA, and --device .* is cpu"):
        examine(BackendConfig(device="cpu"), "H200")
    assert examine(BackendConfig(), "H200").device == "cuda"


def test_an_interrupted_backup_ends_with_the_directory_that_it_links_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Running(tmp_path / "data")
    try:
        model_id = server.model()
        for number in (1, 2, 3):
            saved(server, model_id, number, f"kept{number}")
    finally:
        server.stop()
    begun, linked = threading.Event(), []

    def link_slowly(source: str, target: str) -> None:
        begun.set()
        time.sleep(0.2)
        link(source, target)
        linked.append(Path(source).parent)

    monkeypatch.setattr(backup, "link", link_slowly)

    async def interrupt() -> None:
        backing_up = asyncio.create_task(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "kept/backup"))
        await asyncio.to_thread(begun.wait, 60)
        backing_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await backing_up
        assert len(set(linked)) == 1 and not [*(tmp_path / "kept").iterdir()]

    asyncio.run(interrupt())


def fail_with(number: int, *_: object) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("end", ["", "-wal"])
def test_a_database_of_sqlite_that_is_there_is_not_replaced(end: str, tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    server.stop()
    asyncio.run(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
    there = tmp_path / f"other.db{end}"
    there.write_bytes(b"somebody's")
    fresh = Settings(data_dir=tmp_path / "again", database_url=f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(StartFailed, match=rf"{there.name} is there already"):
        asyncio.run(restore(fresh, tmp_path / "backup"))
    assert there.read_bytes() == b"somebody's"


def test_a_backup_is_left_alone_by_another_until_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Running(tmp_path / "data")
    server.stop()
    flush = files.flush

    def while_another_begins(path: Path) -> None:
        backup._remove_left(tmp_path)
        flush(path)

    monkeypatch.setattr(files, "flush", while_another_begins)
    asyncio.run(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
    assert (tmp_path / "backup" / "backup.json").is_file()


@pytest.mark.parametrize("name", ["a?b=c", "run%41", "half#way"])
def test_a_data_directory_of_any_name_has_its_own_database(name: str, tmp_path: Path) -> None:
    """Where a URL's text has a meaning for them, too."""
    server = Running(tmp_path / "all" / name)
    try:
        model_id = server.model()
        path = saved(server, model_id, 1, "kept")
        asyncio.run(back_up(server.settings, tmp_path / "backup"))
    finally:
        server.stop()
    assert [found.name for found in (tmp_path / "all").iterdir()] == [name]
    assert (tmp_path / "all" / name / "tinker-server.db").is_file()
    asyncio.run(restore(Settings(data_dir=tmp_path / "again" / name), tmp_path / "backup"))
    again = Running(tmp_path / "again" / name)
    try:
        listed = again.http.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [path]
    finally:
        again.stop()


@pytest.mark.parametrize(
    ("about", "text"),
    [
        (None, "is not a backup"),
        ({"format": 99, "database": "sqlite"}, "has the format 99; this version reads 1"),
        ({"format": 1, "database": "postgresql"}, "of a postgresql database, and this one is sqlite"),
    ],
)
def test_what_is_no_backup_of_this_kind_is_refused(about: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    if about is not None:
        (tmp_path / "backup" / "backup.json").write_text(json.dumps(about))
    with pytest.raises(StartFailed, match=text):
        asyncio.run(restore(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))


def test_a_running_server_is_not_restored_over(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    try:
        asyncio.run(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
        with pytest.raises(StartFailed, match="another server uses the data directory"):
            asyncio.run(restore(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
        with pytest.raises(StartFailed, match="exists already"):
            asyncio.run(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
    finally:
        server.stop()


def test_every_directory_that_a_table_owns_goes_into_a_backup(tmp_path: Path) -> None:
    """A new column of that kind must be added to what is copied."""
    server = Running(tmp_path / "data")
    server.stop()
    columns = set()
    with sqlite3.connect(tmp_path / "data" / "tinker-server.db") as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for column in database.execute(f"PRAGMA table_info({table})").fetchall():
                if column[1] in ("directory", "snapshot"):
                    columns.add((table, column[1]))
    database.close()
    copied = {(query.split()[3], query.split()[1]) for query in databases.REFERENCES}
    assert columns - {("loose_directories", "directory")} == copied
    assert backup.TRIES > 1


def test_status_shows_runs_queue_and_processes(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    try:
        model_id = server.model()
        with console(200).capture() as captured:
            captured._console.print(Status.fetch(server.url, "tml-local").as_tables())
        shown = captured.get()
        assert model_id in shown and "runs: 1" in shown and "disk of the data directory" in shown
        with pytest.raises(StartFailed, match="answers 401"):
            Status.fetch(server.url, "nothing")
    finally:
        server.stop()
    with pytest.raises(StartFailed, match="no server answers at"):
        Status.fetch(server.url, "tml-local")


async def test_a_program_that_is_no_server_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\n<html>")
        writer.close()

    async with serving(answer) as address:
        for command in (["status"], ["admin", "owners"]):
            arguments = [*command, "--url", f"http://{address}", "--key", "tml-k"]
            assert await asyncio.to_thread(run_main, arguments) == 2
            assert "is no tinker-server: it answers no JSON" in capsys.readouterr().err


def run_main(arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as given:
        given.setattr(sys, "argv", ["tinker-server", *arguments])
        return main()


@pytest.mark.parametrize(("url", "kind"), [("nonsense", "none"), ("mysql://host/name", "mysql")])
def test_another_kind_of_database_is_refused_by_name(url: str, kind: str, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url=url)
    with pytest.raises(StartFailed, match=f"the database URL is of {kind}: give one of sqlite or postgresql"):
        asyncio.run(back_up(settings, tmp_path / "backup"))


def test_status_is_json_with_the_key_and_address_of_the_sdks_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = keys.add(tmp_path / "keys", "alice")
    server = Running(tmp_path / "data", keys_file=tmp_path / "keys")
    server.http.headers["x-api-key"] = key
    try:
        model_id = server.model()
        monkeypatch.setattr(sys, "argv", ["tinker-server", "status", "--json"])
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        assert main() == 2 and "answers 401" in capsys.readouterr().err
        monkeypatch.setenv("TINKER_API_KEY", key)
        assert main() == 0
    finally:
        server.stop()
    printed = json.loads(capsys.readouterr().out)
    assert [run["training_run_id"] for run in printed["training_runs"]] == [model_id]
    assert printed["cursor"]["total_count"] == 1
    up = {one["labels"]["process"]: one["value"] for one in printed["metrics"] if one["name"] == "tinker_process_up"}
    assert up == {"trainer": 1, "sampler": 1}


def test_keys_and_all_runs_are_json_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = keys.add(tmp_path / "keys", "root", is_admin=True)
    keys.add(tmp_path / "keys", "alice", scope="sample", valid_s=3600)

    def printed(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["tinker-server", *arguments, "--json"])
        assert main() == 0
        return json.loads(capsys.readouterr().out)

    root, alice = printed("keys", "list", "--data-dir", str(tmp_path))["keys"]
    assert (root["owner"], root["is_admin"], root["expires_at"]) == ("root", True, None)
    assert (alice["scope"], alice["used_at"]) == ("sample", None) and alice["expires_at"] > alice["created_at"]
    assert alice["key_id"] != root["key_id"] and key not in json.dumps([root, alice])
    server = Running(tmp_path / "data", keys_file=tmp_path / "keys")
    server.http.headers["x-api-key"] = key
    try:
        model_id = server.model()
        asking = ["--url", server.url, "--key", key]
        (run,) = printed("admin", "runs", *asking)["runs"]
        assert (run["run_id"], run["owner"]) == (model_id, "root")
        assert {owner["owner"] for owner in printed("admin", "owners", *asking)["owners"]} == {"root", "alice"}
    finally:
        server.stop()


def test_tables_of_runs_and_keys_have_a_line_for_each_row_of_80_columns(tmp_path: Path) -> None:
    run = {
        "training_run_id": f"{'ab0d3a98-3f2c-4a7e-9c1d-1234567890ab'}:train:0",
        "base_model": "Qwen/Qwen3-VL-4B-Instruct",
        "lora_rank": 32,
        "last_request_time": "2026-11-28T12:30:59Z",
    }
    keys.add(tmp_path / "keys", "somebody.with-a-name@example.org", is_admin=True, valid_s=1e6)
    found = list(keys.read(tmp_path / "keys").values())
    at = {key.fingerprint: 1.8e9 for key in found}
    tables = [runs_table({"cursor": {"total_count": 1}, "training_runs": [run]}), keys_table(found, at)]
    for table, row in zip(tables, ("Qwen/Qwen3-VL-4B-Instruct", found[0].id), strict=True):
        with console(80).capture() as captured:
            captured._console.print(table)
        lines = [line for line in captured.get().splitlines() if line.strip()]
        assert all(len(line) <= 80 for line in lines)
        (shown,) = [line for line in lines if row in line]
        assert "2026" in shown or "2027" in shown
        head = 2 if table.title else 1
        assert len(lines) == head + 2, lines


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tinker_server", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **more)


def test_doctor_says_what_a_model_needs_and_loads_nothing(
    tiny_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["doctor", "--data-dir", str(tmp_path), "--device", "cpu"]
    fine = command(
        *asked, "--model", f"tiny={tiny_vl}", env={"PATH": "/usr/bin", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    )
    assert fine.returncode == 0, fine.stderr
    assert "torch 2." in fine.stdout and "qwen3_vl" in fine.stdout and "all of it can be served" in fine.stdout
    assert "image prompts in flight take up to 0.5 GiB of main memory for each owner" in fine.stdout
    assert re.search(r"^\d+ changes inside vLLM, transformers and torch fit", fine.stdout, re.MULTILINE)
    assert "kv-cache-zeroing" not in fine.stdout, "the table of changes is behind a flag"
    verdict = fine.stdout.splitlines()[-1]
    assert verdict == "all of it can be served; these cards do, and larger ones: 1 x L4 (--max-context 4096)"
    monkeypatch.setattr(sys, "argv", ["tinker-server", *asked, "--model", f"tiny={tiny_vl}"])
    monkeypatch.setenv("TINKER_SERVER_BACKEND__KV_CACHE_BYTES", str(1 << 50))
    assert main() == 2
    refused = capsys.readouterr()
    assert "too little memory" in refused.err and "qwen3_vl" in refused.out
    assert refused.out.splitlines()[-1] == "not all of it can be served", "no card has a petabyte"


def test_doctor_plans_for_gpus_that_are_not_there(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--data-dir", str(tmp_path), "--model", f"tiny={tiny_text}"]
    monkeypatch.setattr(sys, "argv", ["tinker-server", "doctor", *model, "--gpu", "H200:2"])
    assert main() == 0
    found = capsys.readouterr().out
    for said in (
        "GPU 1: H200, 139.8 GiB",
        "bfloat16",
        "trainer on GPU 0, 1, ",
        "each, the whole base; 2 engines on GPU 0; GPU 1, ",
    ):
        assert said in found
    (together,) = [line for line in found.splitlines() if "together" in line]
    assert "139.80 GiB" in together, "the table has every byte of both, in one column"
    assert "idle" not in found
    monkeypatch.setattr(sys, "argv", ["tinker-server", "doctor", *model, "--gpu", "H200:3", "--engines", "1"])
    monkeypatch.setenv("TINKER_SERVER_BACKEND__CONTEXT_PARALLEL", "2")
    assert main() == 0
    assert "GPU 2 will be idle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "engines", "said"),
    [
        ("H100:2", 3, "3 x 1 ranks of engines .* need 3 GPUs; the machine has 2"),
        ("H1000", 1, "--gpu H1000: write NAME or NAME:COUNT, .* H200"),
        ("H200:0", 1, "COUNT from 1 to 64"),
    ],
)
def test_doctor_refuses_gpus_that_do_not_do(tiny_text: Path, gpus: str, engines: int, said: str) -> None:
    config = BackendConfig(models={"tiny": str(tiny_text)}, engines=engines)
    with pytest.raises(BackendFailed, match=said):
        diagnose(config, gpus, as_json=False, shows_changes=False)


def test_doctor_says_how_many_ranks_compute_a_microbatch(tiny_text: Path) -> None:
    config = BackendConfig(models={"tiny": str(tiny_text)}, context_parallel=2)
    lines: list[str] = []
    report(examine(config, "H200:2"), lines.append)
    (place,) = [line for line in lines if line.startswith("tiny: trainer")]
    assert "on GPU 0, 1, " in place and "the whole base, 2 for the tokens of each microbatch; " in place


async def test_doctor_plans_slots_for_the_runs_of_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = FAMILIES["Qwen3 MoE"](tmp_path / "model")
    asked = ["tinker-server", "doctor", "--data-dir", str(tmp_path / "data"), "--model", f"tiny={source}", "--json"]
    monkeypatch.setattr(sys, "argv", asked)

    async def slots() -> tuple[str, str]:
        assert await asyncio.to_thread(main) == 0
        shown = capsys.readouterr()
        (model,) = json.loads(shown.out)["models"]
        return model["spec"]["expert_slots"], shown.err

    capsys.readouterr()
    settings = Settings(data_dir=tmp_path / "data")
    assert await slots() == ("service", "") and not (settings.data_dir / "tinker-server.db").exists()
    settings.data_dir.mkdir(exist_ok=True)
    db = Database(settings.resolve_database_url())
    await db.migrate()
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, "local")
    own = Trainable(rank=8, seed=1, layout="own")
    run = run_of_weights("local", (session_id, 0), ("tiny", None), own, 1.0)
    await RunStore(db).add(replace(run, status="suspended"))
    assert (await slots())[0] == "own"
    await db.close()
    (settings.data_dir / "tinker-server.db").write_bytes(b"no database" * 100)
    form, said = await slots()
    assert form == "service" and "planned as without runs and weights: the database cannot be read: " in said
    monkeypatch.setenv("TINKER_SERVER_DATABASE_URL", "mysql+aiomysql://user:password@host/name")
    form, said = await slots()
    assert form == "service" and "the database cannot be read: No module named 'aiomysql'" in said


def test_doctor_plans_the_serving_machine_of_a_cluster_and_refuses_what_that_refuses(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--data-dir", str(tmp_path), "--model", f"tiny={tiny_text}", "--cluster"]
    monkeypatch.setattr(sys, "argv", ["tinker-server", "doctor", *model, "--gpu", "H200"])
    assert main() == 0
    found = capsys.readouterr().out
    assert "the plan of the serving machine, whatever other machines join: Ray is not asked" in found
    assert "engines of the same size on all of its GPUs, none of which may be smaller" in found
    assert " engine on GPU 0, " in found and "each" not in found.partition("trainer on GPU 0")[2].partition("\n")[0]
    assert "holder" not in found, "a cluster has two copies by default"
    monkeypatch.setattr(sys, "argv", ["tinker-server", "doctor", *model, "--gpu", "H200", "--gpu-memory", "40"])
    assert main() == 2
    refused = capsys.readouterr()
    assert "setting backend.gpu_memory_bytes does not go with backend.cluster" in refused.err
    assert "other machines join" not in refused.out and "these cards do" not in refused.out


def test_doctor_without_a_model_names_what_is_installed() -> None:
    lines: list[str] = []
    report(examine(Settings().backend), lines.append)
    assert "Python 3" in lines[0] and lines[-1].startswith("no --model was given")


def test_doctor_lists_its_changes_on_request_and_prints_json(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["tinker-server", "doctor", "--data-dir", str(tmp_path), "--model", f"tiny={tiny_text}"]
    monkeypatch.setattr(sys, "argv", [*asked, "--changes"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert "kv-cache-zeroing" in shown and "as written" in shown
    monkeypatch.setattr(sys, "argv", [*asked, "--json", "--gpu", "H100:2"])
    assert main() == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["gpus"][1][0] == "H100" and printed["problem"] is None
    assert [model["spec"]["name"] for model in printed["models"]] == ["tiny"]
    assert printed["fitting"][0]["cards"] == [[1, "L4"]]
    assert {patch["state"] for patch in printed["patches"]} <= {"as written", "absent"}


def test_a_change_that_does_not_fit_is_listed_without_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    found = examine(Settings().backend)
    one, *others = found.patches
    report(replace(found, patches=[replace(one, state="changed"), *others]))
    shown = capsys.readouterr().out
    assert one.name in shown and "changed" in shown and others[-1].name not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_the_commands(shell: str) -> None:
    printed = command("--print-completion", shell)
    assert printed.returncode == 0
    for name in ("serve", "keys", "status", "doctor", "backup", "restore", "--data-dir", "--model"):
        assert name in printed.stdout


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tinker_server.commands import backup, databases
from tinker_server.settings import Settings
databases.copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(backup.back_up(Settings(data_dir=Path(sys.argv[1])), Path(sys.argv[2])))
"""


def test_what_a_killed_backup_left_is_removed_by_the_next_and_one_at_work_is_left_alone(tmp_path: Path) -> None:
    Running(tmp_path / "data").stop()
    backups = tmp_path / "backups"
    other = backups / f".other.{'0' * 32}"  # of another program
    other.mkdir(parents=True)
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "data", backups / "monday"], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = backups.glob(".monday.*")
    settings = Settings(data_dir=tmp_path / "data")
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    asyncio.run(back_up(settings, backups / "tuesday"))
    assert left.exists(), "the backup that writes it is at work"
    os.close(handle)
    asyncio.run(back_up(settings, backups / "wednesday"))
    assert {one.name for one in backups.iterdir()} == {"tuesday", "wednesday", other.name}
    asyncio.run(restore(Settings(data_dir=tmp_path / "restored"), backups / "wednesday"))


KILLED_ANYWHERE = """
import asyncio, sys
from pathlib import Path
from tests.killing import kill_at_each_step
from tinker_server.commands.backup import back_up
from tinker_server.settings import Settings

data_dir, backups = map(Path, sys.argv[1:3])
STEPS = {"open", "os.chmod", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir",
    "shutil.copyfile", "shutil.rmtree", "sqlite3.connect", "fcntl.flock"}

def watched(step):
    sys.addaudithook(lambda name, _: step() if name in STEPS else None)

def make(step):
    settings = Settings(data_dir=data_dir)
    watched(step)
    asyncio.run(back_up(settings, backups / "monday"))

def look(number):
    "A backup that appeared is whole."
    if (backups / "monday").exists():
        assert (backups / "monday/backup.json").read_text() != "{}", number
        (backups / "monday").rename(backups / f"complete-{number}")

asyncio.run(back_up(Settings(data_dir=data_dir), backups / "first"))  # all is imported
kill_at_each_step(make, look)
"""


def test_a_backup_that_is_killed_anywhere_loses_nothing_and_the_next_one_is_whole(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    model_id = server.model()
    for number in range(2):
        saved(server, model_id, number + 1, f"at-{number}")
    server.stop()
    keys.add(tmp_path / "data/keys", "alice")
    before = contents(tmp_path / "data")
    num_kills = run_script(KILLED_ANYWHERE, tmp_path / "data", tmp_path / "backups")
    assert num_kills > 50
    assert contents(tmp_path / "data") == before
    left = [one for one in (tmp_path / "backups").glob(".*") if any(one.iterdir())]
    assert not left, "the last backup removes what the killed ones left"
    for number, made in enumerate(sorted((tmp_path / "backups").glob("[!.]*"))):
        asyncio.run(restore(Settings(data_dir=tmp_path / f"restored-{number}"), made))
        assert contents(tmp_path / f"restored-{number}") == before, made


def contents(data_dir: Path) -> dict[str, object]:
    """Return the bytes of each file that a backup has, and the rows of the database."""
    with contextlib.closing(sqlite3.connect(data_dir / "tinker-server.db")) as db:
        rows = list(db.iterdump())
    files = [data_dir / "keys", *data_dir.glob("checkpoints/*/*/*/*")]
    return {str(one.relative_to(data_dir)): one.read_bytes() for one in files if one.is_file()} | {"rows": rows}


FULL_DISK = """
import resource, sys
from tinker_server.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
sys.exit(main())
"""
"""A command on a disk that takes no more of a file than the first bytes."""


def test_a_restore_that_ends_half_way_leaves_no_part_of_a_database(tmp_path: Path) -> None:
    Running(tmp_path / "data").stop()
    asyncio.run(back_up(Settings(data_dir=tmp_path / "data"), tmp_path / "backup"))
    arguments = ["restore", "--data-dir", tmp_path / "restored", tmp_path / "backup"]
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "tinker-server: the backup cannot be restored: [Errno 27] File too large" in ended.stderr
    assert not [one for one in (tmp_path / "restored").iterdir() if "tinker-server.db" in one.name]
