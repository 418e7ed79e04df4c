"""Pages of the dashboard, one file each, with the parts of a page that are refreshed while it is open."""

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

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


def install(app: FastAPI) -> None:
    """Add all pages and their static files to an app."""
    for one in ROUTERS:
        app.include_router(one.router)
    app.mount("/static", StaticFiles(directory=FOLDER / "static"))
