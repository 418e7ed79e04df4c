"""The dependency of every page but the sign-in: identifies the viewer, and checks the CSRF token of changes."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tinker_server.auth.sign_ins import COOKIE, TOKEN_HEADER
from tinker_server.dashboard.page_route import CHANGES
from tinker_server.errors import LinkRefused, Unauthenticated
from tinker_server.web.deps import Server


@dataclass(frozen=True)
class Viewer:
    """The person who looks at a page."""

    owner: str
    token: str
    """CSRF token that changes carry."""
    has_signed_in: bool
    """False if no keys are configured, so that nobody signs in."""


async def viewer(request: Request, server: Server) -> Viewer:
    """Identify the viewer by the cookie. Raises Unauthenticated, or LinkRefused for a change with a wrong token."""
    cookie = request.cookies.get(COOKIE)
    owner = server.sign_ins.owner(cookie)
    if owner is None:
        raise Unauthenticated("sign in first")
    if request.method in CHANGES and not server.sign_ins.is_token(request.headers.get(TOKEN_HEADER, ""), cookie):
        raise LinkRefused("this page is out of date: load it again")
    request.state.viewer = found = Viewer(owner, server.sign_ins.token(cookie), not server.keys.is_open)
    return found


Viewing = Annotated[Viewer, Depends(viewer)]
