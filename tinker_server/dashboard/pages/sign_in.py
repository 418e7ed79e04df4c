"""Sign-in with an API key, and sign-out."""

import re
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import AfterValidator

from tinker_server.auth.sign_ins import COOKIE, VALID_S
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import base_of, page
from tinker_server.dashboard.viewer import Viewing
from tinker_server.errors import ScopeRefused
from tinker_server.web.deps import Server

_INSIDE = re.compile(r"/(?!/)[^\\\s]*")
"""A path of this server, with or without a query. A browser takes `//` and backslashes for another host's."""
Link = Annotated[str, AfterValidator(lambda link: link if _INSIDE.fullmatch(link) else "/")]
"""Page to show after the sign-in; the runs in place of anything that is not a path of this server."""

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/login")
async def show_sign_in(request: Request, server: Server, link: Link = "/") -> Response:
    """Show the form, or redirect to the page if there are no keys or the viewer is signed in."""
    if server.sign_ins.owner(request.cookies.get(COOKIE)) is not None:
        return RedirectResponse(f"{base_of(request)}{link}", 303)
    return page(request, "login.html", {"problem": "", "link": link})


@router.post("/login")
async def sign_in(
    request: Request,
    server: Server,
    key: Annotated[str, Form(max_length=1000)] = "",
    link: Annotated[Link, Form(max_length=2000)] = "/",
) -> Response:
    """Exchange a key for a cookie that no script reads and no other site's page sends."""
    try:
        cookie = server.sign_ins.cookie(key.strip())
    except ScopeRefused as error:
        return page(request, "login.html", {"problem": str(error), "link": link}, error.status)
    if cookie is None:
        return page(request, "login.html", {"problem": "This API key is not known here.", "link": link}, 401)
    answer = RedirectResponse(f"{base_of(request)}{link}", 303)
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=VALID_S,
        path=f"{base_of(request)}/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def sign_out(request: Request, _: Viewing) -> Response:
    """Delete the cookie."""
    answer = Response(headers={"HX-Redirect": f"{base_of(request)}/login"})
    answer.delete_cookie(COOKIE, path=f"{base_of(request)}/", httponly=True, samesite="strict")
    return answer
