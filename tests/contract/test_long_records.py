"""The audit log and usage of any length are read in pages, made beside the event loop, and sent in parts."""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.fake_server import Running
from tinker_server.api_schemas.admin import AuditEntryInfo, UsageEvent
from tinker_server.routes import admin

NUM_ENTRIES = 2500
"""More than two pages."""
DAY = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.stop()


def insert(server: Running, table: str, rows: list[tuple[object, ...]]) -> None:
    with sqlite3.connect(server.settings.data_dir / "tinker-server.db") as database:
        database.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)


def noting(threads: set[str], made: Callable[..., Any]) -> Callable[..., Any]:
    def make(**fields: object) -> Any:
        threads.add(threading.current_thread().name)
        return made(**fields)

    return make


def test_the_audit_log_of_a_day_is_whole_and_in_order(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    monkeypatch.setattr(admin, "AuditEntryInfo", noting(threads, AuditEntryInfo))
    server.session()
    at = [DAY.timestamp() + number // 2 for number in range(NUM_ENTRIES)]  # two at each time
    details = [json.dumps({"model_id": f"é{number}", "by": None}) for number in range(NUM_ENTRIES)]
    columns = "audit(entry_id, owner, at, event, details)"
    insert(server, columns, [(f"{n:05}", "local", at[n], "checkpoint_saved", details[n]) for n in range(NUM_ENTRIES)])
    others = [("a", "local", at[0], "project_assigned"), ("b", "bob", at[0], "checkpoint_saved")]
    insert(server, columns, [(*one, "{}") for one in others])
    insert(server, columns, [(f"c{n}", "local", DAY.timestamp() + n, "checkpoint_saved", "{}") for n in (-1, 86400)])
    answer = server.http.get("/audit", params={"day": "2026-01-02", "event_type": "checkpoints"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    expected = [
        {
            "timestamp": datetime.fromtimestamp(at[number], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "event": "checkpoint_saved",
            "event_details": {"model_id": f"é{number}", "by": None},
            "model_id": f"é{number}",
        }
        for number in range(NUM_ENTRIES)
    ]
    assert answer.json() == {"entries": expected}
    assert threads and server._thread.name not in threads
    assert len(server.http.get("/audit", params={"day": "2026-01-02"}).json()["entries"]) == NUM_ENTRIES + 1
    assert server.http.get("/audit", params={"day": "2025-01-02"}).json() == {"entries": []}


def test_usage_is_whole_and_names_each_session_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    monkeypatch.setattr(admin, "UsageEvent", noting(threads, UsageEvent))
    session_id = server.post("/create_session", user_metadata={"a": "ü"}, project_id="p").json()["session_id"]
    hours = [3600.0 * (number // 4) for number in range(NUM_ENTRIES)]
    kinds = [(kind, of) for kind in ("sampled", "training") for of in ("", session_id)]
    columns = "usage(hour, kind, owner, session_id, base_model, amount)"
    rows = [(hours[n], kinds[n % 4][0], "local", kinds[n % 4][1], "tiny", n + 1) for n in range(NUM_ENTRIES)]
    insert(server, columns, [*rows, (3600.0, "sampled", "bob", session_id, "tiny", 9)])
    period = {"starting_on": "1970-01-01T00:00:00Z", "ending_before": "1970-02-01T00:00:00Z"}
    answer = server.http.get("/billing/usage/events", params=period)
    assert answer.status_code == 200 and answer.json()["sessions"] == {session_id: {"user_metadata": {"a": "ü"}}}
    events = answer.json()["data"]
    within = [row for row in rows if row[0] < 31 * 86400]
    assert [one["event_info"]["token_count"] for one in events] == [row[-1] for row in within]
    assert events[1] == {
        "bucket_start": "1970-01-01T00:00:00Z",
        "bucket_end": "1970-01-01T01:00:00Z",
        "base_model": "tiny",
        "user_id": "tml:organization_user:local",
        "session_id": session_id,
        "project_id": "p",
        "event_info": {"type": "sampling_sample", "token_count": 2},
    }
    assert events[0]["project_id"] == "default" and threads and server._thread.name not in threads
