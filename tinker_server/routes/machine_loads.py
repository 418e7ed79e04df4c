"""Records starts of server and trainers, and the load of the machine, read every few seconds and stored each minute."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from tinker_server.backends.protocol import Trainer
from tinker_server.errors import DatabaseUnavailable
from tinker_server.routes.metrics_collect import distinct, engine_uses
from tinker_server.store.machine_history import SERVER_STARTED, TRAINER_RESTARTED, Measure
from tinker_server.web.deps import Services

log = logging.getLogger(__name__)
READ_S, STORED_S = 10.0, 60.0
_RATES = {"training": "trained_tokens_per_s", "sampled": "sampled_tokens_per_s"}
"""Measures by the kind of usage that they are the rate of."""


async def record_loads(server: Services) -> None:
    """Record the start, then the load and restarts of trainers for as long as the server lives."""
    await _put(server, {(SERVER_STARTED, ""): 1.0})
    async with asyncio.TaskGroup() as following:
        for trainer in server.models.trainers():
            following.create_task(_record_restarts(server, trainer))
        following.create_task(_record_minutes(server))


async def _record_restarts(server: Services, trainer: Trainer) -> None:
    seen = 0
    while True:
        seen = await trainer.wait_for_restart(seen)
        names = [name for name, base in server.models.served.items() if base.trainer is trainer]
        await _put(server, {(TRAINER_RESTARTED, name): 1.0 for name in names})


async def _record_minutes(server: Services) -> None:
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
        log.warning("failed to store the machine's load or a start: %s", error)
    except Exception:  # the server must not stop for it
        log.exception("failed to store the machine's load or a start")


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
