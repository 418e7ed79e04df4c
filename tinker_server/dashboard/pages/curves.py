"""The data of a run's curves."""

import asyncio
import json
from dataclasses import fields
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.viewer import Viewing
from tinker_server.store.steps import Point
from tinker_server.web.deps import Server

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
MOST = 600
"""Largest number of points of a curve: more than a screen can show apart."""
Bound = Annotated[int | None, Query(ge=0, lt=2**53)]


@router.get("/curves.json")
async def curves(run_id: str, server: Server, viewer: Viewing, first: Bound = None, last: Bound = None) -> Response:
    """Return columns of equal length, from the step `first` to the step `last`; absent: all steps."""
    await server.runs.require(run_id, viewer.owner)
    newest = await server.steps.last(run_id)
    end = 0 if newest is None else newest.step
    last = end if last is None else min(last, end)
    points = await server.steps.points(run_id, min(first or 0, last), last, MOST)
    body = await asyncio.to_thread(_columns, points, end)
    return Response(body, media_type="application/json")


def _columns(points: list[Point], last_step: int) -> str:
    columns = {field.name: [getattr(point, field.name) for point in points] for field in fields(Point)}
    return json.dumps({"last_step": last_step, **columns})
