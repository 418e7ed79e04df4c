"""One browser and one server for the tests of this folder. Pictures are taken only where they are asked for."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

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
