"""The list of an owner's runs, newest first, with their progress."""

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.auth.keys import LOCAL
from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.runs_view import (
    OFFERED,
    Asked,
    RunsView,
    column_title,
    columns_of,
    offer_names,
)
from tinker_server.dashboard.rendering import base_of, page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.errors import UnknownSampler
from tinker_server.operations.recording import is_optim_step
from tinker_server.store.catalog import Page, RunRecord, Scope
from tinker_server.store.futures.records import Operation
from tinker_server.store.records import Step
from tinker_server.store.run_metrics import Order
from tinker_server.store.run_search import BASE_MODEL, Group, RunSearch, words_of
from tinker_server.store.samplers import run_of_weights
from tinker_server.web.deps import Server, Services

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PER_PAGE = 50
RUNS_OFFERED = 200
"""Runs whose titles filters and choices of other pages have, the newest."""
Number = Annotated[int, Query(alias="page", ge=1, le=10**6)]


def last_page(total: int) -> int:
    """Return the number of the last page of a list of so many runs."""
    return max(1, -(-total // PER_PAGE))


async def find_titles(server: Services, viewer: Viewer) -> dict[str, str]:
    """Return the titles of the viewer's newest runs, by run; "" for a run without a title."""
    newest, _ = await server.catalog.runs(Page(Scope(viewer.owner), RUNS_OFFERED, 0), time.time())
    return {record.run.model_id: record.title for record in newest}


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
        losses = [step.loss for step in newest if step.loss is not None]
        trained, run_s = sum(step.loss_tokens or 0 for step in newest), sum(step.run_s for step in batches)
        return cls(
            steps=last[-1].step + is_optim_step(last[-1]),
            tokens=last[-1].total_tokens,
            loss=sum(losses) / trained if trained and len(losses) == len(newest) else None,
            tokens_per_s=sum(step.tokens for step in batches) / run_s if run_s else None,
        )


@dataclass(frozen=True)
class ListedRun:
    """One run of the list."""

    record: RunRecord
    state: str


TRAINING, WAITING, SAMPLING = "training", "waiting", "sampling"
STATES = {"active": "idle", "suspended": "on disk", "lost": "ended"}


def state_of(record: RunRecord, busy: Mapping[str, Set[str]]) -> str:
    """Return a run's state in one or two words; `busy` is `busy_runs`'."""
    of_work = (state for state, run_ids in busy.items() if record.run.model_id in run_ids)
    return next(of_work, STATES[record.run.status])


async def busy_runs(server: Services, owner: str) -> dict[str, set[str]]:
    """Return the ids of an owner's runs at work, by their state: training, waiting, or their weights are sampled."""
    found: dict[str, set[str]] = {TRAINING: set(), WAITING: set(), SAMPLING: set()}
    samples: dict[str, Operation] = {}
    for operation, runs in server.scheduler.in_flight():
        if operation.operation_kind != "sample":
            found[TRAINING if runs else WAITING].add(operation.lane)
        elif operation.owner == owner:
            samples[operation.lane] = operation
    for lane, operation in samples.items():
        found[SAMPLING].add(await _sampled_run(server, lane, operation))
    found[WAITING] -= found[TRAINING]
    found[SAMPLING] -= found[TRAINING] | found[WAITING]
    return found


async def _sampled_run(server: Services, lane: str, operation: Operation) -> str:
    """Return the run whose weights are sampled; empty for a base model."""
    if isinstance(operation.request, SampleRequest) and operation.request.sampling_session_id is None:
        return run_of_weights(operation.request.model_path, None)
    try:
        sampler = await server.samplers.get(lane)
    except UnknownSampler:
        return ""
    return run_of_weights(sampler.model_path, sampler.directory)


@router.get("/")
async def show_runs(request: Request, server: Server, viewer: Viewing, view: Asked) -> Response:
    """Show the whole page."""
    return page(request, "runs.html", await load_list(server, viewer, view))


@router.get("/runs")
async def list_runs(request: Request, server: Server, viewer: Viewing, view: Asked) -> Response:
    """Show the list alone; the address then shows the same list."""
    answer = page(request, "runs_list.html", await load_list(server, viewer, view))
    answer.headers["HX-Replace-Url"] = f"{base_of(request)}/{view.query()}"
    return answer


async def load_list(server: Services, viewer: Viewer, view: RunsView) -> dict[str, object]:
    """Return what the list shows of a view."""
    owner = viewer.owner
    asked = Page(Scope(owner), PER_PAGE, (view.page - 1) * PER_PAGE)
    busy = await busy_runs(server, owner)
    states = {state: sorted(run_ids) for state, run_ids in busy.items()}
    group = Group(view.group, view.member) if view.group and view.only else None
    search = RunSearch(words_of("q", view.q), STATES, states, view.archived, group)
    order = Order(view.sort.lstrip("-"), view.sort.startswith("-")) if view.sort else None
    records, total = await server.catalog.runs(asked, time.time(), search, order)
    run_ids = [record.run.model_id for record in records]
    reported = await server.run_table.names_of_runs(owner, run_ids)
    columns = columns_of(view, reported)
    by = view.sort.lstrip("-")
    trend = view.trend or (by if by not in ("", "steps", "tokens") else "loss")
    groups = await server.run_table.groups(owner, search, view.group, columns) if view.group and not view.only else []
    num_listed = len(groups) or total
    if view.page > last_page(num_listed):  # the runs of this page were deleted
        return await load_list(server, viewer, view.model_copy(update={"page": last_page(num_listed)}))
    rows = [ListedRun(record, state_of(record, busy)) for record in records]
    values = {
        "listed": rows,
        "groups": groups[asked.offset : asked.offset + PER_PAGE],
        "columns": columns,
        "names": {name: column_title(name) for name in [*OFFERED, *offer_names(reported)]},
        "keys": [BASE_MODEL, *sorted({key for record in records for key in record.metadata if key != "name"})],
        "latest": await server.run_table.latest(owner, run_ids, columns),
        "trend": trend,
        "trends": await server.run_table.trends(owner, run_ids, trend),
    }
    is_empty = not rows and not view.archived
    more = {
        "total": num_listed,
        "last_page": last_page(num_listed),
        "has_keyless": is_empty and await _has_keyless(server, viewer),
    }
    return {**values, **more, "view": view, "title_of": column_title}


async def _has_keyless(server: Services, viewer: Viewer) -> bool:
    """Return whether runs were made before the server had keys, which the viewer may look for."""
    return viewer.owner != LOCAL and (await server.runs.page(LOCAL, 1, 0))[1] > 0
