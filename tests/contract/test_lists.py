"""Clients' notes are bounded, and so are the lists of them.

pytest tests/contract/test_lists.py -s    prints the longest stall of each list
"""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.base import NOTED_BYTES
from tests.fake_server import Running
from tests.stalls import longest_stall_until
from tinker_server.store.catalog import LIST_BYTES

LONGEST_STALL_S = 0.3
NUM_SESSIONS = 150
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


def test_a_list_ends_where_its_notes_are_many_and_goes_on_by_its_paging(server: Running) -> None:
    found: list[str] = []
    while True:
        answer = timed(server, "GET", "/training_runs", params={"limit": 1000, "offset": len(found)}).json()
        assert answer["training_runs"] and answer["cursor"]["total_count"] == NUM_SESSIONS
        noted = [one["user_metadata"] for one in answer["training_runs"]]
        assert all(one == LARGEST for one in noted) and sum(len(json.dumps(one)) for one in noted) <= LIST_BYTES
        found += [one["training_run_id"] for one in answer["training_runs"]]
        if len(found) == NUM_SESSIONS:
            break
    assert len(set(found)) == NUM_SESSIONS


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
