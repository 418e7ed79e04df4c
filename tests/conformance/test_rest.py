"""Runs, sessions and records, through the SDK's own clients and command line; numbers are the checklist's.

pytest tests/conformance/test_rest.py
"""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.types.session_search_request import SessionSearchRequest
from tinker.types.session_status_query import ActiveSessionStatusQuery, ClientFinishedSessionStatusQuery

from tests.factories import present
from tests.fake_server import Running, datum, fetch, session_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
]
OWNER = "tml:organization_user:local"
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def fake_database_url(module_database_url: str) -> str:
    return module_database_url


def environment(fake: Running, home: Path) -> dict[str, str]:
    return {"TINKER_BASE_URL": fake.url, "TINKER_API_KEY": "tml-test", "HOME": str(home)}


def tinker_cli(fake: Running, home: Path, *arguments: str) -> str:
    """A command in this process, which has imported the SDK already."""
    done = CliRunner().invoke(main_cli, arguments, env=environment(fake, home))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_095_training_runs_are_found_and_unknown_ones_are_404(
    rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    fresh = rest.get_training_run(training.model_id).result()
    assert (fresh.training_run_id, fresh.base_model, fresh.lora_rank) == (training.model_id, "tiny", 8)
    assert fresh.is_lora and not fresh.corrupted and fresh.last_checkpoint is None
    assert fresh.model_owner == OWNER and fresh.user_metadata == {"renderer_name": "plain"}

    path = training.save_state("a").result().path
    sampler = training.save_weights_for_sampler("b").result().path
    last = training.save_state("c").result().path
    for scope in ("owned", "accessible"):
        run = rest.get_training_run_by_tinker_path(path, access_scope=scope).result()
        assert (
            present(run.last_checkpoint).tinker_path == last
            and present(run.last_sampler_checkpoint).tinker_path == sampler
        )
    assert fresh.last_request_time < run.last_request_time <= datetime.now(UTC)
    for unknown in ("nothing", "sess:train:0"):
        with pytest.raises(tinker.NotFoundError):
            rest.get_training_run(unknown).result()


def test_096_training_runs_are_listed_by_page_and_project(
    client: tinker.ServiceClient, rest: tinker.RestClient, fake: Running
) -> None:
    models = [client.create_lora_training_client("tiny", rank=8).result().model_id for _ in range(3)]
    first = rest.list_training_runs(limit=2).result()
    assert [run.training_run_id for run in first.training_runs] == [models[2], models[1]]
    total = first.cursor.total_count
    assert (first.cursor.limit, first.cursor.offset) == (2, 0) and total >= 3
    last = rest.list_training_runs(limit=2, offset=total - 1).result()
    assert len(last.training_runs) == 1
    beyond = rest.list_training_runs(limit=2, offset=total + 5, access_scope="accessible").result()
    assert beyond.training_runs == [] and beyond.cursor.total_count == total
    other = fake.model()
    ours = rest.list_training_runs(limit=1000, project_id="first").result()
    assert set(models) <= {run.training_run_id for run in ours.training_runs}
    assert other not in {run.training_run_id for run in ours.training_runs}
    without = rest.list_training_runs(project_id="default").result()
    assert without.training_runs[0].training_run_id == other
    assert rest.list_training_runs(project_id="none").result().cursor.total_count == 0


def test_104_sessions_and_samplers_are_found(
    client: tinker.ServiceClient, rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    session_id = session_of(training)
    assert session_id in rest.list_sessions().result().sessions
    assert rest.list_sessions(limit=1, offset=10_000).result().sessions == []
    path = training.save_weights_for_sampler("s").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    session = rest.get_session(session_id).result()
    assert training.model_id in session.training_run_ids and session.user_metadata == {"team": "red"}
    found = [rest.get_sampler(sampler_id).result() for sampler_id in session.sampler_ids]
    assert path in [one.model_path for one in found] and {one.base_model for one in found} == {"tiny"}
    assert sampler.get_base_model() == "tiny"
    for get in (rest.get_session, rest.get_sampler):
        with pytest.raises(tinker.NotFoundError):
            get("nothing").result()


def test_105_sessions_are_searched_and_assigned(
    rest: tinker.RestClient, training: tinker.TrainingClient, fake: Running
) -> None:
    training.save_state("a").result()
    names = ["Blue whale run", "blue WHALE", "red whale"]
    ids = [
        fake.post("/create_session", display_name=name, user_metadata={"n": str(index % 2)}).json()["session_id"]
        for index, name in enumerate(names)
    ]
    fake.post(f"/sessions/{ids[0]}/finish", reason={"type": "errored"}, detail="why")

    def search(**conditions: Any) -> list[str]:
        found, cursor = [], None
        while True:
            request = SessionSearchRequest(limit=1, cursor=cursor, **conditions)
            page = rest.search_sessions(request).result()
            found += [session.session_id for session in page.sessions]
            if (cursor := page.next_cursor) is None:
                return found

    assert search(display_name="whale blue") == [ids[1], ids[0]]
    assert search(display_name="%") == [] and search(session_id=ids[2], display_name="run") == [ids[2], ids[0]]
    assert search(display_name="whale", user_metadata={"n": "0"}) == [ids[2], ids[0]]
    finished = ClientFinishedSessionStatusQuery(reasons=["errored"])
    assert search(display_name="whale", statuses=[finished]) == [ids[0]]
    assert search(display_name="whale", statuses=[ActiveSessionStatusQuery()]) == [ids[2], ids[1]]
    named = rest.search_sessions(SessionSearchRequest(display_name="red whale")).result().sessions
    assert [session.owner for session in named] == [OWNER]
    for urn, of_owner in ((OWNER, ids[::-1]), ("local", ids[::-1]), (f"{OWNER}x", []), ("nobody", [])):
        assert search(display_name="whale", owner={"type": "user", "owner_urns": [urn]}) == of_owner

    with pytest.raises(tinker.BadRequestError, match="cannot be searched"):
        search(user_metadata={'a"b': "0"})
    assert search(user_metadata={"a.b$[0]'": "0"}) == []
    rest.assign_session_project(ids[1], "whales").result()
    assert search(project_ids=["whales"]) == [ids[1]] and ids[1] not in search(project_ids=["default"])
    summary = rest.search_sessions(SessionSearchRequest(session_id=ids[0])).result().sessions[0]
    status = summary.status
    assert isinstance(status, types.ClientSessionFinished) and (status.reason.type, status.detail) == ("errored", "why")
    ours = rest.search_sessions(SessionSearchRequest(session_id=session_of(training))).result().sessions[0]
    assert ours.project_id == "first" and ours.checkpoints_count >= 1 and (ours.checkpoint_storage_bytes or 0) > 0
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("nothing", "whales").result()


def test_106_a_trace_is_ready_and_holds_the_operations(
    rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    training.forward_backward([datum()], "cross_entropy").result()
    trace = json.loads(fetch(rest.export_session_trace(session_of(training)).result()))
    ours = [event for event in trace["traceEvents"] if event["tid"] == training.model_id]
    assert [event["name"] for event in ours][:2] == ["create_model", "forward_backward"]
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in ours[:1])
    with pytest.raises(tinker.NotFoundError):
        rest.export_session_trace("nothing").result()


def test_107_the_audit_log_has_what_was_done(
    rest: tinker.RestClient, training: tinker.TrainingClient, admin: tinker.AdminClient
) -> None:
    path = training.save_state("a").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.assign_session_project(session_of(training), "first").result()
    entries = admin.get_audit_log(event_type="checkpoints").result().entries
    ours = [entry.event for entry in entries if entry.event_details.get("tinker_path") == path]
    assert ours == ["checkpoint_saved", "checkpoint_published"]
    assert admin.get_audit_log(event_type="projects").result().entries[-1].event == "project_assigned"
    assert admin.get_audit_log(event_type="teams").result().entries == []
    assert admin.get_audit_log(day=datetime(2020, 1, 1).date()).result().entries == []


def test_107_usage_counts_tokens_and_bytes(rest: tinker.RestClient, admin: tinker.AdminClient, fake: Running) -> None:
    with tinker.ServiceClient(base_url=fake.url, api_key="tml-test", project_id="usage") as counted:
        model = counted.create_lora_training_client("tiny", rank=8).result()
        model.forward_backward([datum(5), datum(2)], "cross_entropy").result()
        model.save_state("a").result()
        model.save_weights_and_get_sampling_client().result().sample(PROMPT, 3, ONE_TOKEN).result()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = admin.get_billing_usage(starting_on=hour, ending_before=hour + timedelta(hours=1)).result()
    ours = [event for event in usage.data if event.session_id == session_of(model)]
    amounts = {event.event_info.type: event.event_info.model_dump(exclude={"type"}) for event in ours}
    assert amounts == {
        "training": {"token_count": 7},
        "sampling_prefill": {"cached": False, "token_count": 2},
        "sampling_sample": {"token_count": 3},
        "checkpoint": {"count": 1},
    }
    assert {(event.project_id, event.base_model) for event in ours} == {("usage", "tiny")}
    assert all(event.bucket_start == hour and event.estimated_cost_usd is None for event in ours)
    assert session_of(model) in usage.sessions and {event.user_id for event in ours} == {OWNER}
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    earlier = admin.get_billing_usage(starting_on=long_ago, ending_before=long_ago + timedelta(days=1)).result()
    assert earlier.data == []
    stored = admin.get_current_checkpoint_storage_usage(project_id="usage").result().data
    size_bytes = rest.list_checkpoints(model.model_id).result().checkpoints[0].size_bytes
    assert [(item.checkpoint_count, item.size_bytes, item.org_user_urn) for item in stored] == [(1, size_bytes, OWNER)]
    assert len(admin.get_current_checkpoint_storage_usage().result().data) > 1


@pytest.fixture(scope="module")
def admin(fake: Running) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=fake.url, api_key="tml-test")


@pytest.mark.parametrize("module_database_url", ["sqlite"], indirect=True)  # slow, and the others have shown the SQL
def test_108_the_command_line_works(
    rest: tinker.RestClient, training: tinker.TrainingClient, fake: Running, tmp_path: Path
) -> None:
    path, external = training.save_state("a").result().path, training.save_weights_external("e").result().path
    first = [sys.executable, "-m", "tinker.cli", "-f", "json", "checkpoint", "list", "--run-id", training.model_id]
    whole = os.environ | environment(fake, tmp_path)
    assert path in subprocess.run(first, env=whole, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert training.model_id in tinker_cli(fake, tmp_path, "-f", "json", "run", "list", "--limit", "0")
    assert '"tiny"' in tinker_cli(fake, tmp_path, "-f", "json", "run", "info", training.model_id)
    assert "weights/a" in tinker_cli(fake, tmp_path, "-f", "json", "checkpoint", "info", path)
    tinker_cli(fake, tmp_path, "checkpoint", "publish", path)
    assert rest.list_checkpoints(training.model_id).result().checkpoints[1].public
    tinker_cli(fake, tmp_path, "checkpoint", "download", external, "--output", str(tmp_path / "out"))
    tinker_cli(fake, tmp_path, "checkpoint", "download", path, "--output", str(tmp_path / "out"))
    assert len(list((tmp_path / "out").rglob("peft/adapter_model.safetensors"))) == 2
    tinker_cli(fake, tmp_path, "checkpoint", "delete", "--yes", path)
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [external]
    trace = tmp_path / "trace.json"
    tinker_cli(fake, tmp_path, "session", "export-trace", session_of(training), "--output", str(trace))
    assert json.loads(trace.read_text())["traceEvents"]


def test_108_a_key_is_known_and_can_be_given_up(fake: Running) -> None:
    me = fake.http.get("/auth/apikey/me", headers={"x-api-key": "tml-test"}).json()
    assert me["key_id"] == 0 and me["note"] and me["details"]["org_details"]["name"] == me["name"]
    assert fake.http.delete("/auth/apikey/me").status_code == 204
