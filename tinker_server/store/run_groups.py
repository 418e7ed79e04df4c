"""What the table of runs shows beside the list of `catalog.py`: values, trends and groups."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from tinker_server.store import run_metrics
from tinker_server.store.database import Database
from tinker_server.store.run_search import Group, RunSearch, group_key, has_words
from tinker_server.store.tables import SessionRow, TrainingRunRow

GROUPED_RUNS = 2000
"""Runs that are grouped, the newest."""


@dataclass(frozen=True)
class Mean:
    """Mean and standard deviation of a metric over the runs of a group that have it."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class GroupRow:
    """A group of runs, with the latest values of metrics."""

    group: Group
    count: int
    means: dict[str, Mean]


class RunTable:
    """Reads what the table of runs shows."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def latest(self, owner: str, run_ids: Sequence[str], metrics: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the latest values of metrics by run and name."""
        async with self._db.read_of(owner) as session:
            return await run_metrics.latest_values(session, run_ids, metrics)

    async def trends(self, owner: str, run_ids: Sequence[str], metric: str) -> dict[str, list[float]]:
        """Return some evenly spaced values of a metric by run."""
        async with self._db.read_of(owner) as session:
            return await run_metrics.trends(session, run_ids, metric)

    async def names_of_runs(self, owner: str, run_ids: Sequence[str]) -> list[str]:
        """Return the names of the metrics that clients reported of these runs."""
        async with self._db.read_of(owner) as session:
            return await run_metrics.names_of_runs(session, run_ids)

    async def groups(self, owner: str, search: RunSearch, key: str, metrics: Sequence[str]) -> list[GroupRow]:
        """Return the groups of an owner's runs by the value of a key, the largest first, with means over their runs."""
        conditions = (TrainingRunRow.owner == owner, *has_words(search))
        values = [run_metrics.latest(metric).label(f"m{number}") for number, metric in enumerate(metrics)]
        runs = select(group_key(key).label("value"), *values).join(SessionRow).where(*conditions)
        groups: dict[str, list[list[float | None]]] = {}
        async with self._db.read_of(owner) as session:
            newest = runs.order_by(TrainingRunRow.created_at.desc()).limit(GROUPED_RUNS)
            for value, *of_run in await session.execute(newest):
                groups.setdefault(value, []).append(of_run)
        largest = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
        return [GroupRow(Group(key, value), len(of_runs), _means(metrics, of_runs)) for value, of_runs in largest]


def _means(metrics: Sequence[str], of_runs: Sequence[Sequence[float | None]]) -> dict[str, Mean]:
    """Return the means over runs. They are computed exactly: a sum of squares, as SQL has it, may overflow."""
    found = {}
    for metric, values in zip(metrics, zip(*of_runs, strict=True), strict=True):
        if known := [float(value) for value in values if value is not None]:
            found[metric] = Mean(statistics.mean(known), statistics.pstdev(known))
    return found
