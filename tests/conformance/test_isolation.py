"""Owners and their keys: whatever is another's looks as if it were not there (items 3, 25, 55, 99).

pytest tests/conformance/test_isolation.py
"""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from fastapi.routing import APIRoute
from tinker import types

from tests.factories import present
from tests.fake_server import Running, datum
from tinker_server.auth import keys

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
OPEN_TO_ALL = {
    "/healthz",
    "/files/{path}",
    "/archives/{directory}",
    "/traces/{session_id}",
    "/uploads/{upload_id}/{name}",
}
"""Health, and what signed links open."""
OF_NOBODY = {
    "/client/config",
    "/client/dynamic_config",
    "/telemetry",
    "/get_server_capabilities",
    "/create_session",
    "/external_weights_upload_start",
    "/auth/apikey/me",
    "/auth/token",
    "/audit",
    "/billing/usage/events",
    "/billing/usage/checkpoints/current",
    "/training_runs",
    "/checkpoints",
    "/checkpoints/search",
    "/sessions",
    "/sessions/search",
}
"""Routes that name nothing of an owner; the lists are tested by themselves."""
OF_ADMINISTRATORS = "/admin/"
"""Beginning of the routes that no owner has (tests/contract/test_administrators.py)."""


class Guarded(Running):
    """A server with the keys of two owners."""

    def __init__(self, data_dir: Path) -> None:
        self.keys = {name: keys.add(data_dir / "keys", name) for name in ("alice", "bob")}
        super().__init__(data_dir)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    running = Guarded(tmp_path_factory.mktemp("isolation"))
    yield running
    running.stop()


def service(server: Guarded, name: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=server.keys[name])


def rest(server: Guarded, name: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.keys[name])


def http(server: Guarded, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/api/v1", timeout=20, headers={"X-API-Key": key})


class Mine:
    """Something of everything, made by alice."""

    def __init__(self, server: Guarded) -> None:
        self.client = service(server, "alice").create_lora_training_client("tiny", rank=8).result()
        self.model_id = self.client.model_id
        self.client.forward_backward([datum(3)], "cross_entropy").result()
        self.client.optim_step(types.AdamParams()).result()
        self.path = self.client.save_state("kept").result().path
        self.exported = self.client.save_weights_external("out").result().path
        sampler = self.client.save_weights_and_get_sampling_client().result()
        sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
        self.session_id = self.model_id.partition(":")[0]
        with http(server, server.keys["alice"]) as alice:
            found = alice.get(f"/sessions/{self.session_id}").json()
            self.sampler_id = found["sampler_ids"][0]
            started = alice.post(
                "/external_weights_upload_start", json={"base_model": "tiny", "lora_config": {"rank": 8}}
            )
            self.upload_id = started.json()["upload_id"]
            body = {"model_id": self.model_id, "seq_id": 100, "type": "optim_step"}
            self.request_id = alice.post("/optim_step", json=body).json()["request_id"]


@pytest.fixture(scope="module")
def mine(server: Guarded) -> Mine:
    return Mine(server)


def test_003_a_wrong_or_missing_key_is_401_at_construction(server: Guarded) -> None:
    with pytest.raises(tinker.AuthenticationError) as caught:
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").create_lora_training_client(
            "tiny", rank=8
        ).result()
    assert caught.value.status_code == 401 and "not known" in str(caught.value)
    for headers in ({}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": ""}):
        answer = httpx.post(f"{server.url}/api/v1/client/config", json={"sdk_version": "0.38.0"}, headers=headers)
        assert answer.status_code == 401 and int(answer.headers["content-length"]) > 0


def test_003_every_route_but_health_and_signed_links_asks_for_a_key(server: Guarded) -> None:
    asked = 0
    for path, method in routes(server):
        answer = httpx.request(method, f"{server.url}/api/v1{path.replace('{', '').replace('}', '')}")
        if path in OPEN_TO_ALL:
            assert answer.status_code in (200, 422), path
        else:
            assert answer.status_code == 401, (path, answer.text)
            asked += 1
    assert asked > 40


def test_055_nothing_of_another_owner_can_be_named(server: Guarded, mine: Mine) -> None:
    tried = set()
    with http(server, server.keys["bob"]) as bob:
        for method, route, path, body in foreign_requests(mine):
            answer = bob.request(method, path, json=body)
            assert answer.status_code == 404, (route, answer.status_code, answer.text)
            tried.add((route, method))
    everything = {(path, method) for path, method in routes(server) if path not in OPEN_TO_ALL | OF_NOBODY}
    assert tried == {one for one in everything if not one[0].startswith(OF_ADMINISTRATORS)}


def test_055_the_owner_can_name_all_of_it(server: Guarded, mine: Mine) -> None:
    """So that the 404s above are of ownership, not of a mistake in the requests."""
    destructive = {"/sessions/{session_id}/finish", "/unload_model"}
    with http(server, server.keys["alice"]) as alice:
        for method, route, path, body in foreign_requests(mine):
            if route not in destructive and method != "DELETE" and not route.endswith("/publish"):
                answer = alice.request(method, path, json=body)
                assert answer.status_code != 404, (route, answer.text)


def foreign_requests(mine: Mine) -> list[tuple[str, str, str, dict[str, object] | None]]:
    """Method, route, path and body of a request for each thing of alice's."""
    run, session = f"/training_runs/{mine.model_id}", f"/sessions/{mine.session_id}"
    saved, exported = f"{run}/checkpoints/weights/kept", f"{run}/checkpoints/external_weights/out"
    model = {"model_id": mine.model_id, "seq_id": 200}
    data = [
        {
            "model_input": {"chunks": [{"tokens": [1]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [2], "dtype": "int64"}},
        }
    ]
    work = {"data": data, "loss_fn": "cross_entropy"}
    in_session = {"session_id": mine.session_id, "model_seq_id": 7}
    prompt = {"chunks": [{"tokens": [1]}]}
    sample = {"prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 1}}
    target = {"type": "sampling_session", "sampling_session_id": mine.sampler_id, "cloned_sampler_id": 0}
    posts: list[tuple[str, dict[str, object]]] = [
        ("/session_heartbeat", {"session_id": mine.session_id}),
        ("/create_model", {**in_session, "base_model": "tiny", "lora_config": {"rank": 8}}),
        ("/get_info", {"model_id": mine.model_id}),
        ("/forward_backward", {**model, "forward_backward_input": work}),
        ("/forward", {**model, "forward_input": work}),
        ("/optim_step", model),
        ("/unload_model", {"model_id": mine.model_id}),
        ("/save_weights", {**model, "path": "a"}),
        ("/save_weights_for_sampler", {**model, "path": "a"}),
        ("/save_weights_external", {**model, "path": "a"}),
        ("/load_weights", {**model, "path": mine.path, "optimizer": False}),
        (
            "/create_sampling_session",
            {"session_id": mine.session_id, "sampling_session_seq_id": 9, "base_model": "tiny"},
        ),
        ("/join_sampling_session", {"sampling_session_id": mine.sampler_id}),
        ("/asample", {**sample, "sampling_session_id": mine.sampler_id, "seq_id": 5}),
        ("/retrieve_future", {"request_id": mine.request_id}),
        ("/retrieve_futures", {"target": target, "prev_cursor": 0, "timeout": 0, "retrieved_request_ids": []}),
        ("/cancel_future", {"request_id": mine.request_id}),
        ("/weights_info", {"tinker_path": mine.path}),
        ("/copy_weights", {"source_path": mine.path, "destination_project_id": "p"}),
        ("/external_weights_upload_finish", {"upload_id": mine.upload_id}),
    ]
    return [
        *[("POST", path, path, body) for path, body in posts],
        ("GET", "/samplers/{sampler_id}", f"/samplers/{mine.sampler_id}", None),
        ("GET", "/training_runs/{run_id}", run, None),
        ("POST", "/training_runs/{run_id}/metrics", f"{run}/metrics", {"step": 1, "metrics": {"reward": 0.5}}),
        ("GET", "/training_runs/{run_id}/checkpoints", f"{run}/checkpoints", None),
        ("POST", "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", f"{saved}/publish", None),
        ("DELETE", "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish", f"{saved}/publish", None),
        ("PUT", "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", f"{saved}/ttl", {"ttl_seconds": None}),
        (
            "GET",
            "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
            f"{exported}/external_weights_urls",
            None,
        ),
        ("GET", "/training_runs/{run_id}/checkpoints/{kind}/{name}/archive", f"{saved}/archive", None),
        ("DELETE", "/training_runs/{run_id}/checkpoints/{kind}/{name}", saved, None),
        ("GET", "/sessions/{session_id}", session, None),
        ("PUT", "/sessions/{session_id}/project", f"{session}/project", {"project_id": "stolen"}),
        ("GET", "/sessions/{session_id}/trace_export", f"{session}/trace_export", None),
        ("POST", "/sessions/{session_id}/finish", f"{session}/finish", {"reason": {"type": "success"}}),
    ]


def routes(server: Guarded) -> list[tuple[str, str]]:
    """Path below /api/v1 and method of every route."""
    prefix = "/api/v1"
    return [
        (route.path.removeprefix(prefix).replace(":path", ""), method)
        for route in server.app.routes
        if isinstance(route, APIRoute) and route.path.startswith(prefix)
        for method in route.methods
    ]


def test_055_lists_and_records_show_ones_own_only(server: Guarded, mine: Mine) -> None:
    bob = rest(server, "bob")
    assert bob.list_training_runs().result().training_runs == []
    assert bob.list_user_checkpoints().result().checkpoints == []
    assert bob.list_sessions().result().sessions == []
    alice = rest(server, "alice")
    assert mine.model_id in [run.training_run_id for run in alice.list_training_runs().result().training_runs]
    assert alice.get_training_run(mine.model_id).result().model_owner == "tml:organization_user:alice"
    with http(server, server.keys["bob"]) as client:
        assert client.post("/sessions/search", json={}).json()["sessions"] == []
        assert client.get("/audit").json()["entries"] == []
        assert client.get("/billing/usage/checkpoints/current").json()["data"] == []
        period = {"starting_on": "2020-01-01T00:00:00Z", "ending_before": "2100-01-01T00:00:00Z"}
        assert client.get("/billing/usage/events", params=period).json()["data"] == []
        assert client.get("/auth/apikey/me").json()["name"] == "bob"


def test_055_a_repeated_key_of_another_owner_makes_a_session_of_ones_own(server: Guarded) -> None:
    made = []
    for name in ("alice", "bob"):
        with http(server, server.keys[name]) as client:
            answer = client.post("/create_session", json={}, headers={"X-Idempotency-Key": "the same"})
            made.append(answer.json()["session_id"])
    assert made[0] != made[1]


def test_025_and_099_published_weights_are_readable_by_all_and_writable_by_their_owner(
    server: Guarded, mine: Mine
) -> None:
    bob, alice, service_of_bob = rest(server, "bob"), rest(server, "alice"), service(server, "bob")
    with pytest.raises(tinker.RequestFailedError, match="has no weights named 'kept'") as caught:
        service_of_bob.create_training_client_from_state(mine.path).result()
    assert caught.value.category.value == "user"
    alice.publish_checkpoint_from_tinker_path(mine.path).result()
    try:
        client = service_of_bob.create_training_client_from_state_with_optimizer(mine.path).result()
        assert present(client.optim_step(types.AdamParams()).result().metrics)["step"] == 2
        sampler = service_of_bob.create_sampling_client(model_path=mine.path).result()
        sampled = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
        assert sampled.sequences[0].tokens == [1]
        assert bob.get_weights_info_by_tinker_path(mine.path).result().base_model == "tiny"
        owned = bob.list_user_checkpoints().result().checkpoints
        assert mine.path not in [one.tinker_path for one in owned]
        with http(server, server.keys["bob"]) as raw:
            accessible = raw.get("/checkpoints", params={"access_scope": "accessible"}).json()["checkpoints"]
            assert mine.path in [one["tinker_path"] for one in accessible]
            assert all(one["public"] for one in accessible if one["tinker_path"].split("/")[2] == mine.model_id)
            urn = "tml:organization_user:alice"
            runs = raw.get("/training_runs", params={"access_scope": "accessible"}).json()["training_runs"]
            assert [run["model_owner"] for run in runs if run["training_run_id"] == mine.model_id] == [urn]
            run = f"/training_runs/{mine.model_id}"
            assert raw.get(run).status_code == 404
            assert raw.get(run, params={"access_scope": "accessible"}).status_code == 200
            for method, path in (("DELETE", ""), ("DELETE", "/publish"), ("PUT", "/ttl")):
                url = f"{run}/checkpoints/weights/kept{path}"
                body = {"ttl_seconds": 7200} if path == "/ttl" else None
                assert raw.request(method, url, json=body).status_code == 404
            copied = raw.post("/copy_weights", json={"source_path": mine.path, "destination_project_id": "mine"})
            copy = copied.json()["tinker_path"]
    finally:
        alice.unpublish_checkpoint_from_tinker_path(mine.path).result()
    assert copy in [one.tinker_path for one in bob.list_user_checkpoints().result().checkpoints]
    with pytest.raises(tinker.NotFoundError):
        alice.get_weights_info_by_tinker_path(copy).result()
    with pytest.raises(tinker.NotFoundError):
        bob.get_weights_info_by_tinker_path(mine.path).result()


def test_024_a_key_of_the_owner_opens_private_weights(server: Guarded, mine: Mine) -> None:
    bob = service(server, "bob")
    key = server.keys["alice"]
    client = bob.create_training_client_from_state_with_optimizer(mine.path, weights_access_token=key).result()
    assert present(client.optim_step(types.AdamParams()).result().metrics)["step"] == 2
    with pytest.raises(tinker.RequestFailedError, match="weights_access_token is not an API key"):
        bob.create_training_client_from_state(mine.path, weights_access_token="tml-other").result()


def test_024_a_key_that_was_handed_on_is_in_no_file(server: Guarded, mine: Mine) -> None:
    key = keys.add(server.settings.resolve_keys_file(), "alice")
    time.sleep(keys.RELOAD_S)
    service(server, "bob").create_training_client_from_state(mine.path, weights_access_token=key).result()
    with pytest.raises(tinker.RequestFailedError, match="weights_access_token is not an API key"):
        service(server, "bob").create_training_client_from_state(mine.path, weights_access_token="opens:alice").result()
    files = [path for path in server.settings.data_dir.rglob("*") if path.is_file()]
    assert files and not [path for path in files if key.encode() in path.read_bytes()]


def test_102_signed_links_work_without_a_key(server: Guarded, mine: Mine) -> None:
    urls = rest(server, "alice").get_external_weights_urls(mine.exported).result().urls
    assert urls and all(httpx.get(url).status_code == 200 for url in urls.values())


def test_014_the_sdk_gets_another_token_when_its_own_is_not_accepted(
    server: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = rest(server, "alice")
    assert client.whoami().result().user_urn == "tml:organization_user:alice"
    monkeypatch.setattr(server.app.state.services.tokens, "_secret", b"of another data directory")
    client.list_sessions().result()


def test_003_a_wrong_token_is_401_and_a_token_gets_no_other(server: Guarded) -> None:
    with http(server, server.keys["alice"]) as client:
        token = client.post("/auth/token", json={}).json()["jwt"]
    with http(server, token) as client:
        assert client.get("/auth/apikey/me").json()["name"] == "alice"
        assert client.post("/auth/token", json={}).status_code == 401
    with http(server, token + "x") as client:
        refused = client.get("/auth/apikey/me")
    assert refused.status_code == 401 and 'error="invalid_token"' in refused.headers["www-authenticate"]


def test_108_a_token_gives_up_its_key(server: Guarded) -> None:
    key = keys.add(server.settings.resolve_keys_file(), "bob")
    time.sleep(keys.RELOAD_S)
    with http(server, key) as client:
        token = client.post("/auth/token", json={}).json()["jwt"]
    with http(server, token) as client:
        assert client.delete("/auth/apikey/me").status_code == 204
    for sent in (key, token):
        with http(server, sent) as client:
            assert client.get("/auth/apikey/me").status_code == 401


def test_108_giving_a_key_up_ends_it_and_not_its_owner(server: Guarded) -> None:
    key = keys.add(server.settings.resolve_keys_file(), "bob")
    time.sleep(keys.RELOAD_S)
    with http(server, key) as client:
        assert client.get("/auth/apikey/me").json()["name"] == "bob"
        assert client.delete("/auth/apikey/me").status_code == 204
        assert client.get("/auth/apikey/me").status_code == 401
    assert Path(server.settings.resolve_keys_file()).read_text().count("bob ") == 1
