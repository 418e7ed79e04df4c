"""The table of runs in a browser: sorted, filtered, with chosen columns, trends and groups; archived and deleted."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import BrowserContext, expect

from tests.browser.learning import LearningBackend
from tests.browser.pages import NARROW, Watched
from tests.dashboard import Owner, with_keys


@pytest.fixture(scope="module")
def carol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """Carol, whose three runs end with rewards of 0.3, 0.9 and 0.6."""
    server, made = with_keys(tmp_path_factory.mktemp("table"), "carol", backend=LearningBackend())
    with Owner(server, made[0]) as carol:
        make_runs(carol)
        yield carol
    server.stop()


def make_runs(carol: Owner) -> None:
    for number, last in enumerate((0.3, 0.9, 0.6)):
        run_id = carol.new_run({"lr": "1e-4" if number else "1e-3", "name": f"run {number}"})
        carol.train(run_id, range(6))
        for step in range(6):
            carol.report(run_id, step, **{"env/all/reward/total": last * step / 5, "test/accuracy": 0.5})


@pytest.fixture
def table(context: BrowserContext, carol: Owner) -> Watched:
    watched = Watched(context, carol.server.url)
    watched.sign_in(carol.key)
    return watched


def names(watched: Watched) -> list[str]:
    return watched.page.locator("tbody th > a").all_inner_texts()


def test_runs_are_sorted_and_filtered_by_a_metric_and_the_address_keeps_it(table: Watched) -> None:
    page = table.page
    assert names(table) == ["run 2", "run 1", "run 0"]
    page.get_by_role("columnheader", name="env/all/reward/total").get_by_role("link").click()
    expect(page.locator("tbody th > a").first).to_have_text("run 1")
    assert names(table) == ["run 1", "run 2", "run 0"]
    expect(page.locator("svg.spark").first).to_be_visible()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("reward")
    page.get_by_label("Search runs").fill("env/all/reward/total>0.5")
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page).to_have_url(re.compile("sort=-env"))
    page.reload()
    assert names(table) == ["run 1", "run 2"]
    assert table.violations() == [] and table.errors == [] and table.elsewhere() == []


def test_columns_are_chosen_and_stay_in_the_address(table: Watched) -> None:
    page = table.page
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("group", name="Metrics to show").get_by_label("Gradient norm").check()
    expect(page.get_by_role("columnheader", name="Gradient norm")).to_be_visible()
    page.reload()
    expect(page.get_by_role("columnheader", name="Gradient norm")).to_be_visible()
    expect(page.get_by_role("columnheader", name="env/all/reward/total")).to_be_visible()
    page.get_by_text("Columns", exact=True).click()
    page.get_by_role("group", name="Metrics to show").get_by_label("Gradient norm").uncheck()
    expect(page.get_by_role("columnheader", name="Gradient norm")).to_have_count(0)


def test_groups_have_means_and_open_their_runs(table: Watched) -> None:
    page = table.page
    page.get_by_label("Group by").select_option("lr")
    row = page.get_by_role("region", name="Groups of runs").get_by_role("row", name="1e-4")
    expect(row).to_contain_text("0.75 ± 0.15")
    expect(page).to_have_url(re.compile("group=lr"))
    assert table.violations() == []
    row.get_by_role("link", name="1e-4", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(2)
    assert names(table) == ["run 2", "run 1"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_table_is_whole_in_every_size(
    table: Watched, scheme: Literal["light", "dark"], request: pytest.FixtureRequest
) -> None:
    page = table.page
    page.emulate_media(color_scheme=scheme)
    folder: Path | None = request.config.getoption("--pictures")
    for width in (1280, NARROW["width"]):
        page.set_viewport_size({"width": width, "height": 860})
        table.open("/?sort=-env/all/reward/total")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if folder is not None:
            page.screenshot(path=folder / f"runs-{scheme}-{width}.png", full_page=True)
    assert table.violations() == []


def test_compared_runs_are_drawn_as_their_mean_and_band_beside_their_settings(
    table: Watched, request: pytest.FixtureRequest
) -> None:
    page = table.page
    page.goto(f"{table.url}/?group=lr")
    page.get_by_role("link", name="Mean curves of 1e-4").click()
    figure = page.locator("figure[data-curve='metric:env/all/reward/total']")
    expect(figure.locator(".u-legend")).to_contain_text("mean of 2")
    expect(page.get_by_label("Mean and band")).to_be_checked()
    drawn = figure.locator("canvas")
    before = drawn.evaluate("canvas => canvas.toDataURL()")
    differences = page.get_by_role("region", name="Differences of settings")
    expect(differences).to_contain_text("seed")
    folder: Path | None = request.config.getoption("--pictures")
    if folder is not None:
        page.screenshot(path=folder / "band.png", full_page=True)
    page.get_by_label("Mean and band").uncheck()
    expect(figure.locator(".u-legend")).not_to_contain_text("mean of 2")
    assert drawn.evaluate("canvas => canvas.toDataURL()") != before
    expect(page).not_to_have_url(re.compile("band="))
    assert table.violations() == []
    page.set_viewport_size(NARROW)
    page.wait_for_function("document.documentElement.scrollWidth <= 400")


def test_the_mean_and_band_of_lines_are_those_of_their_values(table: Watched) -> None:
    found = table.page.evaluate(
        """async () => {
            const { meanAndBand } = await import("/static/bands.js");
            return meanAndBand([[[0, 1, 2], [1, null, 3]], [[0, 2, 4], [3, 5, 7]]]);
        }"""
    )
    assert found == [[0, 2, 4], [2, 4, 7], [1, 3, 7], [3, 5, 7]]


def test_runs_are_archived_restored_and_deleted(table: Watched) -> None:
    page = table.page
    page.get_by_label("Compare run 0").check()
    page.get_by_role("button", name="Archive").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Archived runs").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Compare run 0").check()
    page.get_by_role("button", name="Restore").click()
    expect(page.locator("#runs")).to_contain_text("No run is archived")
    page.get_by_role("link", name="Back to the list").click()
    page.get_by_label("Compare run 0").check()
    page.get_by_role("button", name="Delete").click()
    table.answer("Delete the selected runs", yes=True)
    expect(page.locator("tbody tr")).to_have_count(2)
    assert "run 0" not in names(table)
    assert table.errors == []
