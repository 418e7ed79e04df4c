"""The dashboard in a browser: Debian's chromium, driven by Playwright, on a server of fakes.

pytest tests/browser/test_dashboard.py
"""

import base64
import json
import re
import threading
import time
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.learning import ANSWER
from tests.browser.pages import NARROW, PHOTO, Watched, drawn
from tests.dashboard import Owner

TWO_ROWS_PX = 70
PHOTO_IN_BASE64 = base64.b64encode(PHOTO).decode()
HIDE = """isHidden => {
    Object.defineProperty(document, "hidden", {configurable: true, get: () => isHidden});
    document.dispatchEvent(new Event("visibilitychange"));
}"""
ZONE = "Intl.DateTimeFormat().resolvedOptions().timeZone"


def test_a_wrong_key_is_refused_and_a_right_one_shows_the_owners_runs(
    context: BrowserContext, owners: tuple[Owner, Owner], run_id: str
) -> None:
    alice, _ = owners
    watched = Watched(context, alice.server.url)
    page = watched.open("/machine")
    page.get_by_label("API key").fill("tml-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert").first).to_contain_text("not known here")
    assert watched.violations() == []
    page.get_by_label("API key").fill(alice.key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Machine")).to_be_visible()  # the link that was opened
    page.get_by_role("link", name="Runs").click()
    expect(page.get_by_role("row")).to_have_count(3)
    expect(page.get_by_role("link", name=run_id[:8])).to_be_visible()
    watched.sign_out()
    page.goto(f"{alice.server.url}/")
    expect(page.get_by_label("API key")).to_be_visible()
    assert watched.elsewhere() == []


def test_a_runs_curves_move_while_it_trains(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    live = alice.new_run()
    alice.train(live, range(3))
    page = seen.open(f"/runs/{live}")
    assert drawn(page) == 3
    training = threading.Thread(target=alice.train, args=(live, range(3, 12)))
    training.start()
    expect(page.locator("figure[data-curve=loss]")).to_have_attribute("data-points", "12", timeout=20_000)
    expect(page.locator("#summary")).to_contain_text("12")
    training.join(20)
    expect(page.locator("#operations")).to_contain_text("optim_step")


def test_a_tab_whose_viewer_has_signed_out_elsewhere_asks_for_no_changes(
    seen: Watched, context: BrowserContext
) -> None:
    page = seen.open("/")
    page.wait_for_function("() => window.htmx !== undefined")
    context.clear_cookies()
    page.clock.install()
    with page.expect_console_message(lambda said: 'not "text/event-stream"' in said.text):
        page.evaluate("followChanges()")  # as after the end of its stream
    page.wait_for_load_state("networkidle")
    before = len(seen.requests)
    page.clock.run_for(20_000)
    page.wait_for_load_state("networkidle")
    assert seen.requests[before:] == []
    assert ['not "text/event-stream"' in error for error in seen.errors] == [True]
    seen.errors.clear()


@pytest.mark.parametrize("path", ["/", "/machine"])
def test_many_tabs_are_open_at_once(seen: Watched, context: BrowserContext, path: str) -> None:
    """Browsers open six connections to a server, and tabs that are not shown leave them to the others."""
    page = seen.open(path)
    for _ in range(7):
        page.wait_for_function("() => window.htmx !== undefined")
        if path == "/":
            page.evaluate(HIDE, True)
        page = context.new_page()
        page.goto(f"{seen.url}{path}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def test_a_hidden_page_is_not_connected_and_follows_once_it_is_shown(
    seen: Watched, owners: tuple[Owner, Owner]
) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    page = seen.open(f"/runs/{run_id}")
    changes = alice.server.app.state.services.futures.changes
    expect(page.locator("#no-curves")).to_be_visible()
    page.evaluate(HIDE, True)
    waited_until = time.monotonic() + 20
    while changes.num_watching("alice"):
        assert time.monotonic() < waited_until
        time.sleep(0.05)
    alice.train(run_id, range(2))
    page.evaluate(HIDE, False)
    expect(page.locator("figure[data-curve=loss]")).to_have_attribute("data-points", "2")
    expect(page.locator("#operations")).to_contain_text("optim_step")
    alice.train(run_id, range(2, 4))
    expect(page.locator("figure[data-curve=loss]")).to_have_attribute("data-points", "4")


def test_curves_are_zoomed_smoothed_and_compared(seen: Watched, run_id: str) -> None:
    page = seen.open(f"/runs/{run_id}")
    assert drawn(page) == 40
    for curve in ("grad_norm", "learning_rate", "sampler_gap", "advantage"):
        assert drawn(page, curve) == 40
    page.get_by_role("button", name="Zoom in").click()
    figure = page.locator("figure[data-curve=loss]")
    expect(figure).to_have_attribute("data-points", "22")
    page.get_by_role("button", name="All").click()
    expect(figure).to_have_attribute("data-points", "40")
    box = figure.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    expect(figure).not_to_have_attribute("data-points", "40")
    page.get_by_role("button", name="All").click()
    page.get_by_text("Compare with").click()
    compared = page.get_by_role("group", name="Runs to draw over this one").get_by_role("checkbox").first
    compared.check()
    expect(figure.locator(".u-legend")).to_contain_text(compared.get_attribute("data-name") or "nothing")
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("X axis").select_option("time")
    expect(figure.locator(".u-legend")).to_contain_text(f"Time ({page.evaluate(ZONE)})")
    time = figure.locator(".u-legend .u-value").first
    expect(time).to_be_hidden()
    figure.locator(".u-over").hover()
    expect(time).to_have_text(re.compile(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"))
    expect(time).to_be_visible()
    assert seen.violations() == []


def test_numbers_are_downloaded_as_csv_and_json(seen: Watched, run_id: str) -> None:
    page = seen.open(f"/runs/{run_id}")
    for name in ("Steps (CSV)", "Steps (JSON)"):
        with page.expect_download() as download:
            page.get_by_role("link", name=name).click()
        assert download.value.path().stat().st_size > 1000
        assert f"({download.value.suggested_filename.rpartition('.')[2].upper()})" in name


def test_a_checkpoint_is_expired_and_deleted_and_each_asks_first(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.save(run_id, 1, "mine")
    page = seen.open(f"/runs/{run_id}")
    part = page.locator("#checkpoints")
    part.get_by_label("expires").select_option("86400")
    seen.answer("Change when weights/mine expires?", yes=False)
    expect(part).to_contain_text("never")
    part.get_by_label("expires").select_option("86400")
    seen.answer("Change when weights/mine expires?", yes=True)
    expect(part).to_contain_text("in 24 h")
    part.get_by_role("button", name="Publish").click()
    seen.answer("Every owner on this server", yes=True)
    expect(part).to_contain_text("public")
    with page.expect_download() as download:
        part.get_by_role("link", name="Download").click()
        seen.answer("Download weights/mine", yes=True)
    assert download.value.suggested_filename.endswith(".tar.gz")
    part.get_by_role("button", name="Delete").click()
    asked = page.get_by_role("dialog")
    expect(asked.get_by_role("button")).to_have_text(["Cancel", "Delete"])
    expect(asked.get_by_role("button", name="Delete")).to_have_css("background-color", "rgb(180, 35, 24)")
    seen.answer("Delete weights/mine (", yes=False)
    expect(part).to_contain_text("mine")
    part.get_by_role("button", name="Delete").click()
    seen.answer("This cannot be undone.", yes=True)
    expect(part).to_contain_text("Nothing saved yet")


def test_a_row_that_was_added_listens_from_the_first_moment(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    page = seen.open(f"/runs/{run_id}")
    expect(page.locator("#checkpoints")).to_contain_text("Nothing saved yet")
    page.evaluate(
        """() => {
            const part = document.getElementById("checkpoints");
            new MutationObserver((_, observer) => {
                const select = part.querySelector("select");
                if (!select) return;
                observer.disconnect();
                select.dispatchEvent(new Event("change", {bubbles: true}));
            }).observe(part, {childList: true, subtree: true});
        }"""
    )
    alice.save(run_id, 1, "mine")
    seen.answer("Change when weights/mine expires?", yes=False)


def test_a_refresh_leaves_the_keyboard_where_it_is(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.save(run_id, 1, "first")
    page = seen.open("/")
    link = page.get_by_role("link", name=run_id[:8])
    link.focus()
    other = alice.new_run()
    expect(page.get_by_role("link", name=other[:8])).to_be_visible()
    expect(link).to_be_focused()
    page = seen.open(f"/runs/{run_id}")
    delete = page.locator("#checkpoints tr", has_text="first").get_by_role("button", name="Delete")
    delete.focus()
    alice.save(run_id, 2, "second")
    expect(page.locator("#checkpoints")).to_contain_text("second")
    expect(delete).to_be_focused()
    page = seen.open("/checkpoints")
    copy = page.locator(f"[id='checkpoint-{run_id}-weights-first']").get_by_role("button", name="Copy path")
    copy.focus()
    alice.save(run_id, 3, "third")
    expect(page.locator(f"[id='checkpoint-{run_id}-weights-third']")).to_be_visible()
    expect(copy).to_be_focused()


def test_a_refresh_leaves_a_table_scrolled(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.train(run_id, range(20))
    page = seen.open(f"/runs/{run_id}")
    table = page.get_by_role("region", name="Latest operations")
    table.evaluate("element => { element.scrollTop = 150; }")
    alice.train(run_id, range(20, 21))
    expect(page.locator("#operation-optim_step-42")).to_be_attached()
    assert table.evaluate("element => element.scrollTop") >= 150


def test_what_is_on_its_way_does_not_take_the_asked_thing_away(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.save(run_id, 1, "mine")
    page = seen.open(f"/runs/{run_id}")
    part = page.locator("#checkpoints")
    part.get_by_label("expires").wait_for()
    held: list[Route] = []
    page.route("**/checkpoints", lambda route: held.append(route))
    with page.expect_request("**/checkpoints"):
        page.evaluate("() => htmx.trigger(document.getElementById('checkpoints'), 'sse:changed')")
    part.get_by_label("expires").select_option("86400")
    question = page.get_by_role("dialog")
    question.wait_for()
    with page.expect_response("**/checkpoints"):
        for route in held:
            route.continue_()
    page.unroute("**/checkpoints")
    seen.answer("Change when weights/mine expires?", yes=True)
    expect(part).to_contain_text("in 24 h")


def test_a_sample_is_opened_with_its_photograph_and_its_tokens(seen: Watched) -> None:
    page = seen.open("/samples")
    page.get_by_role("listitem").first.click()
    photo = page.get_by_role("img", name="Image 1 of the prompt")
    expect(photo).to_be_visible()
    assert photo.evaluate("image => image.complete && image.naturalWidth") > 100
    tokens = page.locator(".text.tokens span")
    assert tokens.count() > 20
    assert "nats" in (tokens.first.get_attribute("title") or "")
    assert len({tokens.nth(index).get_attribute("class") for index in range(tokens.count())}) > 2


def test_a_photograph_is_talked_about_with_two_models_side_by_side(
    seen: Watched, owners: tuple[Owner, Owner], tmp_path: Path
) -> None:
    alice, _ = owners
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    page = seen.open("/playground")
    page.get_by_label("Two models side by side").check()
    page.get_by_label("Message", exact=True).fill("What is on this photograph?")
    page.get_by_label("Image").set_input_files(tmp_path / "photo.jpg")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Send").click()
    for side in ("Conversation 1", "Conversation 2"):
        log = page.get_by_role("log", name=side)
        expect(log.get_by_role("img", name="The image that was sent")).to_be_visible()
        expect(log.locator(".assistant")).not_to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    asked = [chat.body for chat in alice.server.backend.tiny.sampler.chats[-2:]]
    assert all((body["stream"], body["seed"], body["temperature"]) == (True, 7, 1) for body in asked)
    assert all(PHOTO_IN_BASE64 in json.dumps(body["messages"]) for body in asked)
    page.get_by_role("region", name="Model 1").get_by_role("combobox").select_option("Another path…")
    page.get_by_label("Path of the weights of model 1").fill("no/such-model")
    page.get_by_label("Message", exact=True).fill("Hello?")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("log", name="Conversation 1").locator(".wrong")).to_contain_text("no/such-model")
    seen.errors.clear()  # the browser itself logs the refusal


def test_the_playground_asks_a_checkpoint_with_a_system_prompt_and_shows_how_likely_each_token_was(
    seen: Watched, owners: tuple[Owner, Owner]
) -> None:
    alice, _ = owners
    made = alice.new_run()
    alice.post("/save_weights_for_sampler", model_id=made, seq_id=1, path="asked")
    path = f"tinker://{made}/sampler_weights/asked"
    for query in (f"?model_path={path}", f"?mode=checkpoint&checkpoint={quote(path, safe='')}"):
        page = seen.open(f"/playground{query}")
        model = page.get_by_role("region", name="Model 1").get_by_role("combobox")
        expect(model).to_have_value(path)
    expect(model.locator("optgroup")).to_have_count(2)
    log, message = page.get_by_role("log", name="Conversation 1"), page.get_by_label("Message", exact=True)
    over, below = log.bounding_box(), message.bounding_box()
    assert over is not None and below is not None and over["y"] + over["height"] <= below["y"]
    page.get_by_label("System prompt").fill("Answer in verse.")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Log probabilities").check()
    message.fill("Hello?")
    page.get_by_role("button", name="Send").click()
    tokens = log.locator(".assistant span")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert (tokens.nth(3).get_attribute("title"), tokens.nth(3).get_attribute("class")) == ("-1.500 nats", "p3")
    assert log.locator(".assistant").inner_text() == ANSWER
    asked = alice.server.backend.tiny.sampler.chats[-1].body
    assert (asked["model"], asked["top_p"], asked["logprobs"]) == (path, 0.9, True)
    assert [one["role"] for one in asked["messages"]] == ["system", "user"]
    assert seen.violations() == []
    page = seen.open("/playground?model_path=tinker://of/sampler_weights/others")
    expect(page.get_by_label("Path of the weights of model 1")).to_have_value("tinker://of/sampler_weights/others")


def test_another_owners_things_are_not_there(seen: Watched, owners: tuple[Owner, Owner], run_id: str) -> None:
    _, bob = owners
    foreign = bob.new_run()
    for path in ("/", "/machine", "/samples"):
        assert foreign not in seen.open(path).content()
    page = seen.open(f"/runs/{foreign}")
    expect(page.get_by_role("heading", name="Page not found")).to_be_visible()
    seen.errors.clear()  # the browser itself logs the 404


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_fault_of_access(seen: Watched, run_id: str, scheme: Literal["light", "dark"]) -> None:
    seen.page.emulate_media(color_scheme=scheme)
    paths = {"runs": "/", "run": f"/runs/{run_id}", "checkpoints": "/checkpoints"}
    paths |= {"proof": f"/runs/{run_id}/proof", "samples": "/samples", "playground": "/playground"}
    for name, path in (paths | {"machine": "/machine"}).items():
        page = seen.open(path)
        if name == "run":
            drawn(page)
            page.locator("#checkpoints table").wait_for()
        assert seen.violations() == [], name


def test_everything_is_reached_on_a_narrow_screen(seen: Watched, run_id: str) -> None:
    seen.page.set_viewport_size(NARROW)
    for name, path in {
        "runs": "/",
        "run": f"/runs/{run_id}",
        "proof": f"/runs/{run_id}/proof",
        "checkpoints": "/checkpoints",
        "samples": "/samples",
        "playground": "/playground",
        "machine": "/machine",
    }.items():
        page = seen.open(path)
        if name == "run":
            drawn(page)
            page.locator("#checkpoints table").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], name
        bar = page.get_by_role("navigation", name="Pages", exact=True)
        for link in ("Runs", "Checkpoints", "Samples", "Playground", "Machine"):
            expect(bar.get_by_role("link", name=link)).to_be_visible()
        assert page.locator("header.top").evaluate("header => header.offsetHeight") < TWO_ROWS_PX, name


def test_the_keyboard_alone_reaches_a_run_and_deletes_a_checkpoint(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.save(run_id, 1, "mine")
    page = seen.open("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    reach(page, page.get_by_role("link", name=run_id[:8]))
    page.keyboard.press("Enter")
    delete = page.locator("#checkpoints").get_by_role("button", name="Delete")
    delete.wait_for()
    reach(page, delete)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#checkpoints")).to_contain_text("mine")
    reach(page, delete)
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#checkpoints")).to_contain_text("Nothing saved yet")


def reach(page: Page, wanted: object) -> None:
    """By Tab, in at most so many presses."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):  # type: ignore[attr-defined]
            return
    raise AssertionError("the keyboard does not get there")


def test_the_theme_is_chosen_and_kept(seen: Watched) -> None:
    page = seen.open("/")
    scheme = "() => getComputedStyle(document.documentElement).colorScheme"
    before = page.evaluate(scheme)
    page.get_by_role("button", name="Switch between light and dark").click()
    after = page.evaluate(scheme)
    assert {before, after} == {"light", "dark"}
    seen.open("/machine")
    assert page.evaluate(scheme) == after
