"""Lists and tables of the dashboard in a browser, filtered, searched, long and narrow; and the page /docs."""

import asyncio
import re
import time
from typing import Literal

import pytest
from playwright.sync_api import ViewportSize, expect

from tests.browser.learning import LearningBackend
from tests.browser.pages import NARROW, Watched
from tests.dashboard import PROTOBUF, Owner
from tests.fake_server import forward_backward_body
from tinker_server.auth import keys

WIDE: ViewportSize = {"width": 1280, "height": 860}


def test_samples_are_filtered_by_their_client_and_stay_so_while_they_come(
    seen: Watched, owners: tuple[Owner, Owner], run_id: str
) -> None:
    alice, _ = owners
    session_id = alice.post("/create_session", sdk_version="0.38.0")["session_id"]
    client = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler_id = alice.post("/create_sampling_session", **client)["sampling_session_id"]
    page = seen.open("/samples?client=none")
    listed, filtered = page.locator("ul.samples li"), page.get_by_label("Sampling client")
    without_client = listed.count()
    seen.open("/samples")
    before = listed.count()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    for seq_id in range(2):
        sample = {"sampling_session_id": sampler_id, "seq_id": seq_id, "prompt": prompt}
        alice.post("/asample", **sample, sampling_params={"max_tokens": 4, "seed": 7})
    expect(listed).to_have_count(before + 2)  # the filter appears with the second client
    expect(filtered.locator("option:checked")).to_have_text("all")
    filtered.select_option(sampler_id)
    expect(listed).to_have_count(2)
    alice.post("/asample", **(sample | {"seq_id": 2}), sampling_params={"max_tokens": 4, "seed": 7})
    page.evaluate("document.activeElement.blur()")
    expect(listed).to_have_count(3)
    expect(filtered).to_have_value(sampler_id)
    filtered.select_option("none")
    expect(listed).to_have_count(without_client)
    expect(filtered.locator("option:checked")).to_contain_text("Chats and base models")
    filtered.select_option("")
    expect(listed).to_have_count(before + 3)
    assert seen.violations() == []


def test_a_search_of_runs_holds_while_they_change_and_after_a_reload(
    seen: Watched, owners: tuple[Owner, Owner], run_id: str
) -> None:
    page = seen.open("/?page=2")  # where a search finds nothing, if it stays there
    search = page.get_by_label("Search runs")
    search.fill(run_id[:8])
    link = page.get_by_role("link", name=run_id[:8])
    expect(link).to_be_visible()
    with page.expect_response("**/runs?*") as answer:
        page.evaluate("htmx.trigger(document.getElementById('runs'), 'sse:changed')")
    assert answer.value.ok
    expect(link).to_be_visible()
    expect(page.locator("#number")).to_have_value("1")
    page.reload()
    expect(search).to_have_value(run_id[:8])
    expect(link).to_be_visible()
    search.fill("idle")
    expect(page).to_have_url(f"{seen.url}/?q=idle")
    expect(link).to_be_visible()
    search.fill("on disk")
    expect(page.locator("#runs")).to_contain_text("No run matches “on disk”")


def test_the_checkpoints_of_all_runs_are_filtered_copied_and_opened_in_the_playground(
    seen: Watched, owners: tuple[Owner, Owner], run_id: str
) -> None:
    alice, _ = owners
    other = alice.new_run()
    name = f"drawn-{other[:8]}"
    alice.post("/save_weights_for_sampler", model_id=other, seq_id=1, path=name)
    path = f"tinker://{other}/sampler_weights/{name}"
    page = seen.open("/")
    page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Checkpoints").click()
    page.wait_for_load_state()  # its scripts submit the filters
    row = page.get_by_role("row", name=name)
    expect(row).to_be_visible()
    expect(page.get_by_role("row", name="step-40")).to_be_visible()
    page.get_by_label("Kind").select_option("sampler_weights")
    expect(page.get_by_role("row", name="step-40")).to_have_count(0)
    page.locator("select[name=run]").select_option(other)
    expect(page).to_have_url(re.compile(r"kind=sampler_weights&run=\w"))
    alice.post("/save_weights_for_sampler", model_id=other, seq_id=2, path="later")
    page.evaluate("htmx.trigger(document.getElementById('checkpoints'), 'sse:changed')")
    expect(page.get_by_role("row", name="later")).to_be_visible()
    assert seen.violations() == []
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    row.get_by_role("button", name="Copy path").click()
    expect(row.get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == path
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain HTTP
    page.get_by_role("button", name="Copy path of sampler_weights/later").click()
    expect(page.get_by_role("row", name="later").get_by_role("button")).to_have_text("Copied")
    row.get_by_role("link", name=f"Playground with {name}").click()
    expect(page.get_by_role("heading", name="Playground")).to_be_visible()


def test_a_long_queue_is_whole_and_the_disks_bar_says_what_it_shows(
    seen: Watched, owners: tuple[Owner, Owner], learning: LearningBackend
) -> None:
    alice, _ = owners
    gate = learning.tiny.trainer.gates["cross_entropy"]
    live = alice.new_run()
    alice.server.set_gate(gate, is_open=False)
    headers = {**PROTOBUF, "x-api-key": alice.key}
    try:
        for seq_id in range(1, 104):
            body = forward_backward_body(live, seq_id)
            assert alice.server.http.post("/forward_backward", content=body, headers=headers).status_code == 200
        for size in (NARROW, WIDE):
            seen.page.set_viewport_size(size)
            page = seen.open("/machine")
            queue = page.locator("ol.queue")
            expect(queue.locator("li")).to_have_count(100)
            expect(page.get_by_text("The first 100 of 103.")).to_be_visible()
            room = queue.evaluate(
                """list => {
                    const text = document.createElement("canvas").getContext("2d");
                    text.font = getComputedStyle(list).font;
                    return parseFloat(getComputedStyle(list).paddingLeft) - text.measureText("100. ").width;
                }"""
            )
            assert room > 0, "the number of an item is cut off"
            assert queue.evaluate("list => list.scrollWidth <= list.clientWidth")
            assert seen.violations() == []
    finally:
        alice.server.set_gate(gate, is_open=True)
    bar = page.get_by_label("Disk used")
    part = bar.evaluate("meter => meter.value / meter.max")
    tile = page.locator(".tiles div", has=bar)
    expect(tile).to_contain_text("free")
    free_gib, used_gib, total_gib = map(float, re.findall(r"([\d.]+) GiB", tile.inner_text()))
    assert abs(used_gib / total_gib - part) < 0.01 and abs(free_gib + used_gib - total_gib) < 1.5


def test_narrow_tables_leave_nothing_out(seen: Watched, run_id: str) -> None:
    seen.page.set_viewport_size(NARROW)
    page = seen.open(f"/runs/{run_id}")
    expect(page.locator("#checkpoints").get_by_text("weights · 2 B")).to_be_visible()
    expect(page.locator("#operations").get_by_text("No. 81")).to_be_visible()
    page = seen.open("/")
    expect(page.get_by_text("tiny · rank 8").first).to_be_visible()
    seen.page.set_viewport_size(WIDE)
    expect(page.get_by_text("tiny · rank 8").first).to_be_hidden()


def test_the_reference_needs_no_network_and_has_none_of_the_dashboards_rights(seen: Watched) -> None:
    """Its script is another project's, on the origin of the dashboard, whose cookie is there."""
    page = seen.open("/docs")
    expect(page.get_by_role("heading", name="tinker-server")).to_be_visible()
    operation = page.locator(".opblock", has_text="/api/v1/forward_backward").first
    operation.get_by_role("button").first.click()
    expect(operation).to_contain_text("Responses")
    assert page.evaluate("window.origin") == "null"
    assert page.evaluate("() => fetch('/runs').then(() => 'answered', () => 'blocked')") == "blocked"
    assert (
        page.evaluate("() => { try { return document.cookie } catch (error) { return error.name } }") == "SecurityError"
    )
    assert seen.page.context.cookies()  # of the dashboard
    seen.errors.clear()  # the browser itself logs what it has blocked


def test_the_machine_draws_its_last_day(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    history, now = alice.server.app.state.services.machine_history, time.time()

    async def record() -> None:
        for minute in [*range(900, 600, -10), *range(120, 0, -10)]:
            load = {("gpu_utilization", f"GPU {gpu}"): (minute + gpu) / 1000 for gpu in (8, 9)}
            await history.put({**load, ("operations", ""): float(minute)}, now - 60 * minute)

    asyncio.run_coroutine_threadsafe(record(), alice.server.loop).result(30)
    for size in (NARROW, WIDE):
        seen.page.set_viewport_size(size)
        page = seen.open("/machine")
        page.locator("figure[data-measure=operations] canvas").wait_for()
        expect(page.get_by_role("img", name="GPU 8 1.8, GPU 9 1.9")).to_be_visible()
        expect(page.get_by_text("Nothing is recorded yet")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert seen.violations() == []


def test_administrators_alone_have_the_page_of_owners_and_stop_a_run_there(
    seen: Watched, owners: tuple[Owner, Owner]
) -> None:
    _, bob = owners
    run_id = bob.new_run()
    expect(seen.page.get_by_role("link", name="Owners")).to_have_count(0)
    key = keys.add(bob.server.settings.resolve_keys_file(), "root", is_admin=True)
    time.sleep(keys.RELOAD_S)
    seen.sign_out()
    page = seen.sign_in(key)
    for size in (NARROW, WIDE):
        page.set_viewport_size(size)
        page.get_by_role("link", name="Owners").click()
        expect(page.get_by_role("region", name="Owners", exact=True)).to_contain_text("bob")
        expect(page.get_by_text("administrator", exact=True).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert seen.violations() == []
    stop = page.get_by_role("button", name=f"Stop {run_id}")
    stop.click()
    seen.answer(f"Stop run {run_id[:8]}:train:0 (bob)", yes=False)
    expect(stop).to_be_visible()
    stop.click()
    seen.answer(f"Stop run {run_id[:8]}:train:0 (bob)", yes=True)
    expect(stop).to_have_count(0)
    expect(page.get_by_role("row", name=re.compile(run_id[:8]))).to_contain_text("ended")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_usage_and_the_audit_log_are_reached_and_have_no_serious_fault_of_access(
    seen: Watched, run_id: str, scheme: Literal["light", "dark"]
) -> None:
    seen.page.emulate_media(color_scheme=scheme)
    for size in (NARROW, WIDE):
        seen.page.set_viewport_size(size)
        page = seen.open("/")
        page.get_by_role("link", name="Usage").click()
        expect(page.get_by_role("region", name="Usage by owner")).to_contain_text("alice")
        expect(page.get_by_role("region", name="Usage by day")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert seen.violations() == []
        page.get_by_role("link", name="Audit log").click()
        expect(page.get_by_role("region", name="Audit log")).to_contain_text("step-40")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert seen.violations() == []
    page.get_by_label("Day (UTC)").fill("2020-01-01")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("No changes on 2020-01-01.")).to_be_visible()
