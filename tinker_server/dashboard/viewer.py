"""The dependency of every page but the sign-in: who looks, and that a change is meant."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tinker_server.auth.sign_ins import COOKIE, TOKEN_HEADER
from tinker_server.dashboard.page_route import CHANGES
from tinker_server.errors import LinkRefused, Unauthenticated
from tinker_server.web.deps import Server


@dataclass(frozen=True)
class Viewer:
    """Whoever looks."""

    owner: str
    token: str
    """What changes carry."""
    has_signed_in: bool
    """Without keys nobody does."""


async def viewer(request: Request, server: Server) -> Viewer:
    """Raises Unauthenticated, LinkRefused."""
    cookie = request.cookies.get(COOKIE)
    owner = server.sign_ins.owner(cookie)
    if owner is None:
        raise Unauthenticated("sign in first")
    if request.method in CHANGES and not server.sign_ins.is_token(request.headers.get(TOKEN_HEADER, ""), cookie):
        raise LinkRefused("this page is out of date: load it again")
    request.state.viewer = found = Viewer(owner, server.sign_ins.token(cookie), not server.keys.is_open)
    return found


Viewing = Annotated[Viewer, Depends(viewer)]
