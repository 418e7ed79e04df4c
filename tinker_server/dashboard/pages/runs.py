"""The list of an owner's runs, newest first, with their progress."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.rendering import base_of, page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.operations.recording import is_optim_step
from tinker_server.store.catalog import Page, RunRecord, Scope
from tinker_server.store.futures.records import Operation
from tinker_server.store.records import Step
from tinker_server.store.run_search import RunSearch
from tinker_server.web.deps import Server, Services

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PER_PAGE = 50
Search = Annotated[str, Query(alias="q", max_length=200)]
Number = Annotated[int, Query(alias="page", ge=1, le=10**6)]


@dataclass(frozen=True)
class Progress:
    """Progress of a run, from its last operations."""

    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None

    @classmethod
    def of(cls, last: list[Step]) -> "Progress":
        """Compute the progress from the last recorded steps; empty if there are none."""
        if not last:
            return cls()
        batches = [step for step in last if step.loss_tokens]
        newest = [step for step in batches if step.step == batches[-1].step]
        trained, run_s = sum(step.loss_tokens or 0 for step in newest), sum(step.run_s for step in batches)
        return cls(
            steps=last[-1].step + is_optim_step(last[-1]),
            tokens=last[-1].total_tokens,
            loss=sum(step.loss or 0 for step in newest) / trained if trained else None,
            tokens_per_s=sum(step.tokens for step in batches) / run_s if run_s else None,
        )


@dataclass(frozen=True)
class ListedRun:
    """One run of the list."""

    record: RunRecord
    state: str
    progress: Progress


TRAINING, WAITING = "training", "waiting"
STATES = {"active": "idle", "suspended": "on disk", "lost": "ended"}


def state_of(record: RunRecord, at_work: Counter[tuple[str, bool]]) -> str:
    """Return a run's state in one or two words."""
    run_id = record.run.model_id
    if at_work[run_id, True]:
        return TRAINING
    return WAITING if at_work[run_id, False] else STATES[record.run.status]


def at_work(in_flight: Iterable[tuple[Operation, bool]]) -> Counter[tuple[str, bool]]:
    """Count operations by run and by whether they run."""
    return Counter((operation.lane, runs) for operation, runs in in_flight)


@router.get("/")
async def show_runs(request: Request, server: Server, viewer: Viewing, q: Search = "", number: Number = 1) -> Response:
    """Show the whole page."""
    return page(request, "runs.html", await _listed(server, viewer, q, number))


@router.get("/runs")
async def list_runs(request: Request, server: Server, viewer: Viewing, q: Search = "", number: Number = 1) -> Response:
    """Show the list alone."""
    answer = page(request, "runs_list.html", await _listed(server, viewer, q, number))
    here = urlencode({name: value for name, value in (("q", q), ("page", number)) if value not in ("", 1)})
    answer.headers["HX-Replace-Url"] = f"{base_of(request)}/{here and '?'}{here}"  # so that a reload shows the same
    return answer


async def _listed(server: Services, viewer: Viewer, search: str, number: int) -> dict[str, object]:
    asked = Page(Scope(viewer.owner), PER_PAGE, (number - 1) * PER_PAGE)
    working = at_work(server.scheduler.in_flight())
    training = {run_id for run_id, runs in working if runs}
    waiting = {run_id for run_id, _ in working} - training
    busy = {TRAINING: sorted(training), WAITING: sorted(waiting)}
    found = RunSearch(search.split(), STATES, busy)
    records, total = await server.catalog.runs(asked, time.time(), found)
    last = await server.steps.recent([record.run.model_id for record in records])
    listed = [
        ListedRun(record, state_of(record, working), Progress.of(last.get(record.run.model_id, [])))
        for record in records
    ]
    return {"listed": listed, "total": total, "q": search, "number": number, "last_page": max(1, -(-total // PER_PAGE))}
