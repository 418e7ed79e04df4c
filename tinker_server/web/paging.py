"""Which part of a list is asked for."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Query

from tinker_server.store.catalog import Page
from tinker_server.web.callers import AskedScope
from tinker_server.web.parameters import ProjectInQuery

MAX_LIMIT = 1000


def paged(default_limit: int) -> Callable[..., Awaitable[Page]]:
    """A dependency that reads a page from the query."""

    async def page(
        scope: AskedScope,
        limit: Annotated[int, Query(ge=0, description="Most entries to answer.")] = default_limit,
        offset: Annotated[int, Query(ge=0, lt=2**62, description="How many entries to skip.")] = 0,
        project_id: ProjectInQuery = None,
    ) -> Page:
        return Page(scope, min(limit, MAX_LIMIT), offset, project_id)

    return page


ShortPage = Annotated[Page, Depends(paged(20))]
LongPage = Annotated[Page, Depends(paged(100))]
