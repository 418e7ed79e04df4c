"""Making clients, and its cost in requests; numbers are the checklist's.

Wrong keys (3) are in test_isolation.py.

pytest tests/conformance/test_construction.py
"""

import asyncio
import time
from pathlib import Path

import pytest
import tinker
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker import types
from tinker.auth import raise_if_tinker_not_accessible

from tests.conformance.wire import Wire, is_of, paths
from tests.fake_server import Running, datum
from tests.servers import KEY

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
PREFIX = "/services/x"


def test_001_first_use_asks_for_configurations_and_a_session(fake: Running, wire: Wire) -> None:
    start = len(wire.requests)
    with tinker.ServiceClient(base_url=fake.url, api_key="tml-x") as client:
        assert len(wire.requests) == start, "making the client sends nothing yet"
        sampler = client.create_sampling_client(base_model="tiny").result()
        assert sampler.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == [100]
    seen = wire.requests[start:]
    first = [
        "/client/config",
        "/auth/token",
        "/client/dynamic_config",
        "/create_session",
        "/create_sampling_session",
        "/asample",
    ]
    assert [one.path for one in seen if one.path in first] == first
    assert {one.status for one in seen if one.path in first} == {200}
    assert {one.headers["x-api-key"] for one in seen if one.path in first[:2]} == {"tml-x"}
    assert all(is_of("tml-x", one) for one in seen)


@pytest.mark.parametrize("key", ["sk-test", "x", "TML-upper"])
def test_002_a_key_of_another_form_never_leaves_the_client(fake: Running, wire: Wire, key: str) -> None:
    with wire.recording() as requests, pytest.raises(tinker.TinkerError):
        tinker.ServiceClient(base_url=fake.url, api_key=key).create_sampling_client(base_model="tiny").result()
    assert requests() == []


def behind_a_prefix(app: ASGIApp) -> ASGIApp:
    """As a reverse proxy does: nothing but what is below the prefix, which it takes off and names in a header."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(f"{PREFIX}/"):
            await JSONResponse({"detail": "not below the prefix"}, 404)(scope, receive, send)
            return
        headers = [*scope["headers"], (b"x-forwarded-prefix", PREFIX.encode())]
        await app({**scope, "path": scope["path"].removeprefix(PREFIX), "headers": headers}, receive, send)

    return proxy


def test_004_a_path_prefix_and_a_trailing_slash_lead_to_the_routes(tmp_path: Path) -> None:
    running = Running(tmp_path, around=behind_a_prefix)
    try:
        with tinker.ServiceClient(base_url=f"{running.url}{PREFIX}/", api_key=KEY) as client:
            training = client.create_lora_training_client("tiny", rank=8).result()
            assert training.forward_backward([datum()], "cross_entropy").result().metrics == {"loss:sum": 1}
            path = training.save_weights_external("e").result().path
        rest = tinker.RestClient(base_url=f"{running.url}{PREFIX}/", api_key=KEY)
        (run,) = rest.list_training_runs().result().training_runs
        assert run.training_run_id == training.model_id
        urls = rest.get_external_weights_urls(path).result().urls
        assert urls and all(url.startswith(f"{running.url}{PREFIX}/api/v1/files/") for url in urls.values())
    finally:
        running.stop()


def test_005_unknown_headers_are_ignored(fake: Running, wire: Wire) -> None:
    start = len(wire.requests)
    headers = {"X-Team": "red", "CF-Access-Client-Id": "id", "Authorization": "Bearer of-a-proxy"}
    with tinker.ServiceClient(base_url=fake.url, api_key=KEY, default_headers_overrides=headers) as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        assert sampler.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == [100]
    samples = [one for one in wire.requests[start:] if one.path == "/asample"]
    assert [one.headers["x-team"] for one in samples] == ["red"]


def test_006_an_idle_client_is_heard_of_every_ten_seconds(fake: Running, wire: Wire) -> None:
    with tinker.ServiceClient(base_url=fake.url, api_key=KEY) as client:
        session_id = client.holder.get_session_id()
        deadline = time.monotonic() + 15
        beats: list[int | None] = []
        while not beats and time.monotonic() < deadline:
            time.sleep(0.1)
            mine = [one for one in wire.requests if one.path == "/session_heartbeat" and one.status is not None]
            beats = [one.status for one in mine if one.json()["session_id"] == session_id]
        assert beats == [200]


def test_006_and_007_and_008_a_session_is_alive_until_it_is_finished(fake: Running) -> None:
    session_id = fake.session()
    sampler_id = fake.sampler(session_id)
    assert fake.post("/session_heartbeat", session_id=session_id).json() == {"type": "session_heartbeat"}
    assert fake.post("/session_heartbeat", session_id="other").status_code == 404
    for _ in range(2):
        finished = fake.post(f"/sessions/{session_id}/finish", reason={"type": "success"}, detail=None)
        assert finished.status_code == 204
    assert fake.post("/sessions/other/finish", reason={"type": "success"}, detail=None).status_code == 404
    assert fake.post("/session_heartbeat", session_id=session_id).status_code == 410
    refused = [
        fake.post("/create_model", session_id=session_id, model_seq_id=0, base_model="tiny", lora_config={"rank": 8}),
        fake.post("/create_sampling_session", session_id=session_id, sampling_session_seq_id=1, base_model="tiny"),
        fake.sample(sampler_id, 1),
        fake.post("/load_weights", session_id=session_id, model_seq_id=1, path="tinker://a/weights/b", optimizer=True),
    ]
    assert [answer.status_code for answer in refused] == [403] * 4
    assert all("finished" in answer.json()["detail"] for answer in refused)


def test_007_closing_a_client_finishes_its_session_once(fake: Running, wire: Wire) -> None:
    client = tinker.ServiceClient(base_url=fake.url, api_key=KEY)
    session_id = client.holder.get_session_id()
    with wire.recording() as requests:
        client.close("success", "all done").result()
        client.close("errored").result()
    (finish,) = requests()
    assert finish.path == f"/sessions/{session_id}/finish" and finish.status in (200, 204)
    assert finish.json() == {"reason": {"type": "success"}, "detail": "all done"}

    with (
        wire.recording() as requests,
        pytest.raises(KeyError),
        tinker.ServiceClient(base_url=fake.url, api_key=KEY) as client,
    ):
        client.holder.get_session_id()
        raise KeyError
    assert requests()[-1].json()["reason"] == {"type": "errored"}


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_009_capabilities_name_the_served_models(fake: Running, client: tinker.ServiceClient) -> None:
    rest = tinker.RestClient(base_url=fake.url, api_key=KEY)

    async def ask() -> list[types.GetServerCapabilitiesResponse]:
        return [await client.get_server_capabilities_async(), await rest.get_server_capabilities()]

    answers = [
        client.get_server_capabilities(),
        rest.get_server_capabilities().result(),
        *asyncio.run(ask()),
    ]
    for answer in answers:
        (model,) = answer.supported_models
        assert (model.model_name, model.max_context_length) == ("tiny", 128)
        assert (model.trainable, model.sampleable) == (True, True)


def test_010_the_accessibility_check_is_one_get(fake: Running, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", fake.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-check")
    start = len(wire.requests)
    raise_if_tinker_not_accessible()
    mine = [one for one in wire.requests[start:] if is_of("tml-check", one)]
    gets = [(one.path, one.status) for one in mine if one.method == "GET"]
    assert gets == [("/get_server_capabilities", 200)]
    assert "/create_session" not in paths(mine)


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_011_rest_and_admin_clients_open_no_session(fake: Running, wire: Wire) -> None:
    sessions = tinker.RestClient(base_url=fake.url, api_key=KEY).list_sessions(limit=1000).result().sessions
    for key, make in (
        ("tml-service", lambda: tinker.ServiceClient(base_url=fake.url, api_key="tml-service").create_rest_client()),
        ("tml-rest", lambda: tinker.RestClient(base_url=fake.url, api_key="tml-rest")),
        ("tml-admin", lambda: tinker.AdminClient(base_url=fake.url, api_key="tml-admin")),
    ):
        start = len(wire.requests)
        client = make()
        if isinstance(client, tinker.RestClient):
            client.list_sessions().result()
        else:
            client.get_current_checkpoint_storage_usage().result()
        mine = [one.path for one in wire.requests[start:] if is_of(key, one)]
        assert mine[:3] == ["/client/config", "/auth/token", "/client/dynamic_config"]
        assert len([path for path in mine[3:] if path != "/telemetry"]) == 1
    assert tinker.RestClient(base_url=fake.url, api_key=KEY).list_sessions(limit=1000).result().sessions == sessions


def test_012_addresses_and_handles_cost_no_request(
    fake: Running, wire: Wire, client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    rest = tinker.RestClient(base_url=fake.url, api_key=KEY)
    with wire.recording() as requests:
        assert training.model_id in training.get_console_url()
        assert client.holder.get_session_id() in client.get_console_url()
        for one in (client, training, sampler, rest):
            one.get_telemetry()
        assert client.holder is not None and training.holder is client.holder
    assert requests() == []


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_013_telemetry_is_accepted_at_once_and_logged_without_keys(
    fake: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tinker_server")
    event = {"event": "GENERIC_EVENT", "event_data": {"headers": "x-api-key: tml-secret-1"}}
    began = time.monotonic()
    answer = fake.post("/telemetry", session_id="s", events=[event] * 100, platform="", sdk_version="0.38.0")
    assert answer.status_code == 200 and answer.json() == {"status": "accepted"}
    assert time.monotonic() - began < 5
    assert "[key]" in caplog.text and "secret" not in caplog.text


def test_013_the_sdks_own_telemetry_is_accepted(fake: Running, wire: Wire) -> None:
    start = len(wire.requests)
    with tinker.ServiceClient(base_url=fake.url, api_key="tml-telemetry") as client:
        client.holder.get_session_id()
    sent = [one for one in wire.requests[start:] if one.path == "/telemetry"]
    mine = [one for one in sent if is_of("tml-telemetry", one)]
    assert mine and all(one.status == 200 for one in mine)
    assert next(event["event"] for one in mine for event in one.json()["events"]) == "SESSION_START"


def test_014_whoami_names_the_keys_owner_and_asks_nothing_more(fake: Running, wire: Wire) -> None:
    rest = tinker.RestClient(base_url=fake.url, api_key=KEY)
    rest.list_sessions().result()
    with wire.recording() as requests:
        identity = rest.whoami().result()
    assert (identity.user_urn, identity.org_urn) == (
        "tml:organization_user:local",
        "tml:organization:tinker-server",
    )
    assert identity.email is None and requests() == []
