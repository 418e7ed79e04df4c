"""Clients' notes are bounded, and so are the lists of them.

pytest tests/contract/test_lists.py -s    prints the longest stall of each list
"""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_server import Running
from tests.stalls import longest_stall_until
from tinker_server.api_schemas.base import NOTED_BYTES
from tinker_server.store.notes import LEFT_OUT, LIST_BYTES

LONGEST_STALL_S = 0.3
NUM_SESSIONS = 150
NUM_COPIES = 250
LARGEST: dict[str, Any] = {f"k{number}": "" for number in range(1200)}
"""As many entries as there may be."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """With many sessions of one model each, all with as many notes as there may be."""
    running = Running(tmp_path_factory.mktemp("lists"))
    for _ in range(NUM_SESSIONS):
        created = running.post("/create_session", user_metadata=LARGEST)
        assert created.status_code == 200, created.text
        body = {"session_id": created.json()["session_id"], "model_seq_id": 0, "base_model": "tiny"}
        made = running.post("/create_model", **body, user_metadata=LARGEST, lora_config={"rank": 8})
        assert running.result(made).status_code == 200
    yield running
    running.stop()


def timed(server: Running, method: str, path: str, **options: Any) -> httpx.Response:
    """The answer, while which the event loop came round."""
    done = asyncio.Event()
    watch = asyncio.run_coroutine_threadsafe(longest_stall_until(done), server.loop)
    answer = server.http.request(method, path, **options)
    server.loop.call_soon_threadsafe(done.set)
    stall_s = watch.result(60)
    print(f"{path}: {len(answer.content)} bytes, the loop stood still for {stall_s * 1000:.0f} ms")
    assert stall_s < LONGEST_STALL_S, path
    return answer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user_metadata", {"a": "x" * NOTED_BYTES}),
        ("user_metadata", {f"k{number}": [] for number in range(2000)}),
        ("tags", ["x" * 100] * 170),
        ("display_name", "é" * (NOTED_BYTES // 2)),
        ("project_id", "x" * NOTED_BYTES),
        ("sdk_version", "x" * NOTED_BYTES),
    ],
)
def test_a_session_notes_16_kib_in_a_field_and_the_refusal_names_it(server: Running, field: str, value: Any) -> None:
    refused = server.post("/create_session", **{field: value})
    assert refused.status_code == 400, refused.text[:200]
    assert field in refused.json()["detail"] and str(NOTED_BYTES) in refused.json()["detail"]


@pytest.mark.parametrize("path", ["create_model", "save_weights", "save_weights_for_sampler", "load_weights"])
def test_models_and_weights_note_16_kib_too(server: Running, path: str) -> None:
    bodies: dict[str, Any] = {
        "create_model": {"session_id": "s", "model_seq_id": 0, "base_model": "tiny"},
        "load_weights": {"session_id": "s", "model_seq_id": 0, "path": "tinker://a/weights/b"},
    }
    body = bodies.get(path, {"model_id": "m", "seq_id": 1, "path": "a"})
    refused = server.post(f"/{path}", **body, user_metadata={"a": "x" * NOTED_BYTES})
    assert refused.status_code == 400, refused.text[:200]
    assert "user_metadata" in refused.json()["detail"]


def test_a_list_has_all_entries_of_a_page_and_leaves_out_the_notes_beyond_its_bytes(server: Running) -> None:
    answer = timed(server, "GET", "/training_runs", params={"limit": 1000}).json()
    runs = answer["training_runs"]
    assert len(runs) == len({one["training_run_id"] for one in runs}) == NUM_SESSIONS
    assert answer["cursor"] == {"offset": 0, "limit": 1000, "total_count": NUM_SESSIONS}
    noted = [one["user_metadata"] for one in runs if one["user_metadata"] != LEFT_OUT]
    assert all(one == LARGEST for one in noted) and 0 < sum(len(json.dumps(one)) for one in noted) <= LIST_BYTES
    assert len(noted) < NUM_SESSIONS
    whole = server.http.get(f"/training_runs/{runs[-1]['training_run_id']}").json()
    assert runs[-1] == whole | {"user_metadata": LEFT_OUT} and whole["user_metadata"] == LARGEST
    last = server.http.get("/training_runs", params={"limit": 100, "offset": NUM_SESSIONS - 2}).json()["training_runs"]
    assert [one["training_run_id"] for one in last] == [one["training_run_id"] for one in runs[-2:]]
    assert last[0]["user_metadata"] == LARGEST


def test_the_command_line_lists_all_runs_and_checkpoints_whatever_they_note(tmp_path: Path) -> None:
    """It takes a page with fewer entries than it asked for, after its first, as the last."""
    running, noted = Running(tmp_path), {"config": "c" * 12_000}
    try:
        model_id = running.model()
        running.result(running.post("/save_weights", model_id=model_id, seq_id=1, path="w0", user_metadata=noted))
        with sqlite3.connect(tmp_path / "tinker-server.db") as database:
            database.execute("UPDATE training_runs SET user_metadata = ?", (json.dumps(noted),))
            multiply(database, "training_runs", "model_id", {"status": "lost"})
            multiply(database, "checkpoints", "tinker_path", {}, "name")
        for command, field in (("run", "runs"), ("checkpoint", "checkpoints")):
            environment = os.environ | {"TINKER_BASE_URL": running.url, "TINKER_API_KEY": "tml-test"}
            tinker = str(Path(sys.executable).with_name("tinker"))
            asked = [tinker, "-f", "json", command, "list", "--limit", "0"]
            listed = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=120, check=True)
            assert len(json.loads(listed.stdout)[field]) == NUM_COPIES, command
    finally:
        running.stop()


def multiply(database: sqlite3.Connection, table: str, key: str, changes: dict[str, str], *unique: str) -> None:
    """Make NUM_COPIES rows of the table's one row, each a second older than the last."""
    database.row_factory = sqlite3.Row
    row = dict(database.execute(f"SELECT * FROM {table}").fetchone())
    for number in range(1, NUM_COPIES):
        named = {name: f"{row[name]}{number}" for name in (key, *unique)}
        copy = row | changes | named | {"created_at": row["created_at"] - number}
        database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(copy))})", tuple(copy.values()))


def test_a_search_ends_where_its_notes_are_many_and_goes_on_by_its_cursor(server: Running) -> None:
    found: list[str] = []
    cursor: dict[str, Any] | None = None
    pages = 0
    while pages == 0 or cursor is not None:
        body: dict[str, Any] = {"limit": 200} | ({"cursor": cursor} if cursor is not None else {})
        answer = timed(server, "POST", "/sessions/search", json=body).json()
        cursor, pages = answer.get("next_cursor"), pages + 1
        found += [one["session_id"] for one in answer["sessions"]]
    assert len(found) == len(set(found)) == NUM_SESSIONS and pages > 1


def test_what_was_noted_before_there_was_a_bound_stalls_no_list(tmp_path: Path) -> None:
    running = Running(tmp_path)
    try:
        for _ in range(20):
            running.session()
        with sqlite3.connect(tmp_path / "tinker-server.db") as database:
            database.execute("UPDATE sessions SET user_metadata = ?", (json.dumps({"a": "x" * (1 << 20)}),))
        sessions = timed(running, "POST", "/sessions/search", json={"limit": 200}).json()
    finally:
        running.stop()
    assert len(sessions["sessions"]) == 1 and sessions["next_cursor"]
