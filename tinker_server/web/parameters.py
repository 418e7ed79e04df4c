"""Parameters of paths, queries and headers that several routes take, each described once."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Header, Path, Query

from tinker_server.auth.links import Links
from tinker_server.store.catalog import Page, Scope
from tinker_server.web.deps import Caller, SignedLinks

MAX_LIMIT = 1000
AccessScope = Literal["owned", "accessible"]
"""`accessible` adds what others have published."""
SessionIdInPath = Annotated[str, Path(description="A session, which is one client.")]
RunIdInPath = Annotated[str, Path(description="A training run, which is named like its model.")]
ProjectInQuery = Annotated[str | None, Query(description="Only what belongs to this project.")]
MAX_KEY_LENGTH = 512
"""Characters of an idempotency key: PostgreSQL takes 2700 bytes in an index, and a key is stored with its owner's name.
The SDK's has 36."""
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="x-idempotency-key",
        max_length=MAX_KEY_LENGTH,
        description="A retry has the same one, and gets the first answer.",
    ),
]


@dataclass(frozen=True)
class SignedLink:
    """The link by which a request without a key came."""

    expires: int
    signature: str
    links: Links

    def require_to(self, path: str) -> None:
        """Raise LinkRefused if the link does not open `path`, or has expired."""
        self.links.check(path, self.expires, self.signature)


async def _parse_link(
    expires: Annotated[int, Query(description="When the link ends, in Unix seconds.")],
    signature: Annotated[str, Query(description="Signature of the link.")],
    links: SignedLinks,
) -> SignedLink:
    return SignedLink(expires, signature, links)


FollowedLink = Annotated[SignedLink, Depends(_parse_link)]


async def _scope(
    caller: Caller,
    access_scope: Annotated[
        AccessScope, Query(description="`owned`: one's own; `accessible`: also what others have published.")
    ] = "owned",
) -> Scope:
    return Scope(caller, access_scope == "accessible")


AskedScope = Annotated[Scope, Depends(_scope)]


def make_page_dependency(default_limit: int) -> Callable[..., Awaitable[Page]]:
    """Return a dependency that reads a page from the query."""

    async def page(
        scope: AskedScope,
        limit: Annotated[int, Query(ge=0, description="Most entries to answer.")] = default_limit,
        offset: Annotated[int, Query(ge=0, lt=2**62, description="How many entries to skip.")] = 0,
        project_id: ProjectInQuery = None,
    ) -> Page:
        return Page(scope, min(limit, MAX_LIMIT), offset, project_id)

    return page


ShortPage = Annotated[Page, Depends(make_page_dependency(20))]
LongPage = Annotated[Page, Depends(make_page_dependency(100))]
