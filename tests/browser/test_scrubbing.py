"""The run's page as one place: dragging along a curve shows the samples, pictures and token colours of that step."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser.learning import LearningBackend
from tests.browser.pages import IMAGE, NARROW, Watched, drawn, place
from tests.dashboard import Owner, with_keys
from tests.fake_server import policy_body

STEPS = 8
Dora = tuple[Owner, str, str]


@pytest.fixture(scope="module")
def dora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dora]:
    """Dora, whose first run has two samples about a photograph in each step, and whose second trains on groups."""
    backend = LearningBackend()
    server, (key,) = with_keys(tmp_path_factory.mktemp("scrub"), "dora", backend=backend, samples_shown=4)
    with Owner(server, key) as owner:
        run_id = owner.new_run()
        owner.train_and_sample(run_id, range(STEPS), IMAGE, tokens=backend.question)
        for step in range(STEPS):
            owner.report(run_id, step, reward=step / STEPS)
        group_id = owner.new_run()
        for step in range(3):
            answers = [(backend.answer[: 8 + 3 * number], number - 1.5 + step / 10) for number in range(4)]
            owner.train_on(policy_body(group_id, 2 * step + 1, backend.question, answers))
            owner.post("/optim_step", model_id=group_id, seq_id=2 * step + 2, adam_params={"learning_rate": 0.25})
        yield owner, run_id, group_id
    server.stop()


@pytest.fixture
def scrubbed(context: BrowserContext, dora: Dora) -> Iterator[Watched]:
    owner = dora[0]
    watched = Watched(context, owner.server.url)
    watched.sign_in(owner.key)
    yield watched
    assert watched.elsewhere() == [] and watched.errors == []


def panel(page: Page) -> Locator:
    return page.get_by_role("complementary", name="The chosen step")


def test_dragging_along_a_curve_shows_each_steps_samples_beside_it(scrubbed: Watched, dora: Dora) -> None:
    page = scrubbed.open(f"/runs/{dora[1]}")
    drawn(page)
    expect(panel(page)).to_contain_text(f"Step {STEPS - 1}")
    page.locator("figure[data-curve=loss]").scroll_into_view_if_needed()
    page.mouse.move(*place(page, 0.01))
    page.mouse.down()
    expect(panel(page).get_by_role("heading", name="Step 0", exact=True)).to_be_visible()
    expect(panel(page)).to_contain_text("that this step began with")
    first = panel(page).locator("li a").first.get_attribute("href")
    page.mouse.move(*place(page, 3 / (STEPS - 1)), steps=8)
    page.mouse.up()
    expect(panel(page).get_by_role("heading", name="Step 3", exact=True)).to_be_visible()
    expect(panel(page).locator("li")).to_have_count(2)
    assert panel(page).locator("li a").first.get_attribute("href") != first
    photo = panel(page).get_by_role("img", name="Image 1 of the prompt").first
    page.wait_for_function("image => image.complete && image.naturalWidth > 50", arg=photo.element_handle())
    assert len(set(panel(page).locator(".tokens span").evaluate_all("all => all.map(one => one.className)"))) > 3
    expect(page).to_have_url(re.compile(r"\?step=3$"))
    expect(page.locator("figure[data-curve=loss]")).to_have_attribute("data-points", str(STEPS))  # nothing was zoomed
    page.reload()
    expect(panel(page).get_by_role("heading", name="Step 3", exact=True)).to_be_visible()
    page.mouse.move(*place(page, 0.9))  # the pointer alone chooses nothing
    expect(page).to_have_url(re.compile(r"\?step=3$"))


def test_the_keyboard_chooses_steps_and_goes_back_to_the_latest(scrubbed: Watched, dora: Dora) -> None:
    page = scrubbed.open(f"/runs/{dora[1]}?step=5")
    slider = page.get_by_role("slider", name="Step")
    expect(slider).to_have_value("5")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(panel(page).get_by_role("heading", name="Step 4", exact=True)).to_be_visible()
    page.keyboard.press("Home")
    expect(panel(page).get_by_role("heading", name="Step 0", exact=True)).to_be_visible()
    expect(slider).to_have_attribute("aria-valuetext", f"step 0 of {STEPS - 1}")
    expect(page).to_have_url(re.compile(r"\?step=0$"))
    panel(page).get_by_role("button", name="Later step with samples").click()
    expect(panel(page).get_by_role("heading", name="Step 1", exact=True)).to_be_visible()
    page.get_by_role("button", name="Latest").click()
    expect(panel(page).get_by_role("heading", name=f"Step {STEPS - 1}", exact=True)).to_be_visible()
    expect(page).not_to_have_url(re.compile("step="))


def test_the_arrows_lead_on_to_the_samples_after_the_newest_step_and_back(scrubbed: Watched, dora: Dora) -> None:
    owner = dora[0]
    run_id = owner.new_run()
    owner.train_and_sample(run_id, range(2))
    saved = owner.post("/save_weights_for_sampler", model_id=run_id, seq_id=7, path="after")
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    owner.post("/asample", model_path=saved["path"], prompt=prompt, sampling_params={"max_tokens": 4})
    page = scrubbed.open(f"/runs/{run_id}?step=0")
    drawn(page)
    later = panel(page).get_by_role("button", name="Later step with samples")
    later.click()
    expect(panel(page)).to_contain_text("Of the weights that this step began with")
    expect(page).to_have_url(re.compile(r"\?step=1$"))
    expect(panel(page).locator("li")).to_have_count(2)
    later.click()
    expect(panel(page)).to_contain_text("Of the weights after this step")
    expect(panel(page).locator("li")).to_have_count(1)
    expect(page).not_to_have_url(re.compile("step="))
    expect(later).to_be_disabled()
    panel(page).get_by_role("button", name="Earlier step with samples").click()
    expect(panel(page)).to_contain_text("Of the weights that this step began with")
    expect(page).to_have_url(re.compile(r"\?step=1$"))


def test_a_finger_chooses_a_step(scrubbed: Watched, dora: Dora) -> None:
    page = scrubbed.open(f"/runs/{dora[1]}")
    drawn(page)
    (x, y), (there, _) = place(page, 0.01), place(page, 2 / (STEPS - 1))
    over = page.locator("figure[data-curve=loss] .u-over")
    over.evaluate("over => { over.setPointerCapture = () => {}; }")  # there is no finger to capture
    finger = {"pointerId": 7, "pointerType": "touch", "isPrimary": True, "bubbles": True, "clientY": y}
    over.dispatch_event("pointerdown", {**finger, "clientX": x, "button": 0})
    over.dispatch_event("pointermove", {**finger, "clientX": there})
    over.dispatch_event("pointerup", finger)
    expect(panel(page).get_by_role("heading", name="Step 2", exact=True)).to_be_visible()
    assert over.evaluate("over => getComputedStyle(over).touchAction") == "pan-y"


def test_a_step_is_chosen_on_the_axis_of_time_too(scrubbed: Watched, dora: Dora) -> None:
    page = scrubbed.open(f"/runs/{dora[1]}")
    drawn(page)
    page.get_by_label("X axis").select_option("time")
    drawn(page)
    page.locator("figure[data-curve=loss]").scroll_into_view_if_needed()
    page.mouse.move(*place(page, 0.001))
    page.mouse.down()
    page.mouse.up()
    expect(panel(page).get_by_role("heading", name="Step 0", exact=True)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chosen_step_is_whole_in_every_size(
    scrubbed: Watched, dora: Dora, scheme: Literal["light", "dark"], request: pytest.FixtureRequest
) -> None:
    page = scrubbed.page
    page.emulate_media(color_scheme=scheme)
    folder: Path | None = request.config.getoption("--pictures")
    for width in (1280, NARROW["width"]):
        page.set_viewport_size({"width": width, "height": 860})
        scrubbed.open(f"/runs/{dora[1]}?step=3")
        drawn(page)
        expect(panel(page).locator("li")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert scrubbed.violations() == []
        if folder is not None:
            page.screenshot(path=folder / f"step-{scheme}-{width}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_answers_of_a_prompt_are_in_a_row_by_advantage_with_what_the_step_does_to_their_tokens(
    scrubbed: Watched, dora: Dora, scheme: Literal["light", "dark"], request: pytest.FixtureRequest
) -> None:
    page = scrubbed.page
    page.emulate_media(color_scheme=scheme)
    folder: Path | None = request.config.getoption("--pictures")
    scrubbed.open(f"/runs/{dora[2]}?step=1")
    answers = page.get_by_role("region", name="Answers of one prompt").get_by_role("article")
    expect(answers).to_have_count(4)
    assert [text.split()[1] for text in answers.all_inner_texts()] == ["+1.6", "+0.6", "-0.4", "-1.4"]
    tops = answers.evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    assert answers.first.locator(".up").count() > 10 and answers.first.locator(".down").count() == 0
    assert answers.last.locator(".down").count() > 5 and answers.last.locator(".up").count() == 0
    slider = page.get_by_role("slider", name="Step")
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(answers.first).to_contain_text("+1.7")
    page.set_viewport_size({"width": 1280, "height": 1400})
    if folder is not None:
        page.screenshot(path=folder / f"group-{scheme}-1280.png", full_page=True)
    assert scrubbed.violations() == []
    page.set_viewport_size(NARROW)
    lefts = answers.evaluate_all("all => all.map(one => one.getBoundingClientRect().left)")
    assert len(set(lefts)) == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert scrubbed.violations() == []
    if folder is not None:
        page.screenshot(path=folder / f"group-{scheme}-400.png", full_page=True)
