"""Pages of the dashboard, one file each, with the parts of a page that are refreshed while it is open."""

import os

from fastapi import FastAPI, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from tinker_server.dashboard.pages import (
    checkpoints,
    compare,
    console,
    curves,
    keys,
    live,
    machine,
    marks,
    owners,
    playground,
    proof,
    records,
    run,
    run_changes,
    run_steps,
    runs,
    samples,
    sign_in,
    step_datums,
)
from tinker_server.dashboard.rendering import FOLDER

ROUTERS = (
    *(sign_in, live, runs, checkpoints, compare, curves, marks, proof, run_changes, run_steps, step_datums, run),
    *(samples, playground, machine, keys, owners, records, console),
)


class _Static(StaticFiles):
    """Files that browsers check at each use, so that scripts and pages are of the same version of the server."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return the file, or 304 if the browser has it."""
        answer = super().file_response(full_path, stat_result, scope, status_code)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


def install(app: FastAPI) -> None:
    """Add all pages and their static files to an app."""
    for one in ROUTERS:
        app.include_router(one.router)
    app.mount("/static", _Static(directory=FOLDER / "static"))
