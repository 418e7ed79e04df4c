"""The dashboard's pages, without a browser: what they say, to whom, and what they let be changed."""

import asyncio
import base64
import csv
import io
import json
import os
import re
from collections.abc import Coroutine, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from PIL import Image
from tinker.lib.console_urls import (
    api_key_console_url,
    checkpoint_playground_url,
    new_api_key_console_url,
    session_console_url,
    sessions_console_url,
    training_run_console_url,
)
from tinker.types import SaveWeightsResponse

from tests.dashboard import Owner, alice_and_bob, with_keys
from tests.fake_server import Running
from tests.photographs import photographs
from tinker_server.auth import keys
from tinker_server.auth.key import hash_of
from tinker_server.auth.sign_ins import COOKIE, SignIns
from tinker_server.backends import tasks
from tinker_server.backends.protocol import EngineBatch, EngineUse
from tinker_server.dashboard.pages import ROUTERS, live
from tinker_server.dashboard.pages.runs import PER_PAGE
from tinker_server.dashboard.rendering import short, size
from tinker_server.dashboard.thumbnails import SIDE_PIXELS
from tinker_server.observability.recent_samples import IMAGE_BYTES
from tinker_server.routes import machine_loads

PHOTO = photographs("test", 1)[0]
PAGES = ("/", "/checkpoints", "/samples", "/playground", "/machine")


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    """Alice, who has a run, checkpoints and samples; and Bob, who has nothing."""
    with alice_and_bob(tmp_path_factory.mktemp("dashboard")) as both:
        yield both


@pytest.fixture(scope="module")
def run_id(owners: tuple[Owner, Owner]) -> str:
    alice, _ = owners
    run_id = alice.new_run()
    alice.train(run_id, range(3))
    alice.save(run_id, 7, "kept")
    image = {"type": "image", "format": "jpeg", "data": base64.b64encode(PHOTO.jpeg).decode()}
    alice.sample(image)
    return run_id


@pytest.fixture
def alice(owners: tuple[Owner, Owner], run_id: str) -> Owner:
    return owners[0]


@pytest.fixture
def bob(owners: tuple[Owner, Owner]) -> Owner:
    return owners[1]


def sample_id(owner: Owner, query: str = "") -> str:
    found = re.search(r"/samples/([0-9a-f]{32})", owner.get(f"/samples{query}").text)
    assert found is not None
    return found[1]


def filled(path: str, run_id: str, sample: str) -> str:
    """A route's path with the ids of what is Alice's."""
    names = {"run_id": run_id, "kind": "weights", "name": "kept", "session_id": run_id.partition(":")[0], "key_id": "k"}
    for name, value in (names | {"sample_id": sample, "record_id": sample, "number": "0"}).items():
        path = path.replace(f"{{{name}}}", value)
    return path


def test_every_route_of_something_owned_is_not_there_for_another_owner(alice: Owner, bob: Owner, run_id: str) -> None:
    sample = sample_id(alice)
    owned = [(route, method) for one in ROUTERS for route in one.router.routes for method in route.methods]
    owned = [(route.path, method) for route, method in owned if "{" in route.path]
    assert len(owned) >= 13
    for path, method in owned:
        answer = bob.change(method, filled(path, run_id, sample), seconds=3600)
        assert answer.status_code == 404, (method, path, answer.status_code)
        assert "kept</th>" not in answer.text
    assert "kept" in alice.get(f"/runs/{run_id}/checkpoints").text


def test_lists_hold_only_what_is_the_viewers_own(alice: Owner, bob: Owner, run_id: str) -> None:
    short = run_id.partition(":")[0]
    assert short in alice.get("/").text and short in alice.get("/machine").text
    for path in PAGES:
        answer = bob.get(path)
        assert answer.status_code == 200
        assert short not in answer.text and "alice" not in answer.text


def test_every_page_asks_for_a_sign_in(alice: Owner, run_id: str) -> None:
    paths = {route.path for one in ROUTERS for route in one.router.routes if "GET" in route.methods} - {"/login"}
    for path in paths:
        answer = httpx.get(alice.server.url + filled(path, run_id, "0" * 32))
        assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login"), path
        part = httpx.get(alice.server.url + filled(path, run_id, "0" * 32), headers={"hx-request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/login"), path


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("/checkpoints?kind=weights&run=a%3Atrain%3A0", None),
        ("//elsewhere.example/", "/"),
        ("/\\elsewhere.example/", "/"),
        ("https://elsewhere.example/", "/"),
        ("/\t/elsewhere.example/", "/"),
        ("", "/"),
    ],
)
def test_a_sign_in_leads_to_the_page_that_was_asked_for_and_to_no_other_host(
    alice: Owner, link: str, shown: str | None
) -> None:
    form = {"key": alice.key, "link": link}
    assert httpx.post(f"{alice.server.url}/login", data=form).headers["location"] == (shown or link)
    assert alice.pages.get("/login", params={"link": link}).headers["location"] == (shown or link)


def test_a_shared_link_stands_in_the_form_of_the_sign_in_also_where_a_part_is_refreshed(alice: Owner) -> None:
    link, below = "/runs/a:train:0?with=b&with=c", {"x-forwarded-prefix": "/tinker"}
    with httpx.Client(base_url=alice.server.url) as stranger:
        there = stranger.get(link).headers["location"]
        assert f'name="link" value="{link.replace("&", "&amp;")}"' in stranger.get(there).text
        wrong = stranger.post("/login", data={"key": "tml-wrong", "link": link})
        assert f'name="link" value="{link.replace("&", "&amp;")}"' in wrong.text
        page = {"hx-request": "true", "hx-current-url": f"https://proxy.example/tinker{link}"}
        part = stranger.get("/runs/a:train:0/summary", headers={**page, **below})
        assert part.headers["hx-redirect"] == f"/tinker{there}"
        assert stranger.get("/").headers["location"] == "/login"


def test_a_change_without_the_pages_token_is_refused(alice: Owner, run_id: str) -> None:
    routes = [(route, method) for one in ROUTERS for route in one.router.routes for method in route.methods]
    changes = [(route.path, method) for route, method in routes if method not in ("GET", "HEAD")]
    assert len(changes) >= 6
    for path, method in changes:
        if path == "/login":
            continue
        for headers in ({}, {"x-csrf-token": "0" * 64}):
            answer = alice.pages.request(method, filled(path, run_id, ""), headers=headers, data={"seconds": 0})
            assert answer.status_code == 403, (method, path)
    assert alice.get(f"/runs/{run_id}").status_code == 200


@pytest.mark.parametrize("sender", ["cross-site", "same-site"])
def test_a_page_of_another_origin_changes_nothing(alice: Owner, run_id: str, sender: str) -> None:
    path = f"/runs/{run_id}/checkpoints/weights/kept/publish"
    alice.change("GET", "/")
    headers = {"x-csrf-token": alice.token, "sec-fetch-site": sender}
    assert alice.pages.post(path, headers=headers).status_code == 403
    refused = alice.pages.post("/login", data={"key": alice.key}, headers=headers)
    assert refused.status_code == 403 and "set-cookie" not in refused.headers
    for own in ("same-origin", "none"):
        headers = {"sec-fetch-site": own}
        # Another browser's: a cookie of its own would end the tokens that other tests hold.
        answer = httpx.post(f"{alice.server.url}/login", data={"key": alice.key}, headers=headers)
        assert answer.status_code == 303


def test_the_cookie_is_for_this_site_alone_and_no_script_reads_it(alice: Owner) -> None:
    answer = httpx.post(f"{alice.server.url}/login", data={"key": alice.key})
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(COOKIE) and "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie
    assert alice.key.lower() not in cookie
    assert httpx.post(f"{alice.server.url}/login", data={"key": "tml-wrong"}).status_code == 401


def test_a_removed_key_a_changed_cookie_and_an_old_one_open_nothing(tmp_path: Path) -> None:
    key = keys.add(tmp_path / "keys", "alice")
    keys.add(tmp_path / "keys", "bob")
    known = keys.Keys(tmp_path / "keys")
    sign_ins = SignIns(tmp_path, known)
    cookie = sign_ins.cookie(key)
    assert cookie is not None and sign_ins.owner(cookie) == "alice"
    assert SignIns(tmp_path, known).owner(cookie) == "alice"  # of the server after a restart
    expires, rest = cookie.split(".", 1)
    assert sign_ins.owner(f"{int(expires) + 1}.{rest}") is None
    assert sign_ins.owner(cookie[:-1] + ("0" if cookie[-1] != "0" else "1")) is None
    known.revoke(hash_of(key))
    assert sign_ins.owner(cookie) is None


def test_pages_let_in_no_script_of_others(alice: Owner, run_id: str) -> None:
    for path in (*PAGES, f"/runs/{run_id}", "/login", "/runs/nowhere"):
        answer = alice.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = answer.text.replace(alice.server.url, "")  # stands in the code that a page offers
        assert not re.search(r"<script>|<style>| style=| onclick=|https?://", text), path


def test_every_page_works_on_an_empty_store_and_without_keys(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    with httpx.Client(base_url=server.url) as pages:
        for path in PAGES:
            answer = pages.get(path)
            assert answer.status_code == 200 and "<h1>" in answer.text, path
        assert pages.get("/login").status_code == 303  # nobody signs in
        for headers in ({"host": "rebound.example"}, {"origin": "https://evil.example"}):
            assert pages.get("/", headers=headers).status_code == 403
    server.stop()


def test_the_runs_list_says_how_each_is_doing_and_is_searched(alice: Owner, run_id: str) -> None:
    text = alice.get("/runs").text
    assert run_id in text and ">tiny<" in text and '<span class="state idle">idle</span>' in text
    assert run_id in alice.get("/runs?q=TINY").text
    assert run_id not in alice.get("/runs?q=tiny+nothing").text
    assert "<b>" not in alice.get("/runs?q=<b>").text


def test_curves_have_a_point_for_each_step(alice: Owner, run_id: str) -> None:
    found = alice.get(f"/runs/{run_id}/curves.json").json()
    assert found["last_step"] == 2
    assert found["step"] == [0, 1, 2]
    assert found["loss"] == [1.0, 1.0, 1.0]
    assert found["learning_rate"] == [0.25, 0.25, 0.25]
    assert found["sampler_gap"] == [None, None, None]
    assert alice.get(f"/runs/{run_id}/curves.json?first=1&last=1").json()["step"] == [1]
    assert alice.get(f"/runs/{run_id}/curves.json?first=9&last=99").json()["step"] == []


def test_csv_and_json_hold_every_recorded_operation(alice: Owner, run_id: str) -> None:
    rows = json.loads(alice.get(f"/runs/{run_id}/steps.json").text)
    lines = list(csv.DictReader(io.StringIO(alice.get(f"/runs/{run_id}/steps.csv").text)))
    assert [row["seq_id"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(line["seq_id"]) for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["learning_rate"] for line in lines] == ["", "0.25", "", "0.25", "", "0.25"]


def test_operations_show_their_waiting_time_and_the_reason_of_a_failure(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.post("/save_weights", model_id=run_id, seq_id=1, path="a/b")
    text = alice.get(f"/runs/{run_id}/operations").text
    assert "save_weights" in text and "failed" in text and "a/b" in text


def test_a_checkpoint_is_published_taken_back_expired_downloaded_and_deleted(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.save(run_id, 1, "mine")
    url = f"/runs/{run_id}/checkpoints"
    one = f"{url}/weights/mine"
    assert '<span class="badge">public</span>' in alice.change("POST", f"{one}/publish").text
    assert '<span class="badge">public</span>' not in alice.change("DELETE", f"{one}/publish").text
    assert "in 1 h" in alice.change("POST", f"{one}/expiry", seconds=3600).text.replace("60 min", "1 h")
    assert "never</td>" in alice.change("POST", f"{one}/expiry", seconds=0).text
    for seconds in (5, -5, 10**30):
        refused = alice.change("POST", f"{one}/expiry", seconds=seconds)
        assert refused.status_code == 400 and f"ttl_seconds {seconds} is not between" in refused.text
    link = alice.get(f"{one}/download")
    assert link.status_code == 302 and "/api/v1/archives/" in link.headers["location"]
    assert httpx.get(link.headers["location"]).content[:2] == b"\x1f\x8b"
    assert "Nothing saved yet" in alice.change("DELETE", one).text
    assert alice.change("DELETE", one).status_code == 404
    events = [
        entry["event"] for entry in alice.server.http.get("/audit", headers={"x-api-key": alice.key}).json()["entries"]
    ]
    assert {"checkpoint_published", "checkpoint_deleted", "checkpoint_read"} <= set(events)


def listed(owner: Owner, query: str = "") -> list[str]:
    """Paths of the page of all checkpoints, in its order."""
    return re.findall(r'data-copy="(tinker://[^"]+)"', owner.get(f"/checkpoints{query}").text)


def test_checkpoints_of_all_runs_are_on_one_page_and_filtered_by_kind_and_run(alice: Owner, bob: Owner) -> None:
    first, second = alice.new_run(), alice.new_run()
    before = listed(alice)
    alice.save(first, 1, "a")
    alice.post("/save_weights_for_sampler", model_id=second, seq_id=1, path="b")
    saved = [f"tinker://{second}/sampler_weights/b", f"tinker://{first}/weights/a"]
    assert listed(alice) == saved + before
    assert listed(alice, f"?run={first}") == saved[1:] and listed(alice, "?kind=sampler_weights") == saved[:1]
    assert listed(alice, f"?kind=weights&run={second}") == [] == listed(alice, "?kind=external_weights")
    assert "No checkpoint matches" in alice.get(f"/checkpoints?kind=weights&run={second}").text
    assert alice.get("/checkpoints?kind=other").status_code == 404
    opened = re.findall(r'href="(/playground[^"]+)"', alice.get("/checkpoints").text)
    assert opened == [f"/playground?model_path={quote(saved[0], safe='/')}"]
    assert saved[0] in alice.get("/playground").text and saved[0] not in bob.get("/playground").text
    alice.change("POST", f"/runs/{first}/checkpoints/weights/a/publish")
    for query in ("", f"?run={first}"):
        assert listed(bob, query) == []


def test_what_the_sdk_prints_leads_to_the_page_of_the_same_thing(alice: Owner, run_id: str) -> None:
    session_id = run_id.partition(":")[0]
    path = f"tinker://{run_id}/weights/kept"
    printed = {
        sessions_console_url(): "/",
        session_console_url(session_id): f"/?q={session_id}",
        training_run_console_url(run_id): f"/runs/{run_id}",
        SaveWeightsResponse(path=path).get_console_url(): f"/checkpoints?kind=weights&run={quote(run_id)}",
    }
    for url, page in printed.items():
        moved = alice.get(f"/{url.split('/', 3)[3]}")
        assert (moved.status_code, moved.headers["location"]) == (303, page), url
        assert alice.get(page).status_code == 200 and session_id[:8] in alice.get(page).text
    assert path in alice.get("/playground?" + checkpoint_playground_url(path).partition("?")[2]).text
    for url in (new_api_key_console_url("laptop"), api_key_console_url("some-id")):
        refused = alice.get(f"/{url.split('/', 3)[3]}")
        assert refused.status_code == 404 and "keys add" in refused.text
    missing = alice.get(f"/checkpoints/{quote(run_id)}/weights%2Fother")
    assert missing.status_code == 404 and "has no weights named" in missing.text


def test_checkpoints_are_paged(alice: Owner) -> None:
    run_id = alice.new_run()
    for seq_id in range(1, PER_PAGE + 2):
        alice.save(run_id, seq_id, f"c{seq_id}")
    first, second = (listed(alice, f"?run={run_id}&page={number}") for number in (1, 2))
    assert [path.rpartition("/")[2] for path in first] == [f"c{number}" for number in range(PER_PAGE + 1, 1, -1)]
    assert [path.rpartition("/")[2] for path in second] == ["c1"]
    assert listed(alice, f"?run={run_id}&page=9") == second, "a page that is no longer there is the last"
    text = alice.get(f"/checkpoints?run={run_id}").text
    assert f"{PER_PAGE + 1} checkpoints" in text and "Older" in text and "Newer" not in text


def test_a_sample_shows_its_image_its_tokens_and_how_likely_they_were(alice: Owner) -> None:
    page = alice.get(f"/samples/{sample_id(alice)}")
    assert " word1 word2 word3" in page.text and 'class="p2" title="-0.500 nats, token 100"> word100<' in page.text
    image = alice.get(f"/samples/{sample_id(alice)}/images/0")
    assert image.headers["content-type"] == "image/jpeg" and image.content == PHOTO.jpeg
    assert image.headers["x-content-type-options"] == "nosniff"
    assert alice.get(f"/samples/{sample_id(alice)}/images/1").status_code == 404
    small = alice.get(f"/samples/{sample_id(alice)}/thumbnails/0")
    with Image.open(io.BytesIO(small.content)) as thumbnail:
        assert max(thumbnail.size) == SIDE_PIXELS and small.headers["content-type"] == "image/jpeg"
    assert alice.get(f"/samples/{sample_id(alice)}/thumbnails/1").status_code == 404


def test_special_tokens_are_dimmed(alice: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(alice.server.backend.tiny), "special_ids", lambda _: frozenset({2, 100}))
    text = alice.get(f"/samples/{sample_id(alice)}").text
    assert ' word1<span class="special"> word2</span> word3' in text
    assert '<span class="special" title="-0.500 nats, token 100"> word100<' in text
    assert '<span class="special"> word2</span> word3' in alice.get("/samples").text


def test_samples_tell_their_run_step_and_reward_and_are_filtered_by_run_and_survive_a_restart(tmp_path: Path) -> None:
    server, made = with_keys(tmp_path, "alice", "bob")
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        alice.sign_in()
        run_id = alice.new_run({"name": "a <first> try"})
        alice.train(run_id, range(2))
        path = alice.post("/save_weights_for_sampler", model_id=run_id, seq_id=5, path="drawn")["path"]
        for step in range(4):
            assert alice.report(run_id, step, **{"reward/total": 0.25 * step, "other": 9}).status_code < 300
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        for _ in range(2):
            alice.post("/asample", model_path=path, prompt=prompt, sampling_params={"max_tokens": 4})
        alice.sample()
        seen = f"run {short(run_id)} · step 2 · reward/total 0.5 in this step"
        assert alice.get("/samples").text.count("<li ") == 3 and alice.get("/samples").text.count(seen) == 2
        assert alice.get(f"/samples?run={run_id}").text.count("<li ") == 2
        assert f'<option value="{run_id}">a &lt;first&gt; try · {short(run_id)}</option>' in alice.get("/samples").text
        assert "step 2 · reward/total 0.5" in alice.get(f"/samples/{sample_id(alice, f'?run={run_id}')}").text
        alice.change("POST", f"/runs/{run_id}/checkpoints/sampler_weights/drawn/publish")
        bob.sign_in().post("/asample", model_path=path, prompt=prompt, sampling_params={"max_tokens": 4})
        assert "reward" not in bob.get("/samples").text and "step 2" not in bob.get("/samples").text
        kept = sample_id(alice)
    server.stop()
    files = list((tmp_path / "data/samples").iterdir())  # of four samples and two batches
    assert len(files) == 6 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    server = Running(tmp_path / "data", keys_file=tmp_path / "keys")
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        assert alice.sign_in().get("/samples").text.count(seen) == 2 and sample_id(alice) == kept
        assert bob.sign_in().get(f"/samples/{kept}").status_code == 404
    server.stop()


def test_no_samples_are_kept_where_the_operator_wants_none(tmp_path: Path) -> None:
    server, (key,) = with_keys(tmp_path, "alice", samples_shown=0)
    with Owner(server, key) as alice:
        alice.sign_in().sample()
        alice.chat("one two")
        assert server.backend.tiny.sampler.chats[-1].kept_bytes == 0
        assert "samples_shown is 0" in alice.get("/samples").text
    server.stop()


def test_chats_are_among_the_samples_of_their_owner_alone_and_open_pages_are_notified(tmp_path: Path) -> None:
    server, made = with_keys(tmp_path, "alice", "bob")
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        changes = server.app.state.services.futures.changes
        with changes.watching("alice") as watch:
            alice.sign_in().chat("one two")
            assert asyncio.run_coroutine_threadsafe(watch.next(20), server.loop).result(30)
        alice.chat("one two three", stream=True)
        bob.sign_in()
        assert server.backend.tiny.sampler.chats[-1].kept_bytes > IMAGE_BYTES
        assert " word0 word1 word2" in alice.get("/samples").text
        page = alice.get(f"/samples/{sample_id(alice)}").text
        assert " word7" in page and "temperature 0.5 · seed 3" in page and "nats, token 2" in page
        assert "word" not in bob.get("/samples").text
        assert bob.get(f"/samples/{sample_id(alice)}").status_code == 404
    server.stop()


def test_the_machine_shows_the_engines_batch_and_how_full_its_cache_is(alice: Owner) -> None:
    text = alice.get("/machine/now").text
    assert "KV cache 38 % in use" in text and "vLLM batch: 0 sequences, 2 waiting" in text


def test_the_machine_counts_the_disk_as_df_does(alice: Owner) -> None:
    """Blocks that are reserved, or beyond a quota, are neither used nor free."""
    meter = r'<meter min="0" max="(\d+)" value="(\d+)"[^>]*aria-label="Disk used"></meter><small>([^<]*)</small>'
    found = re.search(meter, alice.get("/machine/now").text)
    assert found is not None
    shown_full, shown_used = map(int, found.groups()[:2])
    assert found[3] == f"{size(shown_used)} of {size(shown_full)} used"
    disk = os.statvfs(alice.server.settings.data_dir)
    used, free = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_bavail * disk.f_frsize
    assert shown_used == pytest.approx(used, abs=2**29)
    assert shown_full == pytest.approx(used + free, abs=2**29)


def test_the_machine_shows_each_of_several_engines(alice: Owner) -> None:
    batch = EngineBatch(3, 1, 0.25)
    alice.server.backend.tiny.engines = {0: EngineUse(3, 1, 256, 2, 8, batch), 1: EngineUse(5, 0, 256, 1, 8)}
    try:
        text = " ".join(alice.get("/machine/now").text.split())
    finally:
        alice.server.backend.tiny.engines = {}
    assert "Engine 0: 3 running, 1 waiting, 2 adapters, KV cache 25 %" in text
    assert "Engine 1: 5 running, 1 adapters</p>" in text


def test_the_machine_shows_the_load_of_the_last_day(alice: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_loads, "READ_S", 0.02)
    monkeypatch.setattr(machine_loads, "STORED_S", 0.1)
    services = alice.server.app.state.services

    async def record() -> None:
        async with tasks.running([machine_loads.record_loads(services)]):
            await asyncio.sleep(0.3)
            services.usage.count("sampled", "alice", "s", "tiny", 10**6)
            await asyncio.sleep(0.5)

    asyncio.run_coroutine_threadsafe(record(), alice.server.loop).result(30)
    answer = alice.get("/machine/history.json").json()
    lines = {(one["measure"], one["of"]): one for one in answer["lines"]}
    assert set(lines["kv_cache_used", "tiny"]["value"]) == {0.375}
    assert max(lines["sampled_tokens_per_s", "tiny"]["value"]) > 10**6
    assert lines["operations", ""]["at"] == sorted(lines["operations", ""]["at"])
    assert 'data-url="/machine/history.json"' in alice.get("/machine").text


def test_of_what_waits_another_owner_sees_the_kind_alone(alice: Owner, bob: Owner) -> None:
    run_id = alice.new_run()
    gate = alice.server.backend.tiny.trainer.gates["cross_entropy"]
    alice.server.set_gate(gate, is_open=False)
    body = {"model_id": run_id, "seq_id": 1, "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}}
    submitted = alice.server.http.post("/forward_backward", json=body, headers={"x-api-key": alice.key})
    seen, hidden = alice.get("/machine/now").text, bob.get("/machine/now").text
    alice.server.set_gate(gate, is_open=True)
    assert submitted.status_code == 200
    assert "forward_backward" in seen and run_id in seen
    assert "forward_backward of another owner" in hidden and run_id not in hidden


def test_a_page_that_fails_says_so_and_nothing_else_is_touched(
    alice: Owner, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    catalog = alice.server.app.state.services.catalog
    monkeypatch.setattr(type(catalog), "operations_of_run", None)
    answer = alice.get(f"/runs/{run_id}")
    assert answer.status_code == 500 and "This page failed" in answer.text
    assert alice.get("/").status_code == 200


def test_open_pages_are_notified_of_changes_of_their_owner_alone(alice: Owner, bob: Owner, run_id: str) -> None:
    changes = alice.server.app.state.services.futures.changes
    with alice.pages.stream("GET", "/live") as mine, bob.pages.stream("GET", "/live") as others:
        assert mine.headers["content-type"].startswith("text/event-stream")
        lines, elsewhere = mine.iter_lines(), others.iter_lines()
        assert next(lines) == next(elsewhere) == "retry: 3000"
        assert changes.num_watching("alice") == changes.num_watching("bob") == 1
        alice.server.loop.call_soon_threadsafe(changes.note, "alice")
        assert next(line for line in lines if line) == "event: changed"
        alice.server.loop.call_soon_threadsafe(changes.note, "bob")
        assert next(line for line in elsewhere if line) == "event: changed"  # the first that came there


def test_a_page_that_connects_late_or_again_is_told_what_it_has_missed(
    alice: Owner, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUIET_S", 0.1)

    def told(since: str, **headers: str) -> tuple[str, str]:
        """The first event and its id, or the comment that there is none."""
        with alice.pages.stream("GET", f"/live?since={since}", headers=headers) as stream:
            lines = (line for line in stream.iter_lines() if line and not line.startswith("retry"))
            event = next(lines)
            return event, next(lines).removeprefix("id: ")

    asked = re.search(r'data-since="([0-9.]+)"', alice.get("/").text)
    assert asked is not None
    assert told(asked[1])[0] == ": quiet"
    alice.change("POST", f"/runs/{run_id}/labels", name="renamed before it connects")
    event, event_id = told(asked[1])
    assert event == "event: changed" and float(event_id) > float(asked[1])
    assert told(asked[1], **{"last-event-id": event_id})[0] == ": quiet"
    assert told(event_id, **{"last-event-id": asked[1]})[0] == "event: changed"


def test_open_pages_are_notified_of_what_becomes_of_weights_and_runs(alice: Owner) -> None:
    services, loop = alice.server.app.state.services, alice.server.loop
    run_id = alice.new_run()
    alice.save(run_id, 1, "told")
    url = f"/training_runs/{run_id}/checkpoints/weights/told"

    def call(method: str, path: str, **body: int) -> None:
        alice.server.http.request(method, path, json=body, headers={"x-api-key": alice.key}).raise_for_status()

    def wait(change: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, loop).result(20)

    changes = {
        "published": lambda: call("POST", f"{url}/publish"),
        "expiring": lambda: call("PUT", f"{url}/ttl", ttl_seconds=3600),
        "deleted": lambda: call("DELETE", url),
        "on disk": lambda: wait(services.scheduler.suspend(run_id)),
        "ended": lambda: wait(services.scheduler.drop(run_id)),
    }
    with services.futures.changes.watching("alice") as watch:
        for name, change in changes.items():
            change()
            assert asyncio.run_coroutine_threadsafe(watch.next(0.1), loop).result(20), name


def test_thumbnails_are_kept_by_browsers_and_other_pages_are_not(alice: Owner) -> None:
    sample = f"/samples/{sample_id(alice)}"
    assert alice.get(f"{sample}/thumbnails/0").headers["cache-control"] == "private, max-age=3600"
    for path in (sample, f"{sample}/images/0", "/", "/samples/none/thumbnails/0"):
        assert alice.get(path).headers.get_list("cache-control") == ["no-store"], path


def test_scripts_and_styles_are_checked_at_each_use_so_that_they_fit_the_pages(alice: Owner) -> None:
    for file in ("dashboard.js", "dashboard.css", "vendor/htmx.min.js"):
        answer = alice.get(f"/static/{file}")
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
        known = alice.pages.get(f"/static/{file}", headers={"if-none-match": answer.headers["etag"]})
        assert (known.status_code, known.headers["cache-control"], known.content) == (304, "no-cache", b"")


def test_pages_stand_below_the_path_that_a_proxy_takes_off(alice: Owner) -> None:
    text = alice.pages.get("/", headers={"x-forwarded-prefix": "/training"}).text
    assert 'href="/training/static/dashboard.css"' in text and 'href="/training/machine"' in text
    text = alice.pages.get("/", headers={"x-forwarded-prefix": '/"><script>'}).text
    assert "<script>" not in text


def test_a_signed_in_page_chats_by_its_cookie_and_token_and_no_other_page_does(alice: Owner) -> None:
    alice.change("GET", "/")
    path = "/oai/api/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    assert alice.pages.post(path, json=body, headers={"x-csrf-token": alice.token}).status_code == 200
    assert alice.server.backend.tiny.sampler.chats[-1].owner == "alice"
    assert alice.pages.post(path, json=body).status_code == 401
    assert alice.pages.post(path, json=body, headers={"x-csrf-token": "0" * 64}).status_code == 401
    assert httpx.post(alice.server.url + path, json=body, headers={"x-csrf-token": alice.token}).status_code == 401
    assert alice.pages.get("/api/v1/training_runs", headers={"x-csrf-token": alice.token}).status_code == 401


def test_signing_out_ends_it(tmp_path: Path) -> None:
    server, (key,) = with_keys(tmp_path, "alice")
    with Owner(server, key) as alice:
        alice.sign_in()
        assert alice.change("POST", "/logout").headers["hx-redirect"] == "/login"
        assert alice.get("/").status_code == 303
    server.stop()


def test_a_sign_in_that_is_no_form_is_refused_without_a_traceback(
    alice: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    refused = httpx.post(f"{alice.server.url}/login", content="&".join(["k="] * 1100), headers=form)
    assert refused.status_code == 400 and "fields" in refused.text, refused.text
    assert not [record for record in caplog.records if record.exc_info], caplog.text


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://[", 403), ("http://{host}", 303), (None, 303)],
)
def test_a_browser_that_says_only_its_origin_signs_in_from_our_page_alone(
    alice: Owner, origin: str | None, status: int
) -> None:
    host = alice.server.url.partition("//")[2]
    headers = {} if origin is None else {"Origin": origin.format(host=host)}
    answer = httpx.post(f"{alice.server.url}/login", data={"key": alice.key}, headers=headers)
    assert answer.status_code == status and ("set-cookie" in answer.headers) == (status == 303)


def test_a_proxy_that_changes_the_host_says_what_it_was(alice: Owner) -> None:
    headers = {"Origin": "https://tinker.example", "X-Forwarded-Host": "tinker.example"}
    assert httpx.post(f"{alice.server.url}/login", data={"key": alice.key}, headers=headers).status_code == 303


def test_a_server_whose_samples_cannot_be_saved_goes_on_and_stops_as_usual(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").touch()  # where the folder would be
    server = Running(tmp_path)
    try:
        assert server.result(server.sample(server.sampler())).status_code == 200
        sweep = server.app.state.services.housekeeper.sweep_records(0.0)
        asyncio.run_coroutine_threadsafe(sweep, server.loop).result(30)
    finally:
        server.stop()
    assert caplog.text.count("the latest samples are not saved") == 2
