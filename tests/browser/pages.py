"""Records a browser page's requests and errors while it is open, and the faults that axe finds."""

import base64
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Page, ViewportSize

from tests.photographs import photographs

PHOTO = photographs("test", 3)[2].jpeg
IMAGE = {"type": "image", "format": "jpeg", "data": base64.b64encode(PHOTO).decode()}
NARROW: ViewportSize = {"width": 400, "height": 800}
AXE = Path(__file__).parent / "vendor/axe.min.js"
SERIOUS = ("serious", "critical")
SCHEMES_INSIDE = ("data", "blob")


class Watched:
    """A page, whose requests, console and errors are kept."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.page: Page = context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _said(self, said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            self.errors.append(said.text)

    def open(self, path: str = "/") -> Page:
        self.page.goto(f"{self.url}{path}", wait_until="load")
        return self.page

    def sign_in(self, key: str) -> Page:
        self.open()
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("heading", name="Runs", exact=True).wait_for()
        return self.page

    def sign_out(self) -> None:
        self.page.get_by_role("button", name="Sign out").click()
        self.page.get_by_label("API key").wait_for()  # opening another page earlier would end the request

    def answer(self, question: str, *, yes: bool) -> None:
        """Questions that the page asks before a change."""
        asked = self.page.get_by_role("dialog")
        asked.wait_for()
        assert question in asked.inner_text()
        asked.locator("button[value=yes]" if yes else "button[value=no]").click()
        asked.wait_for(state="hidden")

    def elsewhere(self) -> list[str]:
        """Requests that left the server."""
        own = urlsplit(self.url).netloc
        outside = [one for one in self.requests if urlsplit(one).scheme not in SCHEMES_INSIDE]
        return [one for one in outside if urlsplit(one).netloc != own]

    def violations(self) -> list[str]:
        """Return the serious faults that axe finds. The browser injects it, for the page allows no foreign script."""
        source = AXE.read_text()
        self.page.evaluate("source => { (0, eval)(source); }", source)
        found: dict[str, Any] = self.page.evaluate("() => axe.run({resultTypes: ['violations']})")
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in SERIOUS
        ]


def drawn(page: Page, curve: str = "loss") -> int:
    """Points of a curve, once it is there."""
    figure = page.locator(f"figure[data-curve='{curve}']")
    figure.locator("canvas").wait_for()
    return int(figure.get_attribute("data-points") or 0)


def place(page: Page, part: float, curve: str = "loss") -> tuple[float, float]:
    """A place on a curve, as a part of its width."""
    box = page.locator(f"figure[data-curve='{curve}'] .u-over").bounding_box()
    assert box is not None
    return box["x"] + part * box["width"], box["y"] + box["height"] / 2
