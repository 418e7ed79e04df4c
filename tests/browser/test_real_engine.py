"""The dashboard of a real server: runs that learn from photographs and from rewards, and chats by the real engine.

The pictures of the documentation are taken of these runs. `make pictures` writes them into `docs/pictures`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker
from playwright.sync_api import BrowserContext, Locator, Page, ViewportSize, expect
from tinker import types

from tests.browser.documented import DOCUMENTED, write
from tests.browser.pages import NARROW, Watched, drawn, place
from tests.browser.rewarded_squares import RewardedSquares
from tests.photographs import SEEING, conversation, photographs
from tests.servers import Server
from tinker_server.auth import keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NAME = "tinker-server/tiny-vl"
TITLE = "ten classes of photographs"
STEPS, MEASURED = 24, 6
"""Steps of the run, and the steps after which its held-out photographs are measured."""
REWARDED, CHOSEN = 20, 3
"""Steps of the run with rewards, and the step that is looked at."""
SPLITS = (("train", 120), ("test", 10))
"""Photographs to train on and to measure."""
FIRST_MINUTE_MS = 180_000
"""The first minute is recorded when it is over, and the page asks for it once a minute."""
WIDE: ViewportSize = {"width": 1280, "height": 860}
Picture = Callable[..., None]
"""Takes one of a page, or of a part of it, if the documentation has a picture of this name."""
OUTSIDE = """() => [...document.querySelectorAll(".card, td, th")].flatMap((box) => {
    const most = box.getBoundingClientRect(), scrolls = getComputedStyle(box).overflowY !== "visible";
    return [...box.querySelectorAll("textarea, input, select, button, .completion, small, a")]
        .map((part) => [part, part.getBoundingClientRect()])
        .filter(([, at]) => at.width && (at.right > most.right + 1 || (!scrolls && at.bottom > most.bottom + 1)))
        .map(([part]) => part.outerHTML.slice(0, 80));
})"""
"""Controls and texts that reach beyond their card or cell, unless it scrolls."""


@dataclass(frozen=True)
class Real:
    """A server with a run of alice's."""

    url: str
    key: str
    """Alice's."""
    root_key: str
    """An administrator's."""
    run_id: str
    path: str
    """The weights of the run."""
    rewarded_id: str
    """The run that learns from rewards."""
    rewards: list[float]

    def signed_in(self, context: BrowserContext, key: str | None = None) -> Watched:
        watched = Watched(context, self.url)
        watched.sign_in(key or self.key)
        return watched


@pytest.fixture
def picture(request: pytest.FixtureRequest, tmp_path: Path) -> Picture:
    """Written to `--pictures`, and else to a folder of the test."""
    folder: Path = request.config.getoption("--pictures", default=None) or tmp_path

    def take(of: Page | Locator, name: str, *, full_page: bool = False) -> None:
        if name in DOCUMENTED:
            folder.mkdir(parents=True, exist_ok=True)
            shot = of.screenshot(full_page=full_page) if isinstance(of, Page) else of.screenshot()
            write(shot, folder / f"{name}.png")

    return take


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """The base model that comes with the server learns the names of ten classes of photographs."""
    folder = tmp_path_factory.mktemp("real")
    key, root_key = keys.add(folder / "keys", "alice"), keys.add(folder / "keys", "root", is_admin=True)
    running = Server(folder / "data", {NAME: SEEING}, keys_file=folder / "keys").start()
    try:
        learn(running.base_url, key, "a first try", 3)
        training = learn(running.base_url, key, TITLE, STEPS)
        path = training.save_weights_for_sampler("for-chat").result().path
        training.save_state(f"step-{STEPS}").result()
        squares = RewardedSquares(running.base_url, key, "colours of squares, by reward")
        rewards = squares.learn(REWARDED)
        ask(running.base_url, key, path)
        yield Real(running.base_url, key, root_key, training.model_id, path, squares.training.model_id, rewards)
    finally:
        code = running.stop()
    assert code == 0, running.log.read_text()[-4000:]


def ask(url: str, key: str, path: str) -> None:
    """Sample names of six photographs, which are then on the page of samples."""
    sampler = tinker.ServiceClient(base_url=url, api_key=key).create_sampling_client(model_path=path).result()
    talk = conversation()
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[talk.end_token])
    for photo in photographs("test", 6):
        sampler.sample(talk.prompt(photo), num_samples=1, sampling_params=params).result()


def learn(url: str, key: str, name: str, steps: int) -> tinker.TrainingClient:
    """Train on ten photographs a step, and report the loss of ten others."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(NAME, rank=16, seed=1, user_metadata={"name": name}).result()
    talk = conversation()
    seen, unseen = ([talk.datum(photo) for photo in photographs(split, count)] for split, count in SPLITS)
    for step in range(steps):
        batch = training.forward_backward(seen[step % 12 :: 12], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        batch.result()
        if step % MEASURED == MEASURED - 1:
            loss = training.forward(unseen, "cross_entropy").result().metrics["loss:sum"]
            counted = sum(float(one.loss_fn_inputs["weights"].to_numpy().sum()) for one in unseen)
            body = {"step": step, "metrics": {"test/nll": loss / counted}}
            url_of_run = f"{url}/api/v1/training_runs/{training.model_id}"
            httpx.post(f"{url_of_run}/metrics", json=body, headers={"X-API-Key": key}).raise_for_status()
    return training


def test_the_pages_of_a_real_run_are_whole_in_light_dark_and_narrow(
    context: BrowserContext, real: Real, picture: Picture
) -> None:
    watched = real.signed_in(context)
    page = watched.page
    paths = {"runs": "/", "run": f"/runs/{real.run_id}", "checkpoints": "/checkpoints", "samples": "/samples"}
    for name, path in (paths | {"playground": "/playground", "machine": "/machine"}).items():
        for form, scheme, size in (("light", "light", WIDE), ("dark", "dark", WIDE), ("narrow", "light", NARROW)):
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.set_viewport_size(size)
            watched.open(path)
            if name == "run":
                assert drawn(page) == STEPS and drawn(page, "grad_norm") == STEPS
                expect(page.get_by_role("heading", name=TITLE)).to_be_visible()
                expect(page.locator("figure", has_text="test/nll")).to_be_visible()
                expect(page.locator("#checkpoints")).to_contain_text("for-chat")
            if name == "machine":
                expect(page.get_by_role("region", name=NAME).locator(".processes li")).to_have_count(2)
                drawn_day = page.locator("figure[data-measure=operations]")
                expect(drawn_day).to_have_attribute("data-seconds", re.compile(r"\d"), timeout=FIRST_MINUTE_MS)
                shown_s = int(drawn_day.get_attribute("data-seconds") or 0)
                assert 60 <= shown_s < 1800, "the plot begins when the server did"
            assert page.evaluate(OUTSIDE) == [], (name, form)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], (name, form)
            assert watched.violations() == [], (name, form)
            if form == "light":
                picture(page, name, full_page=name == "run")
    page.set_viewport_size(WIDE)
    watched.open("/samples").get_by_role("listitem").first.click()
    expect(page.get_by_role("img", name="Image 1 of the prompt")).to_be_visible()
    assert watched.elsewhere() == [] and watched.errors == []


def test_dragging_along_the_reward_shows_what_the_model_saw_and_said_in_each_step(
    context: BrowserContext, real: Real, picture: Picture
) -> None:
    assert sum(real.rewards[-3:]) > sum(real.rewards[:3]) + 0.3, real.rewards
    watched = real.signed_in(context)
    page = watched.open(f"/runs/{real.rewarded_id}")
    page.set_viewport_size(WIDE)
    assert drawn(page, "metric:reward") == REWARDED
    panel = page.get_by_role("complementary", name="The chosen step")
    page.get_by_role("heading", name="Curves").evaluate("heading => heading.scrollIntoView()")
    page.mouse.move(*place(page, 0.95, "metric:reward"))
    page.mouse.down()
    page.mouse.move(*place(page, CHOSEN / (REWARDED - 1), "metric:reward"), steps=12)
    page.mouse.up()
    expect(panel.get_by_role("heading", name=f"Step {CHOSEN}", exact=True)).to_be_visible()
    expect(panel).to_contain_text("Of the weights that this step began with.")
    photo = panel.get_by_role("img", name="Image 1 of the prompt").first
    page.wait_for_function("image => image.complete && image.naturalWidth > 50", arg=photo.element_handle())
    expect(page.locator("#marks")).to_contain_text("5 evaluations")
    picture(page, "scrubbing")
    answers = page.get_by_role("region", name="Answers of one prompt")
    assert answers.locator(".up").count() and answers.locator(".down").count()
    page.locator("#step-datums").scroll_into_view_if_needed()
    page.wait_for_function("() => [...document.querySelectorAll('#step-datums img')].every((image) => image.complete)")
    picture(page.locator("#step-datums"), "answers")
    assert watched.violations() == [] and watched.elsewhere() == [] and watched.errors == []


def test_two_models_are_asked_about_a_photograph(
    context: BrowserContext, real: Real, tmp_path: Path, picture: Picture
) -> None:
    watched = real.signed_in(context)
    page = watched.open("/playground")
    (tmp_path / "photo.jpg").write_bytes(photographs("test", 3)[2].jpeg)
    page.get_by_label("Two models side by side").check()
    page.get_by_role("region", name="Model 2").get_by_role("combobox").select_option(real.path)
    page.get_by_label("Log probabilities").check()
    page.get_by_label("Message", exact=True).fill("What is the name of the subject in this photo?")
    page.get_by_label("Maximum tokens").fill("16")
    page.get_by_label("Image").set_input_files(tmp_path / "photo.jpg")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
    for side in ("Conversation 1", "Conversation 2"):
        answer = page.get_by_role("log", name=side).locator(".assistant")
        expect(answer).not_to_be_empty()
        expect(answer).not_to_have_class("wrong")
        expect(answer.locator("span").first).to_have_attribute("title", re.compile(r"^-\d+\.\d{3} nats"))
    picture(page, "playground", full_page=True)
    assert watched.elsewhere() == [] and watched.errors == []


def test_an_administrator_sees_all_owners_and_unloads_a_run(context: BrowserContext, real: Real) -> None:
    watched = real.signed_in(context, real.root_key)
    page = watched.page
    page.get_by_role("link", name="Owners").click()
    row = page.get_by_role("region", name="Runs of all owners").get_by_role("row", name=re.compile(real.run_id[:8]))
    expect(row.first).to_contain_text("alice")
    assert watched.violations() == []
    page.get_by_role("button", name=f"Unload {real.run_id}").click()
    watched.answer("(alice)? Its next operation brings it back.", yes=True)
    expect(page.get_by_role("button", name=f"Unload {real.run_id}")).to_have_count(0)
    assert watched.elsewhere() == [] and watched.errors == []
