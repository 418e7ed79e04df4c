"""The page /docs: the API's description, from files of this server alone.

The page's policy puts it into a sandbox. Its script, another project's, has no origin there: it reaches no cookie and
no page of the dashboard, and sends nothing.
"""

import json
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from tinker_server.web.fixed_page import FixedPage

FOLDER = Path(__file__).parent / "reference"
HEADERS = {
    "Content-Security-Policy": "sandbox allow-scripts; default-src 'none'; script-src 'self'; style-src 'self'"
    " 'unsafe-inline'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# Addresses are relative to /docs, so that they hold behind a proxy that strips a prefix.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API reference · tinker-server</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/files/swagger-ui.css">
<style>
@media (prefers-color-scheme: dark) {{
  html {{ background: #16181d; }}
  #reference {{ filter: invert(.92) hue-rotate(180deg); }}
}}
</style>
</head>
<body>
<main id="reference"></main>
<script type="application/json" id="description">{description}</script>
<script src="docs/files/swagger-ui-bundle.js"></script>
<script src="docs/files/show.js"></script>
</body>
</html>
"""


def install(app: FastAPI) -> None:
    """Add the page and its files to an app that has no documentation of FastAPI's own."""

    def describe() -> bytes:
        description = json.dumps(app.openapi()).replace("<", "\\u003c")  # no text in it ends the element
        return _PAGE.format(description=description).encode()

    page = FixedPage(describe, "text/html", HEADERS)
    app.add_api_route("/docs", page.answer, include_in_schema=False)
    app.mount("/docs/files", StaticFiles(directory=FOLDER))
