"""The chat endpoints, as far as they are the server's: who may ask, for which weights, in which words it is refused.

pytest tests/contract/test_chat_endpoints.py
"""

import asyncio
import http.server
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.factories import photo
from tests.fake_server import Running
from tinker_server.auth import keys
from tinker_server.chat.requests import WITHOUT_EFFECT

OPENAI = ("/oai/api/v1/chat/completions", "/v1/chat/completions")
COMPLETIONS = ("/oai/api/v1/completions", "/v1/completions")
ANTHROPIC = tuple(
    f"{prefix}/messages{name}"
    for prefix in ("/anthropic/api/v1", "/anthropic/api/v1/v1", "/v1")
    for name in ("", "/count_tokens")
)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Without keys."""
    running = Running(tmp_path_factory.mktemp("chat"), image_hosts=["127.0.0.1:18765"])
    yield running
    running.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str]]]:
    """With keys of two owners."""
    data_dir = tmp_path_factory.mktemp("guarded")
    made = {name: keys.add(data_dir / "keys", name) for name in ("alice", "bob")}
    running = Running(data_dir)
    yield running, made
    running.stop()


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny"}
    if path.endswith("/completions") and "chat" not in path:
        body["prompt"] = "hello"
    else:
        body["messages"] = MESSAGES
    return body | fields


def post(server: Running, path: str, /, *, key: str = "tml-test", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    content = json.dumps(body_for(path, **fields))
    return httpx.post(server.url + path, content=content, headers=headers, timeout=20)


def words_of(answer: httpx.Response) -> str:
    """The text of a refusal, whose form is its vendor's."""
    body = answer.json()
    if "anthropic" in str(answer.url) or "/v1/messages" in str(answer.url):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    text: str = body["error"]["message"]
    return text


@pytest.mark.parametrize("path", [*OPENAI, *COMPLETIONS, *ANTHROPIC])
def test_every_path_of_both_clients_answers_and_wants_a_key(server: Running, guarded: Any, path: str) -> None:
    assert post(server, path).json() == {"said": ["hello"]}
    task = server.backend.tiny.sampler.chats[-1]
    assert (task.body["model"], task.weights, task.owner) == ("tiny", None, "local")
    for key in ("-", "tml-wrong"):
        refused = post(guarded[0], path, key=key)
        assert refused.status_code == 401 and "key" in words_of(refused).lower()
    known = httpx.post(guarded[0].url + path, json=body_for(path), headers={"x-api-key": guarded[1]["alice"]})
    assert known.status_code == 200 and guarded[0].backend.tiny.sampler.chats[-1].owner == "alice"


def test_models_are_listed_and_found(server: Running, guarded: Any) -> None:
    for prefix in ("/oai/api/v1", "/v1"):
        listed = server.http.get(f"{server.url}{prefix}/models").json()
        assert [one["id"] for one in listed["data"]] == ["tiny"]
        assert server.http.get(f"{server.url}{prefix}/models/tiny").json()["object"] == "model"
        unknown = server.http.get(f"{server.url}{prefix}/models/org/other")
        assert unknown.status_code == 404 and "served: tiny" in words_of(unknown)
        assert httpx.get(f"{guarded[0].url}{prefix}/models").status_code == 401


def test_the_owners_weights_are_among_the_models_with_the_length_of_their_base(guarded: Any) -> None:
    server, made = guarded
    path = saved(server, made["alice"])
    cards = {}
    for name in ("alice", "bob"):
        headers = {"authorization": f"Bearer {made[name]}"}
        cards[name] = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"]
    (tiny,) = cards["bob"]
    found = {one["id"]: one for one in cards["alice"]}
    assert (tiny["id"], tiny["parent"]) == ("tiny", None) and tiny["max_model_len"] > 0
    assert (found[path]["parent"], found[path]["max_model_len"]) == ("tiny", tiny["max_model_len"])
    assert found[path]["created"] > 1e9


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (OPENAI[0], {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"]}),
        (OPENAI[0], {"prompt_cache_key": "k", "safety_identifier": "s", "function_call": None, "temperature": None}),
        (COMPLETIONS[0], {"best_of": 1, "suffix": None, "stop": None}),
        (ANTHROPIC[0], {"thinking": {"type": "disabled"}, "service_tier": "auto", "container": None}),
        (ANTHROPIC[1], {"thinking": {"type": "disabled"}}),
    ],
)
def test_fields_without_effect_and_nulls_are_accepted_and_go_no_further(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    assert post(server, path, **fields).status_code == 200
    assert not fields.keys() & server.backend.tiny.sampler.chats[-1].body.keys()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (OPENAI[0], {"store": True}),
        (OPENAI[0], {"modalities": ["text", "audio"]}),
        (COMPLETIONS[0], {"best_of": 2}),
        (COMPLETIONS[0], {"best_of": True}),
        (ANTHROPIC[0], {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ],
)
def test_the_same_fields_are_refused_where_they_would_have_an_effect(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    refused = post(server, path, **fields)
    (field,) = fields
    assert refused.status_code == 400 and words_of(refused).startswith(field) and "supported is" in words_of(refused)


def test_the_documentation_has_every_field_without_effect() -> None:
    text = (Path(__file__).parents[2] / "docs/chat.md").read_text()
    named = {field for fields in WITHOUT_EFFECT.values() for field in fields}
    assert named and all(f"| `{field}` |" in text for field in named)


def test_a_page_of_an_allowed_origin_may_ask_and_its_preflight_needs_no_key(tmp_path: Path) -> None:
    key = keys.add(tmp_path / "keys", "alice")
    server = Running(tmp_path / "data", keys_file=tmp_path / "keys", cors_origins=["https://chat.example/"])
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-extra"}
    url = f"{server.url}/v1/chat/completions"
    try:
        asked = httpx.options(url, headers={"origin": "https://chat.example", **asks})
        assert (asked.status_code, asked.content) == (204, b"")
        assert asked.headers["access-control-allow-headers"] == "authorization,x-extra"
        other = httpx.options(url, headers={"origin": "https://other.example", **asks})
        closed = httpx.options(f"{server.url}/api/v1/training_runs", headers={"origin": "https://chat.example", **asks})
        for refused in (other, closed):
            assert refused.status_code == 401 and "access-control-allow-origin" not in refused.headers
        headers = {"origin": "https://chat.example", "authorization": f"Bearer {key}"}
        answered = httpx.post(url, json=body_for(url), headers=headers)
        unknown = httpx.post(url, json=body_for(url), headers=headers | {"authorization": "Bearer tml-wrong"})
        assert (answered.status_code, unknown.status_code) == (200, 401)
        for answer in (asked, answered, unknown):
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert answer.headers["vary"] == "Origin" and "access-control-allow-credentials" not in answer.headers
    finally:
        server.stop()


def saved(server: Running, key: str) -> str:
    """Sampler weights of a model of the key's owner."""
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": key}) as client:

        def result(route: str, /, **body: object) -> dict[str, Any]:
            request_id = client.post(route, json=body).json()["request_id"]
            while (answer := client.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
                pass
            found: dict[str, Any] = answer.json()
            return found

        session_id = client.post("/create_session", json={"sdk_version": "0.38.0"}).json()["session_id"]
        model_id = result(
            "/create_model", session_id=session_id, model_seq_id=0, base_model="tiny", lora_config={"rank": 8}
        )["model_id"]
        path: str = result("/save_weights_for_sampler", model_id=model_id, seq_id=1, path="best")["path"]
        return path


@pytest.mark.parametrize("endpoint", [OPENAI[0], COMPLETIONS[0], ANTHROPIC[0], ANTHROPIC[1]])
def test_weights_are_sampled_by_their_owner_and_unknown_to_others(guarded: Any, endpoint: str) -> None:
    server, made = guarded
    path = saved(server, made["alice"])
    for name in (path, f"tiny;{path}"):
        assert post(server, endpoint, key=made["alice"], model=name).status_code == 200
        task = server.backend.tiny.sampler.chats[-1]
        assert task.weights is not None and (task.weights / "steps").is_file() and task.body["model"] == name
        foreign = post(server, endpoint, key=made["bob"], model=name)
        assert foreign.status_code == 404 and path in words_of(foreign)
        missing = post(server, endpoint, key=made["alice"], model=f"{path}-not")
        assert missing.status_code == 404
    assert post(server, endpoint, key=made["alice"], model=f"other;{path}").status_code == 400
    assert post(server, endpoint, key=made["alice"], model="tiny;").status_code == 200
    assert (
        httpx.get(f"{server.url}/v1/models/{path}", headers={"authorization": f"Bearer {made['bob']}"}).status_code
        == 404
    )


@pytest.mark.parametrize(
    ("endpoint", "fields", "field", "text"),
    [
        (OPENAI[0], {"priority": 5}, "priority", "priority is not supported; supported are"),
        (OPENAI[0], {"kv_transfer_params": {}}, "kv_transfer_params", "is not supported"),
        (OPENAI[0], {"chat_template": "x"}, "chat_template", "is not supported"),
        (OPENAI[0], {"mm_processor_kwargs": {}}, "mm_processor_kwargs", "is not supported"),
        (COMPLETIONS[0], {"suffix": "x"}, "suffix", "is not supported"),
        (OPENAI[0], {"temperature": 0.001}, "temperature", "0 (greedy) or 0.01 to 2.0"),
        (OPENAI[0], {"temperature": 3}, "temperature", "0.01 to 2.0"),
        (OPENAI[0], {"n": 129}, "n", "1 to 128"),
        (OPENAI[0], {"n": 0}, "n", "1 to 128"),
        (COMPLETIONS[0], {"prompt": ["a"] * 65, "n": 2}, "prompt", "65 prompts with n 2"),
        (OPENAI[0], {"stream": "yes"}, "stream", "true or false"),
        (OPENAI[0], {"model": 3}, "model", "model is missing"),
        (OPENAI[0], {"messages": [{"content": "\ud800"}]}, "messages", "half of a surrogate pair"),
        (OPENAI[0], {"messages": [{"role": "user", "content": "a"}] * 129}, "messages", "129 are more than a context"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: Running, endpoint: str, fields: dict[str, Any], field: str, text: str
) -> None:
    refused = post(server, endpoint, **fields)
    assert refused.status_code == 400 and text in words_of(refused)
    assert refused.json()["error"]["param"] == field


def test_bodies_that_are_no_requests_are_refused(server: Running) -> None:
    for content, text in ((b"{", "no JSON"), (b"[]", "no JSON object"), (b"[" * 100_000, "no JSON")):
        for path in (OPENAI[0], ANTHROPIC[0]):
            refused = server.http.post(server.url + path, content=content)
            assert refused.status_code == 400 and text in words_of(refused)
    large = server.http.post(server.url + OPENAI[0], content=b"x" * (2 << 20))
    assert large.status_code == 413 and "larger than" in words_of(large)
    nowhere = server.http.post(f"{server.url}/v1/nothing", json={})
    assert nowhere.status_code == 404 and words_of(nowhere)


def test_pages_of_other_origins_are_kept_out(server: Running) -> None:
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        refused = server.http.post(server.url + OPENAI[0], json=body_for(OPENAI[0]), headers=headers)
        assert refused.status_code == 403 and "no" in words_of(refused)


def test_a_stream_comes_in_events_and_what_fails_in_it_is_its_last(server: Running) -> None:
    whole = post(server, OPENAI[0], stream=True, user="one two three")
    assert whole.headers["content-type"].startswith("text/event-stream")
    assert whole.text == "data: one\n\ndata: two\n\ndata: three\n\n"
    failed = post(server, OPENAI[0], stream=True, user="one fails")
    assert failed.text.startswith('data: one\n\ndata: {"error": {"message": "the engine failed in [path]"')
    failed = post(server, ANTHROPIC[0], stream=True, metadata={"user_id": "one fails"})
    assert failed.text.startswith('data: one\n\nevent: error\ndata: {"type": "error", "error": {"type": "api_error"')


def test_a_failure_before_the_first_part_has_a_status(server: Running) -> None:
    for stream in (False, True):
        failed = post(server, OPENAI[0], stream=stream, user="fails one")
        assert failed.status_code == 500 and words_of(failed) == "the engine failed in [path]"


def used(server: Running) -> Counter[str]:
    """Tokens of the owner `local` by kind, whatever the hour."""
    now = time.time()
    usage = server.app.state.services.usage

    async def counted() -> Counter[str]:
        amounts: Counter[str] = Counter()
        async for page in usage.between("local", now - 7200, now + 7200):
            for one in page:
                amounts[one.kind] += one.amount
        return amounts

    return asyncio.run_coroutine_threadsafe(counted(), server.loop).result(20)


def test_used_tokens_are_counted(server: Running) -> None:
    before = used(server)
    post(server, OPENAI[0], user="one two three")
    # The fake reads seven tokens, two of them from the cache, and draws one for each word.
    assert used(server) - before == {"prefill": 5, "cached_prefill": 2, "sampled": 3}


def test_a_client_that_goes_away_stops_its_work_and_an_owner_has_a_limit(guarded: Any) -> None:
    server, made = guarded
    sampler = server.backend.tiny.sampler
    server.set_gate(sampler.gate, is_open=False)
    most = 64 * server.settings.backend.samples_at_once
    try:
        for stream in (False, True):
            before = sampler.running
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    server.url + OPENAI[0],
                    json=body_for(OPENAI[0], stream=stream),
                    headers={"x-api-key": made["alice"]},
                    timeout=0.5,
                )
            deadline = time.monotonic() + 20
            while sampler.running > before:
                assert time.monotonic() < deadline, "the work goes on 20 s after its client hung up"
                time.sleep(0.02)
        admission = server.app.state.services.chats._admission
        server.loop.call_soon_threadsafe(admission.samples.enter, "alice", most, 0, 0)
        time.sleep(0.1)
        busy = post(server, OPENAI[0], key=made["alice"])
        assert busy.status_code == 429 and busy.json()["error"]["type"] == "rate_limit_error"
        assert busy.headers["retry-after"]
        server.loop.call_soon_threadsafe(admission.samples.leave, "alice", most, 0, 0)
    finally:
        server.set_gate(sampler.gate, is_open=True)
    assert post(server, OPENAI[0], key=made["alice"]).status_code == 200


class Images(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/redirect.png":
            self.send_response(302)
            self.send_header("location", "http://127.0.0.1:18765/good.png")
            self.end_headers()
            return
        data = photo(8, 8)
        self.send_response(200)
        self.send_header("content-type", "text/html" if self.path == "/page" else "image/png")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


def with_image(address: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}]


def test_addresses_of_images_are_fetched_from_named_hosts_alone(server: Running) -> None:
    for address in (
        "http://127.0.0.1:18766/good.png",
        "http://127.0.0.1/good.png",
        "http://evil@127.0.0.1:1/x",
        "file:///etc/passwd",
        "ftp://127.0.0.1:18765/good.png",
        "http://[",
        "",
    ):
        refused = post(server, OPENAI[0], messages=with_image(address))
        assert refused.status_code == 400 and "image_hosts" in words_of(refused), address
    source = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x"}}
    nested = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [source]}]}]
    said = words_of(post(server, ANTHROPIC[0], messages=nested))
    assert said.startswith("messages.0.content.0.content.0.source.url: ") and "image_hosts" in said
    data = "DATA:image/png;base64,iVBORw0KGgo="
    assert post(server, OPENAI[0], messages=with_image(data)).status_code == 200
    task = server.backend.tiny.sampler.chats[-1]
    assert task.body["messages"][0]["content"][0]["image_url"]["url"] == data
    assert task.image_fields == ("messages.0.content.0.image_url.url",)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 18765), Images) as images:
        threading.Thread(target=images.serve_forever, daemon=True).start()
        assert post(server, OPENAI[0], messages=with_image("http://127.0.0.1:18765/good.png")).status_code == 200
        sent = server.backend.tiny.sampler.chats[-1].body["messages"][0]["content"][0]["image_url"]["url"]
        assert sent.startswith("data:image/png;base64,iVBOR")
        for name, text in (("redirect.png", "answers 302"), ("page", "text/html")):
            refused = post(server, OPENAI[0], messages=with_image(f"http://127.0.0.1:18765/{name}"))
            assert refused.status_code == 400 and text in words_of(refused)
        images.shutdown()
    refused = post(server, OPENAI[0], messages=with_image("http://127.0.0.1:18765/good.png"))
    assert refused.status_code == 400 and "cannot be fetched (ConnectError)" in words_of(refused)
