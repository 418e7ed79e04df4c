"""A run's page in a browser: the client's metrics, its name, several runs over one another, and hints."""

import re
from pathlib import Path
from xml.etree import ElementTree

from playwright.sync_api import expect

from tests.browser.learning import LearningBackend
from tests.browser.pages import NARROW, Watched, drawn, place
from tests.dashboard import Owner
from tests.fake_server import forward_backward_body


def test_the_clients_metrics_come_first_and_the_others_when_they_are_opened(
    seen: Watched, owners: tuple[Owner, Owner]
) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.train(run_id, range(3))
    for step in range(4):
        metrics = {"env/all/reward/total": step / 10, "test/accuracy": 0.5, "time/total": 3.0 + step}
        assert alice.report(run_id, step, **metrics).status_code == 204
    page = seen.open(f"/runs/{run_id}")
    reward = page.locator('figure[data-curve="metric:env/all/reward/total"]')
    expect(reward).to_have_attribute("data-points", "4")
    expect(reward).to_have_attribute("data-last", "0.3")
    page.locator("figure[data-curve=loss]").wait_for()
    assert page.locator("figure").first.get_attribute("data-curve") == "metric:env/all/reward/total"
    rest = page.locator('figure[data-curve="metric:time/total"]')
    expect(rest).to_have_count(0)
    page.get_by_text("More of your metrics").click()
    expect(rest).to_have_attribute("data-last", "6")
    alice.report(run_id, 4, **{"env/all/reward/total": 0.9})
    expect(reward).to_have_attribute("data-last", "0.9")
    assert seen.violations() == []
    page.set_viewport_size(NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_ticked_runs_are_drawn_over_one_another_with_their_names(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    made = [alice.new_run() for _ in range(3)]
    name, tag = f"small rank {made[0][:8]}", f"sweep-{made[0][:8]}"
    for number, run_id in enumerate(made):
        alice.train(run_id, range(4 + number))
        alice.report(run_id, 0, reward=float(number))
    page = seen.open(f"/runs/{made[0]}")
    page.get_by_text("Name, tags and notes").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Tags").fill(f"{tag}, vision")
    page.get_by_label("Notes").fill("with 8 samples")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    expect(page.get_by_text("with 8 samples").first).to_be_visible()
    page.get_by_role("link", name=tag).click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Search runs").fill("")
    expect(page.get_by_label(f"Compare {made[1][:8]}")).to_be_visible()
    button = page.get_by_role("button", name="Compare")
    expect(button).to_be_disabled()
    page.get_by_label(f"Compare {name}").check()
    page.get_by_label(f"Compare {made[1][:8]}").check()
    with page.expect_response("**/runs?*"):
        page.evaluate("document.activeElement.blur(); htmx.trigger(document.getElementById('runs'), 'sse:changed')")
    expect(page.get_by_label(f"Compare {name}")).to_be_checked()
    button.click()
    expect(page).to_have_url(re.compile("with="))
    names = page.locator("#compared li")
    expect(names).to_have_count(2)
    legend = page.locator("figure[data-curve=loss] .u-legend")
    for named in (name, made[1][:8]):
        expect(names.filter(has_text=named)).to_have_count(1)
        expect(legend).to_contain_text(named)
    expect(page.locator('figure[data-curve="metric:reward"] .u-legend')).to_contain_text(name)
    assert seen.violations() == []
    page.get_by_text("Compare with").click()
    page.get_by_role("checkbox", name=made[2][:8]).check()
    expect(names).to_have_count(3)
    page.reload()
    expect(names).to_have_count(3)


def test_the_learning_rate_is_not_smoothed_and_a_log_axis_is_chosen(
    seen: Watched, owners: tuple[Owner, Owner], run_id: str
) -> None:
    page = seen.open(f"/runs/{run_id}")
    page.locator("figure[data-curve=learning_rate] canvas").wait_for()
    labels = page.locator("figure[data-curve=learning_rate] .u-legend .u-label")
    assert labels.all_text_contents() == ["Step", "value"]
    assert page.locator("figure[data-curve=loss] .u-legend .u-label").all_text_contents() == ["Step", "raw", "smooth"]
    before = page.locator("figure[data-curve=loss] canvas").evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("Log scale").check()
    page.wait_for_function(
        "before => document.querySelector('figure[data-curve=loss] canvas')?.toDataURL() !== before", arg=before
    )
    expect(page.locator("figure[data-curve=loss]")).to_have_attribute("data-points", "40")


def test_a_run_without_advantages_says_that_nothing_is_learned(
    seen: Watched, owners: tuple[Owner, Owner], learning: LearningBackend
) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.train(run_id, range(2))
    page = seen.open(f"/runs/{run_id}")
    expect(page.locator(".hint")).to_have_count(0)
    learning.trains = False
    try:
        alice.train(run_id, range(2, 4))
    finally:
        learning.trains = True
    expect(page.locator(".hint")).to_contain_text("All advantages of the last 2 batches are 0")
    assert seen.violations() == []


def test_a_metric_that_is_no_longer_important_leaves_the_first_curves(
    seen: Watched, owners: tuple[Owner, Owner]
) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.report(run_id, 0, **{"time/total": 3.0})
    page = seen.open(f"/runs/{run_id}")
    time = page.locator('figure[data-curve="metric:time/total"]')
    expect(time).to_have_attribute("data-points", "1")
    alice.report(run_id, 1, **{"time/total": 4.0, "reward": 0.5})
    expect(page.locator('figure[data-curve="metric:reward"]')).to_have_attribute("data-points", "1")
    expect(time).to_have_count(0)
    page.get_by_text("More of your metrics").click()
    expect(time).to_have_attribute("data-points", "2")
    assert seen.errors == []


def test_curves_go_on_when_a_compared_run_is_deleted(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id, other = alice.new_run(), alice.new_run()
    for made in (run_id, other):
        alice.train(made, range(2))
    page = seen.open(f"/runs/{run_id}?with={other}")
    names = page.locator("#compared li")
    expect(names).to_have_count(2)
    assert alice.sign_in().change("POST", "/runs/delete", run=other).status_code == 200
    alice.train(run_id, range(2, 5))
    expect(page.locator("figure[data-curve=loss]")).to_have_attribute("data-points", "5")
    expect(page.locator("#problem")).to_contain_text(f"could not be fetched, and are not drawn: {other[:8]}")
    expect(page.locator("#compared")).to_be_hidden()
    seen.errors.clear()  # the browser itself logs the refusals


def test_the_smoothing_fetches_nothing(seen: Watched, run_id: str) -> None:
    page = seen.open(f"/runs/{run_id}")
    drawn(page)
    expect(page.locator("#step-shown")).to_contain_text("Step 39")
    page.wait_for_load_state("networkidle")
    num_requests = len(seen.requests)
    before = page.locator("figure[data-curve=loss] canvas").evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("Smoothing").fill("0.9")
    page.wait_for_function(
        "before => document.querySelector('figure[data-curve=loss] canvas').toDataURL() !== before", arg=before
    )
    page.evaluate("fetch(document.body.dataset.base + '/static/icon.svg')")
    assert [url.rpartition("/")[2] for url in seen.requests[num_requests:]] == ["icon.svg"]


def test_ticks_and_legends_tell_numbers_apart_that_are_close(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    for step in range(5):
        metrics = {"reward": 0.69314 + step / 100_000, "test/score": 1_234_500.0 + 25 * step}
        assert alice.report(run_id, step, **metrics).status_code == 204
    page = seen.open(f"/runs/{run_id}")
    for name, last in (("reward", "0.6932"), ("test/score", "1234600")):
        figure = page.locator(f'figure[data-curve="metric:{name}"]')
        figure.scroll_into_view_if_needed()
        assert drawn(page, f"metric:{name}") == 5
        page.mouse.move(*place(page, 0.99, f"metric:{name}"))
        expect(figure.locator(".u-legend .u-value").nth(1)).to_have_text(last)
        figure.get_by_label(f"Tools of {name}").click()
        with page.expect_download() as download:
            figure.get_by_role("button", name="Save as SVG").click()
        ticks = ticks_of(download.value.path())
        assert len(ticks) > 2 and len(ticks) == len(set(ticks)), ticks


def ticks_of(path: Path) -> list[float]:
    """Numbers along the y axis of a saved curve."""
    texts = [text for text in ElementTree.parse(path).getroot() if text.tag.endswith("text")]
    return [float(text.text or "") for text in texts if text.get("text-anchor") == "end"]


def test_the_last_known_value_is_told_with_its_step(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    run_id = alice.new_run()
    alice.train(run_id, range(3))
    alice.train_on(forward_backward_body(run_id, 7))  # a step that has not ended has no learning rate
    page = seen.open(f"/runs/{run_id}")
    assert drawn(page) == 4
    rate = page.locator("figure[data-curve=learning_rate]").get_by_role("img")
    expect(rate).to_have_attribute("aria-label", "Learning rate: 3 points, the last 0.25 at step 2")
