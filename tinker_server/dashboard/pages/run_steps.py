"""One step of a run: its numbers, and the samples of the weights that it began with."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from tinker_server.dashboard.page_route import PageRoute
from tinker_server.dashboard.pages.curves import END, Bound, important_of
from tinker_server.dashboard.pages.samples import THUMBNAILS, StepSample, sample_of_step, samples_by_step
from tinker_server.dashboard.rendering import page
from tinker_server.dashboard.viewer import Viewer, Viewing
from tinker_server.offload import off_loop
from tinker_server.web.deps import Server, Services

router = APIRouter(prefix="/runs/{run_id}", route_class=PageRoute, include_in_schema=False)
MOST_SAMPLES, MOST_TOKENS = 8, 160
"""Samples of a step on the page, and tokens of each."""
SHOWN = {
    "loss": "Loss per token",
    "advantage": "Mean advantage",
    "grad_norm": "Gradient norm",
    "sampler_gap": "Trainer-sampler gap (nats)",
    "shared_tokens": "Tokens saved by shared beginnings",
}
"""Recorded values of a step that are shown where they are known, with their titles."""


@dataclass(frozen=True)
class Found:
    """The samples of a step, and the steps around it that have samples."""

    step: int | None
    """The latest step up to the chosen that has samples; None: there is none."""
    samples: list[StepSample]
    """Newest first."""
    before: int | None
    after: int | None


@router.get("/step")
async def show_step(
    request: Request, run_id: str, server: Server, viewer: Viewing, step: Bound | None = None
) -> Response:
    """Show a step; without its number the latest."""
    run = await server.runs.require(run_id, viewer.owner)
    newest = await server.steps.last(run_id)
    end = max(0 if newest is None else newest.step, await server.client_metrics.last_step(run_id) or 0)
    number = end if step is None else min(step, end)
    values = {"run": run, "run_id": run_id, "step": number, "most_images": THUMBNAILS}
    up_to = END if step is None else number  # the latest: also samples of the weights after the last step
    found = await _samples(server, viewer, run_id, up_to)
    return page(request, "run_step.html", {**values, "values": await _values(server, run_id, number), "found": found})


async def _values(server: Services, run_id: str, step: int) -> dict[str, float]:
    """Return the values of a step by their titles: the client's most telling metrics, then the recorded ones."""
    names = important_of(await server.client_metrics.names(run_id))
    reported = await server.client_metrics.points(run_id, names, (step, step), 1)
    values = {name: points[0].value for name, points in reported.items() if points}
    for point in await server.steps.points(run_id, step, step, 1):
        known = {title: getattr(point, name) for name, title in SHOWN.items()}
        values |= {title: value for title, value in known.items() if value is not None}
    return values


async def _samples(server: Services, viewer: Viewer, run_id: str, step: int) -> Found:
    by_step = await samples_by_step(server, viewer.owner, run_id)
    nearest = max((number for number in by_step if number <= step), default=None)
    chosen = [] if nearest is None else by_step[nearest][:MOST_SAMPLES]
    asked = [(viewer.owner, shown.size_bytes, sample_of_step, server, shown, MOST_TOKENS) for shown in chosen]
    samples = [await off_loop(*one) for one in asked]
    before = max((number for number in by_step if number < (nearest or 0)), default=None)
    after = min((number for number in by_step if number > step), default=None)
    return Found(nearest, samples, before, after)
