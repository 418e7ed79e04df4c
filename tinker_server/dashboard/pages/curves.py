"""The data of a run's curves: recorded steps, and the metrics that the client reported."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.viewer import Viewing
from tinker_server.offload import LARGE, off_loop
from tinker_server.store.client_metrics import Metric
from tinker_server.store.steps import Point
from tinker_server.web.deps import Server

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
MOST = 600
"""Largest number of points of a curve: more than a screen can show apart."""
MOST_METRICS, MOST_IMPORTANT = 100, 6
"""Metrics in one answer beside the important ones, and how many are important."""
IMPORTANT = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(^|/)reward(/total|/mean|_mean)?$",
        r"(^|[/_])(accuracy|acc|correct|solved|success|pass@?\d*|win_rate|score)$",
        r"^(test|eval|val|valid|validation)[/_]",
        r"reward",
    )
]
"""Names of metrics that say whether a run learns, the most telling first."""
END = 2**53
Bound = Annotated[int, Query(ge=0, le=END)]


@dataclass(frozen=True)
class Steps:
    """The steps that are asked for."""

    first: int
    last: int


async def _asked(first: Bound = 0, last: Bound = END) -> Steps:
    return Steps(first, last)


Asked = Annotated[Steps, Depends(_asked)]


@router.get("/curves.json")
async def curves(run_id: str, server: Server, viewer: Viewing, asked: Asked) -> Response:
    """Return columns of equal length."""
    await server.runs.require(run_id, viewer.owner)
    newest = await server.steps.last(run_id)
    end = 0 if newest is None else newest.step
    last = min(asked.last, end)
    points = await server.steps.points(run_id, asked.first, last, MOST)
    body = await off_loop(viewer.owner, LARGE, _columns, points, end)
    return Response(body, media_type="application/json")


@router.get("/metrics.json")
async def metrics(
    run_id: str,
    server: Server,
    viewer: Viewing,
    asked: Asked,
    shown: Annotated[list[str] | None, Query(max_length=MOST_METRICS)] = None,
) -> Response:
    """Return the client's metrics: the important ones, and those `shown`, each as columns of equal length."""
    await server.runs.require(run_id, viewer.owner)
    names = await server.client_metrics.names(run_id)
    important = important_of(names)
    wanted = [*important, *(name for name in shown or () if name in names and name not in important)]
    end = await server.client_metrics.last_step(run_id) or 0
    bounds = (asked.first, min(asked.last, end))
    points = await server.client_metrics.points(run_id, wanted, bounds, MOST)
    body = await off_loop(viewer.owner, LARGE, _metric_columns, names, important, points, end)
    return Response(body, media_type="application/json")


def important_of(names: Sequence[str]) -> list[str]:
    """Return the metrics that say whether a run learns, the likeliest first; the first few if none has such a name."""
    ranked = [name for pattern in IMPORTANT for name in names if pattern.search(name)]
    return list(dict.fromkeys(ranked))[:MOST_IMPORTANT] or list(names[:MOST_IMPORTANT])


def _metric_columns(names: list[str], important: list[str], points: dict[str, list[Metric]], last_step: int) -> str:
    columns = {
        name: {"step": [one.step for one in of], "at": [one.at for one in of], "value": [one.value for one in of]}
        for name, of in points.items()
    }
    return json.dumps({"last_step": last_step, "names": names, "important": important, "metrics": columns})


def _columns(points: list[Point], last_step: int) -> str:
    columns = {field.name: [getattr(point, field.name) for point in points] for field in fields(Point)}
    return json.dumps({"last_step": last_step, **columns})
