"""Keys with the role of an administrator or a narrow scope, and what no other key may do.

pytest tests/contract/test_administrators.py
"""

import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from fastapi.routing import APIRoute
from tinker import types

from tests.dashboard import PROTOBUF, Owner
from tests.fake_server import Running, forward_backward_body
from tests.fakes import SIZE_BYTES
from tinker_server.__main__ import main
from tinker_server.auth import keys
from tinker_server.dashboard.pages import owners, runs
from tinker_server.web.gate import FINISH, OWN_KEY, SAMPLING, SAMPLING_BELOW

API = "/api/v1"


class House:
    """A server, two owners, an administrator, and keys of a narrow scope."""

    def __init__(self, folder: Path) -> None:
        file = folder / "keys"
        self.alice_key, self.bob_key = (keys.add(file, name) for name in ("alice", "bob"))
        self.root_key = keys.add(file, "root", is_admin=True)
        self.sample_key = keys.add(file, "alice", scope="sample")
        self.metrics_key = keys.add(file, "prometheus", scope="metrics")
        self.server = Running(folder / "data", keys_file=file)
        self.alice, self.bob = Owner(self.server, self.alice_key), Owner(self.server, self.bob_key)

    def ask(self, key: str, method: str, path: str, **body: Any) -> httpx.Response:
        url = f"{self.server.url}{API}{path}"
        return httpx.request(method, url, json=body or None, headers={"x-api-key": key}, timeout=30)

    def owners(self) -> dict[str, dict[str, Any]]:
        found = self.ask(self.root_key, "GET", "/admin/owners").json()["owners"]
        return {one["owner"]: one for one in found}

    def runs(self, **query: str) -> dict[str, dict[str, Any]]:
        headers = {"x-api-key": self.root_key}
        found = httpx.get(f"{self.server.url}{API}/admin/runs", params=query, headers=headers, timeout=30).json()
        return {one["run_id"]: one for one in found["runs"]}

    def submit(self, key: str, run_id: str, seq_id: int) -> str:
        headers = {**PROTOBUF, "x-api-key": key}
        body = forward_backward_body(run_id, seq_id)
        answer = self.server.http.post("/forward_backward", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def result(self, key: str, request_id: str) -> dict[str, Any]:
        headers = {"accept": "application/json"}
        while True:
            url = f"{self.server.url}{API}/retrieve_future"
            answer = httpx.post(url, json={"request_id": request_id}, headers={**headers, "x-api-key": key}, timeout=30)
            if answer.status_code != 408:
                return dict(answer.json())


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("house"))
    with made.alice, made.bob:
        yield made
    made.server.stop()


def routes(house: House) -> list[tuple[str, str]]:
    """Method of every route that needs a key, and its path below the API."""
    return [
        (method, route.path.removeprefix(API))
        for route in house.server.app.routes
        if isinstance(route, APIRoute) and route.path.startswith(API)
        for method in route.methods
        if not route.path.removeprefix(API).startswith(("/healthz", "/files/", "/archives/", "/traces/", "/uploads/"))
    ]


def test_no_owner_may_use_any_route_of_administrators(house: House) -> None:
    run_id = house.alice.new_run()
    of_admins = [(method, path) for method, path in routes(house) if path.startswith("/admin/")]
    assert len(of_admins) == 5
    for key in (house.bob_key, house.alice_key):
        for method, path in of_admins:
            body = {"run_id": run_id} if method == "POST" else {}
            answer = house.ask(key, method, path, **body)
            assert (answer.status_code, answer.json()["error"]) == (403, "AdministratorsOnly"), path
            assert "keys add NAME --admin" in answer.text and "root" not in answer.text
    assert house.runs()[run_id]["place"] == "memory"


def test_without_keys_nobody_is_an_administrator(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    try:
        answer = server.http.get("/admin/owners")
        assert (answer.status_code, answer.json()["error"]) == (403, "AdministratorsOnly")
    finally:
        server.stop()


def test_an_administrator_sees_the_names_that_owners_gave_their_runs(house: House) -> None:
    named = house.alice.new_run({"name": "<b>colours</b>"})
    assert house.runs()[named]["name"] == "<b>colours</b>"
    with Owner(house.server, house.root_key) as root:
        page = root.sign_in().get("/owners").text
    assert f'title="{named}">&lt;b&gt;colours&lt;/b&gt;<small>{named[:8]}:train:0</small>' in page
    assert "Stop run &lt;b&gt;colours&lt;/b&gt; (alice)" in page


def test_an_administrator_sees_what_each_owner_has_and_uses(house: House) -> None:
    before = house.owners()
    run_id = house.alice.new_run()
    house.alice.train(run_id, range(2))
    house.alice.save(run_id, 5, "kept")
    house.bob.sample(tokens=(1, 2))
    after = house.owners()
    alice, bob = after["alice"], after["bob"]
    assert alice["memory_bytes"] - before["alice"]["memory_bytes"] == SIZE_BYTES and bob["memory_bytes"] == 0
    assert alice["runs_in_memory"] == before["alice"]["runs_in_memory"] + 1 and bob["runs_in_memory"] == 0
    assert alice["disk_bytes"] > before["alice"]["disk_bytes"]
    assert 0 < bob["disk_bytes"] < 100, "the result of its sample"
    assert alice["tokens"]["training"] == before["alice"]["tokens"]["training"] + 2
    assert bob["tokens"]["sampled"] > before["bob"]["tokens"]["sampled"] and bob["tokens"]["training"] == 0
    assert (alice["keys"], after["prometheus"]["keys"]) == (2, 1)
    run = house.runs()[run_id]
    assert (run["owner"], run["place"], run["steps"], run["tokens"]) == ("alice", "memory", 2, 2)
    assert run["memory_bytes"] == SIZE_BYTES and run["lora_rank"] == 8 and run["name"] == ""
    assert run_id in house.runs(owner="alice") and house.runs(owner="bob") == {}
    assert list(house.runs(limit="1")) == [run_id], "the newest is the first"


def test_an_unloaded_run_goes_to_disk_and_comes_back_with_its_next_operation(house: House) -> None:
    run_id = house.alice.new_run()
    house.alice.train(run_id, range(2))
    held = house.owners()["alice"]["memory_bytes"]
    assert house.ask(house.root_key, "POST", "/admin/unload", run_id=run_id).status_code == 204
    assert run_id not in house.server.backend.tiny.trainer.steps
    assert (house.runs()[run_id]["place"], house.runs()[run_id]["memory_bytes"]) == ("disk", 0)
    assert house.owners()["alice"]["memory_bytes"] == held - SIZE_BYTES
    house.alice.train(run_id, range(2, 3))
    assert house.server.backend.tiny.trainer.steps[run_id] == 3 and house.runs()[run_id]["place"] == "memory"
    unknown = house.ask(house.root_key, "POST", "/admin/unload", run_id="nothing")
    assert unknown.status_code == 404 and "no model has the id 'nothing'" in unknown.text
    noted = house.ask(house.alice_key, "GET", "/audit").json()["entries"][-1]
    assert noted["event"] == "run_unloaded" and noted["event_details"]["by"] == "root"


def test_a_stopped_run_takes_nothing_more_and_nobody_elses_is_touched(house: House) -> None:
    trainer = house.server.backend.tiny.trainer
    stopped, others = house.alice.new_run(), house.bob.new_run()
    house.server.set_gate(trainer.gates["cross_entropy"], is_open=False)
    try:
        running, *waiting = [house.submit(house.alice_key, stopped, seq_id) for seq_id in (1, 2, 3)]
        theirs = [house.submit(house.bob_key, others, seq_id) for seq_id in (1, 2)]  # one runs, and one waits
        while trainer.begun[stopped] == 0:
            time.sleep(0.01)
        answers: list[httpx.Response] = []
        body = {"run_id": stopped, "reason": "the GPUs are needed"}
        asking = threading.Thread(
            target=lambda: answers.append(house.ask(house.root_key, "POST", "/admin/stop", **body))
        )
        asking.start()
        said = "stopped by the administrator root: the GPUs are needed"
        for request_id in waiting:
            failed = house.result(house.alice_key, request_id)
            assert said in failed["error"] and failed["category"] == "user"
        refused = house.ask(house.alice_key, "POST", "/optim_step", model_id=stopped, seq_id=4)
        assert refused.status_code == 403 and said in refused.text
    finally:
        house.server.set_gate(trainer.gates["cross_entropy"], is_open=True)
    asking.join(30)
    assert answers[0].json() == {"run_ids": [stopped], "cancelled": 2}
    assert "loss_fn_outputs" in house.result(house.alice_key, running), "it ended as it would have"
    assert all("loss_fn_outputs" in house.result(house.bob_key, request_id) for request_id in theirs)
    assert stopped not in trainer.steps and others in trainer.steps
    assert house.runs()[stopped]["place"] == "ended" and house.runs()[others]["place"] == "memory"
    house.bob.post("/optim_step", model_id=others, seq_id=3, adam_params={"learning_rate": 0.25})
    assert trainer.steps[others] == 1


def test_a_stop_ends_the_samples_of_the_session_and_no_others(house: House) -> None:
    gate = house.server.backend.tiny.sampler.gate
    run_id = house.alice.new_run()
    session_id = run_id.partition(":")[0]
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    sample = {"prompt": prompt, "sampling_params": {"max_tokens": 1}}
    client = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler_id = house.ask(house.alice_key, "POST", "/create_sampling_session", **client).json()["sampling_session_id"]
    house.server.set_gate(gate, is_open=False)
    try:
        named = {**sample, "sampling_session_id": sampler_id, "seq_id": 0}
        ours = house.ask(house.alice_key, "POST", "/asample", **named).json()["request_id"]
        other = house.ask(house.alice_key, "POST", "/asample", **sample, base_model="tiny").json()["request_id"]
        answer = house.ask(house.root_key, "POST", "/admin/stop", run_id=run_id)
        assert answer.json() == {"run_ids": [run_id], "cancelled": 1}
        assert "stopped by the administrator root" in house.result(house.alice_key, ours)["error"]
    finally:
        house.server.set_gate(gate, is_open=True)
    assert house.result(house.alice_key, other)["sequences"]


def test_a_key_of_the_scope_sample_samples_and_does_nothing_else(house: House) -> None:
    run_id = house.alice.new_run()
    service = tinker.ServiceClient(base_url=house.server.url, api_key=house.sample_key)
    client = service.create_sampling_client(base_model="tiny").result()
    sampled = client.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
    assert len(sampled.sequences[0].tokens) == 1
    url, chat = f"{house.server.url}/v1/chat/completions", {"model": "tiny", "messages": []}
    messages = [{"role": "user", "content": "Hello"}]
    answer = httpx.post(url, json=chat | {"messages": messages}, headers={"x-api-key": house.sample_key}, timeout=30)
    assert answer.status_code == 200, answer.text
    refused = 0
    for method, path in routes(house):
        name = path.removeprefix("/")
        if name == OWN_KEY:
            continue
        answer = house.ask(house.sample_key, method, path.replace("{run_id}", run_id))
        if name in SAMPLING or name.startswith(SAMPLING_BELOW) or FINISH.fullmatch(name):
            assert answer.status_code != 403, path
        else:
            assert (answer.status_code, answer.json()["error"]) == (403, "ScopeRefused"), path
            assert "of alice has the scope sample: it is for sampling and the chat endpoints, not" in answer.text
            refused += 1
    assert refused > 20 and house.ask(house.sample_key, "GET", f"/{OWN_KEY}").json()["name"] == "alice"
    for name in ("forward_backward", "save_weights", "copy_weights", "admin/stop"):
        assert name not in SAMPLING


def test_a_key_of_the_scope_sample_finishes_its_session_and_none_that_trains(house: House) -> None:
    with tinker.ServiceClient(base_url=house.server.url, api_key=house.sample_key) as service:
        service.create_sampling_client(base_model="tiny").result()
    trains = house.alice.new_run().partition(":")[0]
    answer = house.ask(house.sample_key, "POST", f"/sessions/{trains}/finish", reason={"type": "success"})
    assert (answer.status_code, answer.json()["error"]) == (403, "ScopeRefused")
    assert "may finish no session with models" in answer.text


def test_a_key_of_the_scope_sample_reads_results_of_samples_alone(house: House) -> None:
    run_id = house.alice.new_run()
    step = house.ask(house.alice_key, "POST", "/optim_step", model_id=run_id, seq_id=1, adam_params={}).json()
    narrow = house.ask(house.sample_key, "POST", "/retrieve_future", request_id=step["request_id"])
    assert (narrow.status_code, narrow.json()["error"]) == (404, "UnknownFuture")
    assert house.ask(house.alice_key, "POST", "/retrieve_future", request_id=step["request_id"]).status_code == 200
    assert house.ask(house.sample_key, "POST", "/retrieve_future", request_id=step["request_id"]).status_code == 404


def test_a_key_of_the_scope_metrics_reads_metrics_and_does_nothing_else(house: House) -> None:
    headers = {"x-api-key": house.metrics_key}
    assert httpx.get(f"{house.server.url}/metrics", headers=headers).status_code == 200
    narrow = keys.add(house.server.settings.resolve_keys_file(), "alice", scope="sample")
    time.sleep(keys.RELOAD_S)
    answer = httpx.get(f"{house.server.url}/metrics", headers={"x-api-key": narrow})
    assert (answer.status_code, answer.json()["error"]) == (403, "ScopeRefused")
    for method, path in routes(house):
        if path.removeprefix("/") != OWN_KEY:
            answer = house.ask(house.metrics_key, method, path)
            assert (answer.status_code, answer.json()["error"]) == (403, "ScopeRefused"), path
            assert "it is for /metrics, not" in answer.text
    for path in ("/v1/models", "/anthropic/api/v1/messages"):
        answer = httpx.get(house.server.url + path, headers=headers)
        assert answer.status_code == 403 and "scope metrics" in answer.text


@pytest.mark.parametrize(("scope", "acts"), [("sample", "sample."), ("metrics", "read metrics.")])
def test_a_key_of_a_narrow_scope_does_not_sign_in(house: House, scope: Any, acts: str) -> None:
    key = keys.add(house.server.settings.resolve_keys_file(), "alice", scope=scope)
    time.sleep(keys.RELOAD_S)
    answer = httpx.post(f"{house.server.url}/login", data={"key": key})
    assert answer.status_code == 403 and f"This key may only {acts}" in answer.text
    assert "set-cookie" not in answer.headers


def test_an_administrator_sees_all_keys_and_their_last_use(house: House) -> None:
    found = house.ask(house.root_key, "GET", "/admin/keys").json()["keys"]
    root = next(one for one in found if one["owner"] == "root")
    assert root["is_admin"] and root["scope"] == "all" and root["created_at"] and root["used_at"]
    known = keys.read(house.server.settings.resolve_keys_file())
    assert {one["key_id"] for one in found} == {key.id for key in known.values()}
    assert house.root_key not in str(found) and not any(key.hashed in str(found) for key in known.values())


def test_the_command_line_lists_unloads_and_stops_with_an_administrators_key_alone(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str, key: str = house.root_key) -> tuple[int, str, str]:
        words = ["tinker-server", "admin", *arguments, "--url", house.server.url, "--key", key]
        monkeypatch.setattr(sys, "argv", words)
        code = main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    run_id = house.alice.new_run({"name": "red\x1b[31m"})
    code, listed, _ = run("owners")
    assert code == 0 and all(name in listed for name in ("alice", "bob", "prometheus", "tokens since"))
    code, listed, _ = run("runs", "--owner", "alice")
    assert code == 0 and run_id in listed and "memory" in listed and "\x1b" not in listed
    for words in (["owners"], ["runs"], ["unload", run_id], ["stop", run_id]):
        code, _, said = run(*words, key=house.bob_key)
        assert code == 2 and "answers 403" in said
    assert run("unload", run_id)[:2] == (0, f"{run_id} is on disk; its next operation brings it back\n")
    assert house.runs()[run_id]["place"] == "disk"
    assert run("stop", run_id, "--reason", "spent")[:2] == (0, f"stopped {run_id}; 0 operations were cancelled\n")
    assert house.runs()[run_id]["place"] == "ended"
    assert "no model has the id" in run("stop", "nothing")[2]


def test_the_page_of_owners_is_there_for_administrators_alone_and_unloads_and_stops(house: House) -> None:
    run_id = house.alice.new_run()
    with Owner(house.server, house.bob_key).sign_in() as bob:
        assert 'href="/owners"' not in bob.get("/").text
        for path in ("/owners", "/owners/now"):
            answer = bob.get(path)
            assert answer.status_code == 404 and "alice" not in answer.text
        for action in ("unload", "stop"):
            assert bob.change("POST", f"/owners/runs/{run_id}/{action}").status_code == 404
    assert house.runs()[run_id]["place"] == "memory"
    with Owner(house.server, house.root_key).sign_in() as root:
        assert 'href="/owners"' in root.get("/").text
        assert root.get("/keys/some-id").headers["location"] == "/owners"
        shown = root.get("/owners").text
        assert all(text in shown for text in (run_id, "alice", "prometheus", "3.0 MiB", "administrator"))
        assert root.get(f"/runs/{run_id}").status_code == 404, "the run's own page stays its owner's"
        assert root.pages.post(f"/owners/runs/{run_id}/stop").status_code == 403, "without the page's token"
        assert root.change("POST", f"/owners/runs/{run_id}/unload").status_code == 200
        assert house.runs()[run_id]["place"] == "disk"
        assert root.change("POST", f"/owners/runs/{run_id}/stop").status_code == 200
    assert house.runs()[run_id]["place"] == "ended"


def test_a_stop_on_the_page_of_owners_stays_on_its_page_of_runs_and_no_page_is_beyond_the_last(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (owners, runs):
        monkeypatch.setattr(module, "PER_PAGE", 2)
    third = [house.alice.new_run() for _ in range(4)][1]
    with Owner(house.server, house.root_key).sign_in() as root:
        for action in ("unload", "stop"):
            (link,) = re.findall(f'hx-post="([^"]*/{third}/{action}[^"]*)"', root.get("/owners?page=2").text)
            assert f'id="run-{third}"' in root.change("POST", link).text
        beyond = root.get("/owners/now?page=999").text
        assert "Newer" in beyond and "Older" not in beyond and "No runs yet" not in beyond
    assert house.runs()[third]["place"] == "ended"
