"""A run's curves in a browser: marks, one grid, a range in the address, full screen, and pictures of a curve."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.learning import LearningBackend
from tests.browser.pages import NARROW, Watched, drawn
from tests.dashboard import Owner, with_keys

STEPS = 20
Erin = tuple[Owner, str]


@pytest.fixture(scope="module")
def erin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Erin]:
    """Erin, whose run saves weights in each step, is evaluated every fifth, and reports a reward."""
    server, (key,) = with_keys(tmp_path_factory.mktemp("tools"), "erin", backend=LearningBackend())
    with Owner(server, key) as owner:
        run_id = owner.new_run()
        owner.train_and_sample(run_id, range(STEPS))
        for step in range(STEPS):
            owner.report(run_id, step, reward=step / STEPS, **({"test/accuracy": 0.5} if step % 5 == 0 else {}))
        yield owner, run_id
    server.stop()


@pytest.fixture
def page(context: BrowserContext, erin: Erin) -> Iterator[Page]:
    watched = Watched(context, erin[0].server.url)
    watched.sign_in(erin[0].key)
    yield watched.page
    assert watched.elsewhere() == [] and watched.errors == []


def open_run(page: Page, erin: Erin, query: str = "") -> None:
    page.goto(f"{erin[0].server.url}/runs/{erin[1]}{query}")
    drawn(page)


def test_a_restart_of_the_trainer_alone_is_a_mark(page: Page, erin: Erin) -> None:
    owner, _ = erin
    run_id = owner.new_run()
    owner.train(run_id, range(2))
    owner.server.restart_trainer()
    owner.train(run_id, range(2, 4))
    open_run(page, (owner, run_id))
    expect(page.locator("#marks")).to_have_text(re.compile(r"^\s*⁞ 1 restart of the trainer\s*$"), use_inner_text=True)
    places = page.evaluate("async () => (await import('/static/marks.js')).placesOf(({at}) => at)")
    assert [place["kind"] for place in places] == ["trainer_restarts"]


def test_saves_and_evaluations_are_marked_and_named(page: Page, erin: Erin) -> None:
    open_run(page, erin)
    expect(page.locator("#marks")).to_contain_text(f"{STEPS} saves")
    expect(page.locator("#marks")).to_contain_text("4 evaluations")
    expect(page.locator("[data-mark=server_restarts]")).to_be_hidden()
    expect(page.locator("[data-mark=trainer_restarts]")).to_be_hidden()
    inside = """() => {
        const canvas = document.querySelector("figure[data-curve=loss] canvas"), ctx = canvas.getContext("2d");
        const good = getComputedStyle(document.documentElement).getPropertyValue("--good").trim();
        const [r, g, b] = good.match(/[0-9a-f]{2}/g).map((digits) => parseInt(digits, 16));
        const {data} = ctx.getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) count += data[at] === r && data[at + 1] === g && data[at + 2] === b;
        return count;
    }"""
    page.wait_for_function(f"({inside})() > 300")


def test_the_clients_and_the_servers_metrics_are_in_one_grid(page: Page, erin: Erin) -> None:
    open_run(page, erin)
    boxes = page.locator(".plots figure").evaluate_all(
        "all => all.map(one => [one.getBoundingClientRect().left, one.getBoundingClientRect().top])"
    )
    names = page.locator(".plots figure").evaluate_all("all => all.map(one => one.dataset.curve)")
    assert [name.startswith("metric:") for name in names[:3]] == [True, True, False]
    assert boxes[0][1] == boxes[1][1] and boxes[2][0] == boxes[0][0]
    tops = {top for _, top in boxes}
    assert len(tops) == -(-len(boxes) // 2)


def test_a_range_is_typed_and_the_address_keeps_it(page: Page, erin: Erin) -> None:
    open_run(page, erin)
    figure = page.locator("figure[data-curve=loss]")
    page.get_by_label("Steps", exact=True).fill("5")
    page.get_by_label("to", exact=True).fill("9")
    page.keyboard.press("Enter")
    expect(figure).to_have_attribute("data-points", "5")
    expect(page).to_have_url(re.compile(r"\?first=5&last=9$"))
    page.reload()
    expect(figure).to_have_attribute("data-points", "5")
    expect(page.get_by_label("Steps", exact=True)).to_have_value("5")
    page.get_by_role("button", name="All").click()
    expect(figure).to_have_attribute("data-points", str(STEPS))
    expect(page).not_to_have_url(re.compile("first="))


def test_a_curve_is_saved_as_png_and_svg(page: Page, erin: Erin) -> None:
    open_run(page, erin)
    figure = page.locator("figure[data-curve=loss]")
    for kind in ("PNG", "SVG"):
        figure.get_by_label("Tools of Loss per token").click()
        with page.expect_download() as download:
            figure.get_by_role("button", name=f"Save as {kind}").click()
        assert download.value.suggested_filename == f"Loss-per-token.{kind.lower()}"
        path = download.value.path()
        if kind == "PNG":
            with Image.open(path) as image:
                assert (
                    image.width > 250 and image.height > 190 and len(image.convert("RGB").getcolors(1 << 20) or []) > 10
                )
        else:
            root = ElementTree.parse(path).getroot()
            lines = [one for one in root if one.tag.endswith("polyline")]
            assert [len(one.attrib["points"].split()) for one in lines] == [STEPS, STEPS]
            texts = [one.text for one in root if one.tag.endswith("text")]
            assert texts[0] == "Loss per token" and {"0", "10"} <= set(texts)


def test_a_curve_fills_the_screen_and_goes_back(page: Page, erin: Erin) -> None:
    open_run(page, erin)
    figure = page.locator("figure[data-curve=loss]")
    before = figure.locator("canvas").evaluate("canvas => canvas.height")
    figure.get_by_label("Tools of Loss per token").click()
    figure.get_by_role("button", name="Full screen").click()
    page.wait_for_function(
        "before => document.querySelector('figure[data-curve=loss] canvas').height > 2 * before", arg=before
    )
    page.evaluate("document.exitFullscreen()")
    page.wait_for_function(
        "before => document.querySelector('figure[data-curve=loss] canvas').height === before", arg=before
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_curves_are_whole_in_every_size(
    page: Page, erin: Erin, scheme: Literal["light", "dark"], request: pytest.FixtureRequest, context: BrowserContext
) -> None:
    watched = Watched(context, erin[0].server.url)
    watched.page.emulate_media(color_scheme=scheme)
    folder: Path | None = request.config.getoption("--pictures")
    for width in (1280, NARROW["width"]):
        watched.page.set_viewport_size({"width": width, "height": 860})
        open_run(watched.page, erin)
        expect(watched.page.locator("#marks")).to_be_visible()
        watched.page.locator("figure[data-curve=loss]").get_by_label("Tools of Loss per token").click()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
        assert watched.violations() == []
        if folder is not None:
            watched.page.screenshot(path=folder / f"curves-{scheme}-{width}.png")
