"""Metrics that are read at the moment of a scrape: queues, processes, engines, GPUs, disk."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import CollectorRegistry

from tinker_server.backends.protocol import BaseModel, EngineUse, GpuState, NodeState, ProcessState
from tinker_server.offload import LARGE, off_loop
from tinker_server.store.last_backup import backup_age_s
from tinker_server.web.deps import Services

_BACKUP_AGE = "Seconds since the last backup; before the first, since the first start of the server."
Labels = TypeVar("Labels", bound=tuple[str, ...])


@dataclass(frozen=True)
class Reading:
    """Values of a scrape, with the interface that `generate_latest` expects of a registry."""

    counted: CollectorRegistry
    read: list[Metric]

    def collect(self) -> Iterator[Metric]:
        """Yield the registry's instruments, then the values read at this scrape."""
        yield from self.counted.collect()
        yield from self.read


def distinct(served: dict[str, BaseModel]) -> dict[str, BaseModel]:
    """Return each base model once, under one of its names: some names share trainer and sampler."""
    return {name: base for name, base in {id(base.trainer): (name, base) for name, base in served.items()}.values()}


async def engine_uses(models: Mapping[str, BaseModel]) -> dict[str, EngineUse]:
    """Return the load of each model's engines; of those that answer."""
    uses = await asyncio.gather(*(base.engine_use() for base in models.values()))
    return {name: use for name, use in zip(models, uses, strict=True) if use is not None}


async def read(server: Services, owner: str) -> Reading:
    """Read the current values for an owner."""
    models = distinct(dict(server.models.served))
    engines = await engine_uses(models)
    gpus = await off_loop(owner, LARGE, server.backend.gpus)
    disk = await off_loop(owner, LARGE, shutil.disk_usage, server.settings.data_dir)
    age_s = await off_loop(owner, LARGE, backup_age_s, server.settings.data_dir)
    families = [
        *_queue(server),
        *_work(server),
        *_processes({name: base.processes() for name, base in models.items()}),
        *_engines(engines),
        *_gpus(gpus),
        *_nodes(server.backend.nodes()),
        _gauge("tinker_disk_free_bytes", "Free space on the disk of the data directory.", (), {(): disk.free}),
        _gauge("tinker_backup_age_seconds", _BACKUP_AGE, (), {} if age_s is None else {(): age_s}),
    ]
    return Reading(server.metrics.registry, families)


def _queue(server: Services) -> Iterator[Metric]:
    in_flight = Counter(
        (operation.operation_kind, "running" if runs else "waiting") for operation, runs in server.scheduler.in_flight()
    )
    yield _gauge("tinker_operations", "Operations that wait or run.", ("kind", "state"), in_flight)
    (num_samples, prompt_bytes, image_bytes), (_, training_bytes) = (
        server.admission.samples.totals,
        server.admission.queued.totals,
    )
    waiting = {
        ("samples",): num_samples,
        ("prompt_bytes",): prompt_bytes,
        ("image_bytes",): image_bytes,
        ("training_bytes",): training_bytes,
    }
    yield _gauge("tinker_admitted", "Amounts in flight that are bounded per owner.", ("what",), waiting)


def _work(server: Services) -> Iterator[Metric]:
    tokens = {key: amount for key, amount in server.usage.totals.items() if key[0] not in ("checkpoint", "trainer_ms")}
    yield _counter("tinker_tokens", "Tokens trained on, prefilled and sampled.", ("kind", "base_model"), tokens)
    snapshots = {("taken",): server.snapshots.num_taken, ("failed",): server.snapshots.num_failed}
    yield _counter("tinker_snapshots", "Snapshots of models in training.", ("outcome",), snapshots)
    log_bytes = server.scheduler.log_bytes
    yield _gauge("tinker_log_bytes", "Requests logged to be replayed after a crash.", (), {(): log_bytes})


def _processes(of_models: dict[str, list[ProcessState]]) -> Iterator[Metric]:
    every = {(name, process.name): process for name, processes in of_models.items() for process in processes}
    alive = {key: float(process.is_alive) for key, process in every.items()}
    yield _gauge("tinker_process_up", "Whether a child process is alive.", ("base_model", "process"), alive)
    restarts = {key: process.restarts for key, process in every.items()}
    text = "Restarts of a child process."
    yield _counter("tinker_process_restarts", text, ("base_model", "process"), restarts)


def _engines(uses: dict[str, EngineUse]) -> Iterator[Metric]:
    sequences: dict[tuple[str, ...], float] = {}
    adapters: dict[tuple[str, ...], float] = {}
    for name, use in uses.items():
        sequences |= {
            (name, "running"): use.sequences_running,
            (name, "waiting"): use.sequences_waiting,
            (name, "most"): use.max_sequences,
        }
        adapters |= {(name, "running"): use.adapters, (name, "most"): use.max_adapters}
    yield _gauge("tinker_engine_sequences", "Sequences in the sampler.", ("base_model", "state"), sequences)
    yield _gauge("tinker_engine_adapters", "Adapters with a slot in the sampler.", ("base_model", "state"), adapters)
    batches = {name: use.batch for name, use in uses.items() if use.batch is not None}
    counts = {(name, "running"): batch.running for name, batch in batches.items()}
    counts |= {(name, "waiting"): batch.waiting for name, batch in batches.items()}
    yield _gauge("tinker_engine_batch", "Sequences in vLLM's scheduler.", ("base_model", "state"), counts)
    used = {(name,): batch.cache_used for name, batch in batches.items()}
    yield _gauge("tinker_engine_kv_cache_used", "Fraction of the KV cache in use.", ("base_model",), used)
    yield from _pool(
        {(name, str(number)): engine for name, use in uses.items() for number, engine in use.engines.items()}
    )


def _pool(uses: dict[tuple[str, str], EngineUse]) -> Iterator[Metric]:
    """Yield what each of several engines has; the metrics above are their sums."""
    sequences: dict[tuple[str, ...], float] = {}
    for engine, use in uses.items():
        sequences |= {(*engine, "running"): use.sequences_running, (*engine, "waiting"): use.sequences_waiting}
    labels = ("base_model", "engine")
    yield _gauge("tinker_pool_sequences", "Sequences in each of several engines.", (*labels, "state"), sequences)
    used = {engine: use.batch.cache_used for engine, use in uses.items() if use.batch is not None}
    yield _gauge("tinker_pool_kv_cache_used", "Fraction of the KV cache of each of several engines.", labels, used)


def _gpus(gpus: list[GpuState]) -> Iterator[Metric]:
    memory: dict[tuple[str, ...], float] = {}
    for gpu in gpus:
        memory |= {(str(gpu.index), "used"): gpu.used_bytes, (str(gpu.index), "total"): gpu.total_bytes}
    yield _gauge("tinker_gpu_memory_bytes", "Memory of a GPU.", ("gpu", "state"), memory)
    used = {(str(gpu.index),): gpu.utilization for gpu in gpus}
    yield _gauge("tinker_gpu_utilization", "Fraction of the time in which a kernel runs.", ("gpu",), used)


def _nodes(nodes: list[NodeState]) -> Iterator[Metric]:
    alive = {(node.name, node.address): float(node.is_alive) for node in nodes}
    yield _gauge("tinker_node_up", "Whether a machine that joined the cluster is there.", ("node", "address"), alive)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Labels, float]) -> Metric:
    return _fill(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Labels, float]) -> Metric:
    return _fill(CounterMetricFamily(name, text, labels=labels), values)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Labels, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([str(part) for part in key], value)
    return family
