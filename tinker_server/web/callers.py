"""Who makes a request, told by its API key, and whose things it asks for."""

from typing import Annotated, Literal

from fastapi import Depends, Query, Security
from fastapi.security import APIKeyHeader

from tinker_server.errors import Unauthenticated
from tinker_server.store.catalog import Scope
from tinker_server.web.deps import Server

AccessScope = Literal["owned", "accessible"]
"""`accessible` adds what others have published."""
_KEY = APIKeyHeader(
    name="X-API-Key",
    auto_error=False,
    description="Made by `tinker-server keys add NAME`. A server without keys takes whatever begins with `tml-`.",
)


async def api_key(key: Annotated[str | None, Security(_KEY)]) -> str:
    """The key as it was sent."""
    if not key:
        raise Unauthenticated("the header X-API-Key is missing")
    return key


ApiKey = Annotated[str, Depends(api_key)]


async def caller(key: ApiKey, server: Server) -> str:
    """The owner that a request speaks for. Raises Unauthenticated."""
    owner = server.keys.owner_of(key)
    if owner is None:
        what = "begins with neither 'tml-' nor 'eyJ'" if server.keys.is_open else "is not known here"
        raise Unauthenticated(f"the API key {what}")
    return owner


Caller = Annotated[str, Depends(caller)]


async def _scope(
    caller: Caller,
    access_scope: Annotated[
        AccessScope, Query(description="`owned`: one's own; `accessible`: also what others have published.")
    ] = "owned",
) -> Scope:
    return Scope(caller, access_scope == "accessible")


AskedScope = Annotated[Scope, Depends(_scope)]
