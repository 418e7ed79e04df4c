"""One browser and one server for the tests of this folder. Pictures are taken only where they are asked for."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from tests.browser.learning import LearningBackend
from tests.browser.pages import IMAGE, Watched
from tests.dashboard import Owner, with_keys

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = 30_000
"""Beside an engine and another test's processes, on two cores, five seconds are soon gone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", type=Path, default=None, help="a folder that pictures of the pages are written to")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Debian's chromium, without a window."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: .ci/chromium.sh installs Debian's")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], timeout=60_000
        )
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser of somebody who has not been here. It may not wait forever for anything."""
    made = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True, reduced_motion="reduce")
    made.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def learning() -> LearningBackend:
    return LearningBackend()


@pytest.fixture(scope="module")
def owners(learning: LearningBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    """Alice, who trains; and Bob, who has a run of his own."""
    server, made = with_keys(tmp_path_factory.mktemp("browser"), "alice", "bob", backend=learning)
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        yield alice, bob
    server.stop()


@pytest.fixture(scope="module")
def run_id(owners: tuple[Owner, Owner], learning: LearningBackend) -> str:
    """A run of Alice's, with a checkpoint and a sample with a photograph."""
    alice, bob = owners
    bob.new_run()
    alice.train(alice.new_run(), range(6))
    run_id = alice.new_run()
    alice.train(run_id, range(40))
    alice.save(run_id, 81, "step-40")
    alice.sample(IMAGE, tokens=learning.question)
    return run_id


@pytest.fixture
def seen(context: BrowserContext, owners: tuple[Owner, Owner], run_id: str) -> Iterator[Watched]:
    """Alice's browser, signed in. After the test, no request has left the machine and no error has occurred."""
    alice, _ = owners
    watched = Watched(context, alice.server.url)
    watched.sign_in(alice.key)
    yield watched
    assert watched.elsewhere() == []
    assert watched.errors == []
