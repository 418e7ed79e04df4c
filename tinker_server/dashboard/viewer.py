"""The dependency of every page but the sign-in: identifies the viewer, and checks the CSRF token of changes."""

import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, HTTPException, Request

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
    is_admin: bool
    """True if the viewer may see and stop the work of all owners."""
    asked_at: float
    """Seconds since 1970 at which the page was asked for: what it shows is at least as new."""


async def viewer(request: Request, server: Server) -> Viewer:
    """Identify the viewer by the cookie. Raises Unauthenticated, or LinkRefused for a change with a wrong token."""
    cookie = request.cookies.get(COOKIE)
    key = server.sign_ins.key(cookie)
    if key is None:
        raise Unauthenticated("sign in first")
    if request.method in CHANGES and not server.sign_ins.is_token(request.headers.get(TOKEN_HEADER, ""), cookie):
        raise LinkRefused("this page is out of date: load it again")
    token, has_signed_in = server.sign_ins.token(cookie), not server.keys.is_open
    request.state.viewer = found = Viewer(key.name, token, has_signed_in, key.is_admin, time.time())
    return found


Viewing = Annotated[Viewer, Depends(viewer)]


async def administrator(viewer: Viewing) -> Viewer:
    """Return the viewer. Raises HTTPException 404 for all but administrators, for whom the page is not there."""
    if not viewer.is_admin:
        raise HTTPException(404, "There is no such page.")
    return viewer


Administrating = Annotated[Viewer, Depends(administrator)]
