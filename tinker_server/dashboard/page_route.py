"""A route that answers people: refusals are pages, and nothing on a page comes from elsewhere.

The policy lets in no script or style but our files: what a prompt or a name contains is text, whatever it looks like.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from tinker_server.dashboard.rendering import base_of, page
from tinker_server.errors import ForeignHost, TinkerServerError, Unauthenticated

log = logging.getLogger(__name__)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:;"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
CHANGES = ("POST", "PUT", "PATCH", "DELETE")


class PageRoute(APIRoute):
    """As FastAPI's documentation has routes of one's own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with our headers on whatever it answers."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                if request.method in CHANGES and _is_of_another_site(request):
                    raise ForeignHost("a page of another site asked for this")
                answer = await handle(request)
            except Unauthenticated:
                answer = _to_sign_in(request)
            except TinkerServerError as error:
                answer = page(request, "error.html", {"text": str(error), "status": error.status}, error.status)
            except RequestValidationError:
                answer = page(request, "error.html", {"text": "There is no such page.", "status": 404}, 404)
            except HTTPException as error:  # a body that is too large, too slow, or no form
                answer = page(
                    request, "error.html", {"text": error.detail, "status": error.status_code}, error.status_code
                )
                answer.headers.update(error.headers or {})
            except Exception:  # a page must not break anything else
                log.exception("the page %s failed", request.url.path)
                text = "This page failed; the server's log has the details."
                answer = page(request, "error.html", {"text": text, "status": 500}, 500)
            answer.headers.update(HEADERS)
            return answer

        return handled


def _is_of_another_site(request: Request) -> bool:
    """Whether another site's page asks: as the browser says, or by Origin, since over plain HTTP it says no more.

    What is no browser sends neither.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None or origin is None:
        return site == "cross-site"
    try:
        asking = urlsplit(origin).netloc.lower()
    except ValueError:
        return True
    return asking not in {request.headers.get(name, "").lower() for name in ("host", "x-forwarded-host")} - {""}


def _to_sign_in(request: Request) -> Response:
    """The whole window goes there, also where only a part of a page was asked for."""
    url = f"{base_of(request)}/login"
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"HX-Redirect": url})
    return RedirectResponse(url, 303)
