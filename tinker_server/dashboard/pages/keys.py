"""The keys on the administrators' page: making them, setting their expiry, revoking them. No other page changes any."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Form, Request, Response

from tinker_server.auth import keys
from tinker_server.auth.described import describe_keys
from tinker_server.auth.key import Key, Scope
from tinker_server.auth.sign_ins import COOKIE
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Administrating, Viewer
from tinker_server.errors import BadRequest, KeysReadOnly, StartFailed
from tinker_server.offload import LARGE, off_loop
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/owners/keys", route_class=PageRoute, include_in_schema=False)
DAY_S = 24 * 3600
Days = Annotated[float | None, Form(gt=0, le=36_500)]
T = TypeVar("T")


@router.post("")
async def make_key(  # noqa: PLR0913 - one for each field of the form
    request: Request,
    server: Server,
    viewer: Administrating,
    name: Annotated[str, Form(max_length=64)],
    scope: Annotated[Scope, Form()] = "all",
    is_admin: Annotated[bool, Form()] = False,
    days: Days = None,
) -> Response:
    """Make a key and show it, this once."""
    path, valid_s = server.settings.resolve_keys_file(), None if days is None else days * DAY_S
    made = await _change(viewer, lambda: keys.add(path, name.strip(), scope=scope, is_admin=is_admin, valid_s=valid_s))
    server.keys.read_now()
    found = server.keys.find(made)
    assert found is not None, "it was made just now"
    await server.audit.note("key_made", found.name, key_id=found.id, scope=scope, by=viewer.owner)
    return _list(request, server, made=made, owner=found.name)


@router.post("/{key_id}/expiry")
async def set_expiry(
    request: Request, key_id: str, server: Server, viewer: Administrating, days: Annotated[float, Form(gt=0, le=36_500)]
) -> Response:
    """Let a key expire after some days from now."""
    key = _require_key(request, server, key_id)
    path = server.settings.resolve_keys_file()
    await _change(viewer, lambda: keys.set_expiry(path, key.hashed, days * DAY_S))
    server.keys.read_now()
    await server.audit.note("key_expiry_set", key.name, key_id=key.id, days=days, by=viewer.owner)
    return _list(request, server)


@router.delete("/{key_id}")
async def revoke_key(request: Request, key_id: str, server: Server, viewer: Administrating) -> Response:
    """Remove a key: it is refused from now on. What was made with it stays its owner's."""
    key = _require_key(request, server, key_id)
    await _change(viewer, lambda: server.keys.revoke(key.hashed))
    await server.audit.note("key_revoked", key.name, key_id=key.id, by=viewer.owner)
    return _list(request, server)


async def _change(viewer: Viewer, change: Callable[[], T]) -> T:
    """Change the keys file in a thread. Raises BadRequest, KeysReadOnly."""
    try:
        return await off_loop(viewer.owner, LARGE, change)
    except StartFailed as error:
        raise BadRequest(str(error)) from None
    except OSError as error:
        raise KeysReadOnly(f"the keys of this server cannot be changed from here: {error.strerror}") from None


def _require_key(request: Request, server: Services, key_id: str) -> Key:
    """Return the key with this id. Raises BadRequest if there is none, or it is the key of the page's own sign-in."""
    found = next((key for key in server.keys.all() if key.id == key_id), None)
    if found is None:
        raise BadRequest(f"there is no key {key_id}: it was removed, or the page is out of date")
    own = server.sign_ins.key(request.cookies.get(COOKIE))
    if own is not None and own.hashed == found.hashed:
        raise BadRequest(f"you are signed in with the key {key_id}: sign in with another to change it")
    return found


def _list(request: Request, server: Services, made: str = "", owner: str = "") -> Response:
    described = describe_keys(server.keys.all(), server.keys.used_at)
    return page(request, "keys_list.html", {"keys": described.keys, "made": made, "made_for": owner})
