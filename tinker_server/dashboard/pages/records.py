"""Usage by day and the audit log: an owner's own; for administrators all owners', or those of the owner they name."""

import time
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.web.deps import Server

router = APIRouter(route_class=PageRoute, include_in_schema=False)
DAY_S = 24 * 3600
SHOWN = 500
"""Entries of the audit log on the page."""
OwnerName = Annotated[str, Query(max_length=64)]


@router.get("/usage")
async def show_usage(
    request: Request,
    server: Server,
    viewer: Viewing,
    days: Annotated[int, Query(ge=1, le=92)] = 30,
    owner: OwnerName = "",
) -> Response:
    """Show what was computed, by owner and by day."""
    first = int(time.time() // DAY_S) - days + 1
    found = await server.usage.by_day(_scope(viewer, owner), first * DAY_S)
    owners, by_day = Counter[tuple[str, str]](), Counter[tuple[int, str]]()
    for (day, name, kind), amount in found.items():
        owners[name, kind] += amount
        by_day[day, kind] += amount
    shown = {
        "days": days,
        "owner": owner,
        "names": sorted({name for name, _ in owners}),
        "owners": owners,
        "numbers": sorted({day for day, _ in by_day}, reverse=True),
        "by_day": by_day,
        "dates": {day: date(1970, 1, 1) + timedelta(day) for day, _ in by_day},
    }
    return page(request, "usage.html", shown)


@router.get("/audit")
async def show_audit(
    request: Request, server: Server, viewer: Viewing, day: date | None = None, owner: OwnerName = ""
) -> Response:
    """Show the changes of a day, the newest first."""
    shown_day = day or datetime.now(UTC).date()
    start = datetime(shown_day.year, shown_day.month, shown_day.day, tzinfo=UTC).timestamp()
    entries = await server.audit.newest_of_day(_scope(viewer, owner), start, SHOWN)
    return page(request, "audit.html", {"day": shown_day, "owner": owner, "entries": entries, "most": SHOWN})


def _scope(viewer: Viewer, owner: str) -> str | None:
    """Return the owner whose records the viewer sees; None: those of all."""
    return (owner or None) if viewer.is_admin else viewer.owner
