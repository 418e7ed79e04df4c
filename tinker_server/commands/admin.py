"""`tinker-server admin`: all owners of a running server, their runs, unloading and stopping, over HTTP as a client."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from rich.table import Table

from tinker_server.commands.status import GIB, connect, parse_answer
from tinker_server.commands.tables import show
from tinker_server.errors import StartFailed
from tinker_server.observability.log_config import harmless

_WAIT_S = 600.0
"""An unload waits for the operation that runs."""


def administrate(arguments: argparse.Namespace) -> None:
    """Run an action of `tinker-server admin`. Raises StartFailed."""
    match arguments.action:
        case "owners":
            _show(arguments, _ask(arguments, "GET", "/admin/owners", hours=arguments.hours), owners_table)
        case "runs":
            asked = {} if arguments.owner is None else {"owner": arguments.owner}
            _show(arguments, _ask(arguments, "GET", "/admin/runs", **asked), runs_table)
        case "unload":
            _ask(arguments, "POST", "/admin/unload", run_id=arguments.run)
            print(f"{arguments.run} is on disk; its next operation brings it back")
        case _:
            found = _ask(arguments, "POST", "/admin/stop", run_id=arguments.run, reason=arguments.reason)
            print(f"stopped {', '.join(found['run_ids']) or 'no run'}; {found['cancelled']} operations were cancelled")


def _show(arguments: argparse.Namespace, found: dict[str, Any], as_table: Callable[[dict[str, Any]], Table]) -> None:
    if arguments.json:
        print(json.dumps(found))
    else:
        show(as_table(found))


def owners_table(found: dict[str, Any]) -> Table:
    """Make a table with a row for each owner."""
    names = ("owner", "keys", "runs in memory", "on disk", "device memory", "disk", "running", "waiting")
    since = found["used_since"][:16].replace("T", " ")
    table = Table(*names, "trained", "prefilled", "sampled", title=f"tokens since {since}", title_justify="left")
    for owner in found["owners"]:
        counts = (owner[name] for name in ("keys", "runs_in_memory", "runs_on_disk"))
        sizes = (f"{owner[name] / GIB:.2f} GiB" for name in ("memory_bytes", "disk_bytes"))
        work = (owner["operations_running"], owner["operations_waiting"], *owner["tokens"].values())
        table.add_row(owner["owner"], *map(str, counts), *sizes, *map(str, work))
    return table


def runs_table(found: dict[str, Any]) -> Table:
    """Make a table of the newest runs of all owners."""
    title = f"runs: {found['cursor']['total_count']}"
    names = (
        "run",
        "name",
        "owner",
        "base model",
        "rank",
        "place",
        "device memory",
        "running",
        "waiting",
        "steps",
        "tokens",
    )
    table = Table(*names, title=title, title_justify="left")
    for run in found["runs"]:
        name, rank = harmless(run["name"]), str(run["lora_rank"] or "all")
        memory = f"{run['memory_bytes'] / GIB:.2f} GiB"
        work = (run[name] for name in ("operations_running", "operations_waiting", "steps", "tokens"))
        table.add_row(run["run_id"], name, run["owner"], run["base_model"], rank, run["place"], memory, *map(str, work))
    return table


def _ask(arguments: argparse.Namespace, method: str, path: str, **values: str | int) -> Any:
    url = f"{arguments.url.rstrip('/')}/api/v1{path}"
    with connect(arguments.url, arguments.key, _WAIT_S) as client:
        answer = client.get(url, params=values) if method == "GET" else client.request(method, url, json=values)
    if answer.status_code >= 300:
        raise StartFailed(f"{url} answers {answer.status_code}: {answer.text[:300]}")
    return parse_answer(answer) if answer.content else None
