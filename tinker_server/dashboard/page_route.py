"""Route class of the dashboard: errors are answered as pages, with strict security headers.

The content security policy allows only our own scripts and styles, so markup in a prompt or a name stays text.
"""

import logging
from collections.abc import Callable, Coroutine
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

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
    """A custom route class, as FastAPI documents it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """Return the handler, which answers errors as pages and adds our headers to every answer."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                if request.method in CHANGES and _is_cross_origin(request):
                    raise ForeignHost("a page of another origin sent this request")
                answer = await handle(request)
            except Unauthenticated:
                answer = _to_sign_in(request)
            except TinkerServerError as error:
                answer = page(request, "error.html", {"text": str(error), "status": error.status}, error.status)
            except RequestValidationError:
                answer = page(request, "error.html", {"text": "There is no such page.", "status": 404}, 404)
            except HTTPException as error:  # a body that is too large, too slow, or not a form
                answer = page(
                    request, "error.html", {"text": error.detail, "status": error.status_code}, error.status_code
                )
                answer.headers.update(error.headers or {})
            except Exception:  # a page's error must not break anything else
                log.exception("the page %s failed", request.url.path)
                text = "This page failed; the server's log has the details."
                answer = page(request, "error.html", {"text": text, "status": 500}, 500)
            for name, value in HEADERS.items():
                answer.headers.setdefault(name, value)  # thumbnails may be kept for a while
            return answer

        return handled


def _is_cross_origin(request: Request) -> bool:
    """Return whether a page of another origin sent the request, by Sec-Fetch-Site, or by Origin over plain HTTP.

    Another origin may be of the same site: another port or subdomain, whose pages are not ours. Clients that are not
    browsers send neither header.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None or origin is None:
        return site not in (None, "same-origin", "none")
    try:
        sender = urlsplit(origin).netloc.lower()
    except ValueError:
        return True
    return sender not in {request.headers.get(name, "").lower() for name in ("host", "x-forwarded-host")} - {""}


def _to_sign_in(request: Request) -> Response:
    """Redirect the whole window to the sign-in, which leads on to the page, also if only a part was requested."""
    base, is_part = base_of(request), "hx-request" in request.headers
    if is_part:
        shown = urlsplit(request.headers.get("hx-current-url", ""))
        link = urlunsplit(("", "", shown.path.removeprefix(base), shown.query, ""))
    else:
        link = urlunsplit(("", "", quote(request.url.path, safe="/:"), request.url.query, ""))
    url = f"{base}/login{'' if link in ('', '/') else '?' + urlencode({'link': link})}"
    if is_part:
        return Response(status_code=401, headers={"HX-Redirect": url})
    return RedirectResponse(url, 303)
