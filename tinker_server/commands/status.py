"""`tinker-server status`: a running server's runs, queue and memory, read over HTTP like any client."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Group
from rich.table import Table

from tinker_server.commands.tables import compact_table
from tinker_server.errors import StartFailed

GIB = 1 << 30
SHOWN = 20
"""Number of the latest runs that are shown."""
_WAIT_S = 10.0
Gauges = dict[str, dict[tuple[str, ...], float]]
"""Values by metric name, then by the values of the labels in order."""


@contextmanager
def connect(url: str, key: str, wait_s: float) -> Iterator[httpx.Client]:
    """Yield a client of a running server. Raises StartFailed if the key cannot be right, or no server answers."""
    if not key.isascii() or not key.isprintable():
        raise StartFailed("the API key has characters that no key has")
    try:
        with httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=wait_s) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartFailed(f"no server answers at {url}: {error}") from None


@dataclass(frozen=True)
class Status:
    """Answers of a running server."""

    runs: dict[str, Any]
    """A page of the key's training runs, as the API has it."""
    samples: list[Sample]
    """Values of the server's metrics."""

    @classmethod
    def fetch(cls, url: str, key: str) -> "Status":
        """Ask a server. Raises StartFailed if none answers, or it refuses the key, or that is none."""
        with connect(url, key, _WAIT_S) as client:
            runs = parse_answer(_get(client, f"/api/v1/training_runs?limit={SHOWN}"))
            text = _get(client, "/metrics").text
        families = text_string_to_metric_families(text)
        return cls(runs, [sample for family in families for sample in family.samples])

    def as_tables(self) -> Group:
        """Return tables of runs, queue, and memory."""
        gauges: Gauges = defaultdict(dict)
        for sample in self.samples:
            gauges[sample.name][tuple(sample.labels.values())] = sample.value
        return Group(runs_table(self.runs), queue_table(gauges), memory_table(gauges))

    def as_json(self) -> str:
        """Return a JSON object: `training_runs` and `cursor` as the API has them, and `metrics`."""
        metrics = [{"name": sample.name, "labels": sample.labels, "value": sample.value} for sample in self.samples]
        return json.dumps({**self.runs, "metrics": metrics})


def parse_answer(answer: httpx.Response) -> Any:
    """Return what a server answers. Raises StartFailed if that is none."""
    try:
        return answer.json()
    except ValueError:
        raise StartFailed(f"{answer.url} is no tinker-server: it answers no JSON") from None


def _get(client: httpx.Client, path: str) -> httpx.Response:
    answer = client.get(path)
    if answer.status_code != 200:
        raise StartFailed(f"{client.base_url}{path} answers {answer.status_code}: {answer.text[:200]}")
    return answer


def runs_table(answer: dict[str, Any]) -> Table:
    """Make a table of the key's own runs, the latest first."""
    total = answer["cursor"]["total_count"]
    table = compact_table("run", "base model", "rank", "last request", title=f"runs: {total}")
    for run in answer["training_runs"]:
        last = run["last_request_time"][:16].replace("T", " ")
        table.add_row(run["training_run_id"], run["base_model"], str(run["lora_rank"] or "all"), last)
    return table


def queue_table(gauges: Gauges) -> Table:
    """Make a table of the operations and sequences of all owners."""
    table = compact_table("operation", "state", "number", title="queue")
    for (kind, state), number in sorted(gauges["tinker_operations"].items()):
        table.add_row(kind, state, f"{number:.0f}")
    for (base_model, state), number in sorted(gauges["tinker_engine_sequences"].items()):
        table.add_row(f"sequences of {base_model}", state, f"{number:.0f}")
    for (base_model, engine, state), number in sorted(gauges["tinker_pool_sequences"].items()):
        table.add_row(f"sequences of {base_model}, engine {engine}", state, f"{number:.0f}")
    return table


def memory_table(gauges: Gauges) -> Table:
    """Make a table of GPUs, disk, log, and the state of the processes."""
    table = compact_table("what", "amount", title="memory and processes")
    for (gpu, state), amount in sorted(gauges["tinker_gpu_memory_bytes"].items()):
        table.add_row(f"GPU {gpu}, {state}", f"{amount / GIB:.1f} GiB")
    for amount in gauges["tinker_disk_free_bytes"].values():
        table.add_row("disk of the data directory, free", f"{amount / GIB:.1f} GiB")
    for amount in gauges["tinker_log_bytes"].values():
        table.add_row("requests logged for replay", f"{amount / GIB:.3f} GiB")
    for (address, node), is_up in sorted(gauges["tinker_node_up"].items()):
        table.add_row(f"machine {node} at {address}", "alive" if is_up else "lost")
    for (_, process), is_up in sorted(gauges["tinker_process_up"].items()):
        table.add_row(process, "alive" if is_up else "restarting")
    return table
