"""The latest value of a metric of each run, as SQL: runs are sorted, filtered and shown by it.

A metric is a recorded number (`RECORDED`) or a number that the client reported, by its name; where both have the same
name, `client:` before it means the client's.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    Select,
    Subquery,
    case,
    column,
    func,
    literal,
    select,
    true,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.errors import BadRequest
from tinker_server.store.tables import ClientMetricRow, StepRow, TrainingRunRow

CLIENTS = "client:"
MAX_NAME = 200
TREND_POINTS = 24
NEAR = 8
"""Operations around a place of a run among which a recorded metric is looked for."""
_OF, _REPORTED = StepRow.__table__.c, ClientMetricRow.__table__.c
_IS_BATCH = func.coalesce(_OF.loss_tokens, 0) > 0
RECORDED: Mapping[str, tuple[ColumnElement[Any], ColumnElement[bool]]] = {
    "steps": (_OF.step + case((_OF.learning_rate.is_not(None), 1), else_=0), _OF.step.is_not(None)),
    "tokens": (_OF.total_tokens, _OF.total_tokens.is_not(None)),
    "loss": (_OF.loss / _OF.loss_tokens, _IS_BATCH),
    "tokens_per_s": (_OF.tokens / func.nullif(_OF.run_s, 0), _IS_BATCH),
    **{
        name: (_OF[name], _OF[name].is_not(None))
        for name in ("grad_norm", "learning_rate", "advantage", "sampler_gap", "divergence", "clip_fraction")
    },
}
"""Value of a recorded metric in a row of `steps`, and which rows have it."""
_COMPARED = re.compile(r"(?P<name>[^<>=]+)(?P<sign><=|>=|<|>)(?P<bound>[-+]?[0-9.]+(?:e[-+]?[0-9]+)?)", re.IGNORECASE)
_SIGNS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Order:
    """The metric that runs are sorted by; runs without it come last."""

    metric: str
    is_descending: bool = True


def require_name(name: str) -> str:
    """Return the name of a metric. Raises BadRequest for a name that no metric has."""
    if not 0 < len(name) <= MAX_NAME or "\0" in name:
        raise BadRequest(f"metric: the name {name[:MAX_NAME]!r} is empty, longer than {MAX_NAME} or has a NUL")
    return name


def latest(metric: str) -> ScalarSelect[float]:
    """Return the latest value of a metric of the run of the enclosing query; null if it has none.

    A recorded metric is looked for among the last operations alone, so that runs without it cost no more.
    """
    if metric not in RECORDED:
        name = require_name(metric.removeprefix(CLIENTS))
        mine = select(_REPORTED.value).where(_REPORTED.model_id == TrainingRunRow.model_id, _REPORTED.name == name)
        newest = mine.order_by(_REPORTED.step.desc())
    else:
        value, is_known = RECORDED[metric]
        last = _last_number().correlate(TrainingRunRow).scalar_subquery()
        of_run = (_OF.model_id == TrainingRunRow.model_id, _OF.seq_id > last - 2 * NEAR)
        newest = select(value).where(*of_run, is_known).order_by(_OF.seq_id.desc())
    return newest.limit(1).correlate(TrainingRunRow).scalar_subquery()


def _last_number() -> Select[Any]:
    return select(func.max(_OF.seq_id)).where(_OF.model_id == TrainingRunRow.model_id)


def comparison(word: str) -> ColumnElement[bool] | None:
    """Return the condition of a word such as `reward>0.5`; None if the word is none."""
    found = _COMPARED.fullmatch(word)
    if found is None:
        return None
    try:
        bound = float(found["bound"])
    except ValueError:
        return None
    condition: ColumnElement[bool] = _SIGNS[found["sign"]](latest(found["name"]), bound)
    return condition


async def latest_values(
    session: AsyncSession, run_ids: Sequence[str], metrics: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the latest values of metrics by run and name, as far as they are known."""
    columns = (latest(metric).label(f"m{number}") for number, metric in enumerate(metrics))
    query = select(TrainingRunRow.model_id, *columns).where(TrainingRunRow.model_id.in_(run_ids))
    return {
        run_id: {name: float(value) for name, value in zip(metrics, values, strict=True) if value is not None}
        for run_id, *values in await session.execute(query)
    }


async def trends(session: AsyncSession, run_ids: Sequence[str], metric: str) -> dict[str, list[float]]:
    """Return some values of a metric of each run in order: evenly spaced, each found by the index."""
    numbers = union_all(*(select(literal(number).label("k")) for number in range(TREND_POINTS))).subquery()
    name = require_name(metric.removeprefix(CLIENTS))
    of_run = (_REPORTED.model_id == TrainingRunRow.model_id, _REPORTED.name == name)
    number = _last_number() if metric in RECORDED else select(func.max(_REPORTED.step)).where(*of_run)
    last = number.correlate(TrainingRunRow).scalar_subquery().label("last")
    runs = select(TrainingRunRow.model_id, last).where(TrainingRunRow.model_id.in_(run_ids)).subquery()
    value = _value_at(metric, runs, numbers)
    places = select(runs.c.model_id, numbers.c.k, value).select_from(runs.join(numbers, true()))
    query = places.where(runs.c.last.is_not(None)).order_by(runs.c.model_id, numbers.c.k)
    found: dict[str, list[float]] = {}
    for run_id, _, number in await session.execute(query):
        if number is not None:
            found.setdefault(run_id, []).append(float(number))
    return found


def _value_at(metric: str, runs: Subquery, numbers: Subquery) -> ScalarSelect[Any]:
    """Return the first value at or after a part of a run; of a recorded metric, near it."""
    parts = TREND_POINTS - 1
    # As last * k / parts, rounded up, would be if it did not overflow. PostgreSQL compares integers alone by the index.
    place = runs.c.last // parts * numbers.c.k + (runs.c.last % parts * numbers.c.k + parts - 1) // parts
    if metric in RECORDED:
        value, is_known = RECORDED[metric]
        near = _OF.seq_id.between(place - NEAR, place + NEAR)
        found = select(value).where(_OF.model_id == runs.c.model_id, near, is_known).order_by(_OF.seq_id)
    else:
        name = metric.removeprefix(CLIENTS)
        mine = (_REPORTED.model_id == runs.c.model_id, _REPORTED.name == name, _REPORTED.step >= place)
        found = select(_REPORTED.value).where(*mine).order_by(_REPORTED.step)
    return found.limit(1).correlate(runs, numbers).scalar_subquery()


async def names_of_runs(session: AsyncSession, run_ids: Sequence[str]) -> list[str]:
    """Return the names of the metrics that clients reported of these runs, sorted: each is found by the index."""
    first = select(func.min(_REPORTED.name)).where(_REPORTED.model_id == TrainingRunRow.model_id)
    start = select(TrainingRunRow.model_id, first.correlate(TrainingRunRow).scalar_subquery().label("name"))
    found = start.where(TrainingRunRow.model_id.in_(run_ids)).cte("found", recursive=True)
    following = select(func.min(_REPORTED.name)).where(
        _REPORTED.model_id == found.c.model_id, _REPORTED.name > found.c.name
    )
    step = select(found.c.model_id, following.correlate(found).scalar_subquery()).where(found.c.name.is_not(None))
    names = found.union_all(step)
    query: Select[Any] = select(column("name")).select_from(names).where(column("name").is_not(None)).distinct()
    return sorted(str(name) for name in await session.scalars(query))
