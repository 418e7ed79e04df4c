"""Who makes a request, told by its API key, and whose things it asks for."""

from typing import Annotated, Literal

from fastapi import Depends, Query, Request, Security
from fastapi.security import APIKeyHeader

from tinker_server.store.catalog import Scope

AccessScope = Literal["owned", "accessible"]
"""`accessible` adds what others have published."""
_KEY = APIKeyHeader(
    name="X-API-Key",
    auto_error=False,
    description="Made by `tinker-server keys add NAME`. A server without keys takes whatever begins with `tml-`.",
)


async def api_key(key: Annotated[str | None, Security(_KEY)]) -> str:
    """The key as it was sent."""
    assert key is not None, "the gate lets nobody in without a key"
    return key


ApiKey = Annotated[str, Depends(api_key)]


async def caller(request: Request, _: ApiKey) -> str:
    """The owner that a request speaks for, as the gate found."""
    owner: str = request.state.owner
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
