"""Records the server's start, and the machine's load: read every few seconds, and stored as the mean of a minute."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from tinker_server.errors import DatabaseUnavailable
from tinker_server.routes.metrics_collect import distinct, engine_uses
from tinker_server.store.machine_history import STARTED, Measure
from tinker_server.web.deps import Services

log = logging.getLogger(__name__)
READ_S, STORED_S = 10.0, 60.0
_RATES = {"training": "trained_tokens_per_s", "sampled": "sampled_tokens_per_s"}
"""Measures by the kind of usage that they are the rate of."""


async def record_loads(server: Services) -> None:
    """Record the start, then the load for as long as the server lives."""
    await _put(server, {(STARTED, ""): 1.0})
    counted, since = dict(server.usage.totals), time.monotonic()
    while True:
        readings: list[Mapping[Measure, float]] = []
        while len(readings) < STORED_S / READ_S:
            await asyncio.sleep(READ_S)
            readings.append(await _read(server))
        now, seconds = dict(server.usage.totals), time.monotonic() - since
        rates = {
            (_RATES[kind], base_model): (amount - counted.get((kind, base_model), 0)) / seconds
            for (kind, base_model), amount in now.items()
            if kind in _RATES
        }
        counted, since = now, time.monotonic()
        await _put(server, means(readings) | rates)


async def _put(server: Services, values: Mapping[Measure, float]) -> None:
    try:
        await server.machine_history.put(values, time.time())
    except DatabaseUnavailable as error:
        log.warning("failed to store a minute of the machine's load: %s", error)
    except Exception:  # the server must not stop for it
        log.exception("failed to store a minute of the machine's load")


def means(readings: Sequence[Mapping[Measure, float]]) -> dict[Measure, float]:
    """Return the mean of each measure over the readings that have it: an engine that starts has none."""
    values: defaultdict[Measure, list[float]] = defaultdict(list)
    for reading in readings:
        for measure, value in reading.items():
            values[measure].append(value)
    return {measure: fmean(of) for measure, of in values.items()}


async def _read(server: Services) -> dict[Measure, float]:
    found: dict[Measure, float] = {("operations", ""): float(len(list(server.scheduler.in_flight())))}
    for name, use in (await engine_uses(distinct(dict(server.models.served)))).items():
        found["sequences", name] = use.sequences_running
        if use.batch is not None:
            found["kv_cache_used", name] = use.batch.cache_used
    for gpu in await asyncio.to_thread(server.backend.gpus):
        found["gpu_utilization", f"GPU {gpu.index}"] = gpu.utilization
    return found
