"""Instruments of `/metrics`. Labels are kinds, routes, outcomes and served base models: never a run or owner.

Values that other parts already count are read at each scrape (`routes/metrics_collect.py`); the rest is counted here.
"""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation, Result

SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
NATS = (1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """Instruments of a server. A process may run several servers in succession, so each has its own registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # of the whole process: a time for each value
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tinker_http_requests",
            "Requests that were answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._request_s = Histogram(
            "tinker_http_request_seconds",
            "Seconds from a request's head to the head of its answer; polls are held open.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._accepted = Counter(
            "tinker_operations_accepted", "Operations that were accepted.", ("kind",), registry=self.registry
        )
        self._ended = Counter(
            "tinker_operations_ended", "Operations that have a result.", ("kind", "outcome"), registry=self.registry
        )
        self._wait_s = Histogram(
            "tinker_operation_wait_seconds",
            "Seconds that an operation waited from its acceptance until it ran.",
            ("kind",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._run_s = Histogram(
            "tinker_operation_run_seconds",
            "Seconds that an operation ran.",
            ("kind",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._sampler_gap = Histogram(
            "tinker_sampler_gap_nats",
            "Mean distance between the trainer's and the sampler's log probabilities, per batch that sent them.",
            buckets=NATS,
            registry=self.registry,
        )

    def note_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request whose answer has begun."""
        self._requests.labels(method, route, status).inc()
        self._request_s.labels(route).observe(seconds)

    def accepted(self, operation: Operation) -> None:
        """Count an operation that this server accepted."""
        if operation.tries is None:
            self._accepted.labels(operation.operation_kind).inc()

    async def on_success(self, work: Work[Any]) -> None:
        """Record the times of an operation that has succeeded."""
        self._wait_s.labels(work.operation.operation_kind).observe(work.waited_s)
        self._run_s.labels(work.operation.operation_kind).observe(work.run_s)
        if work.step is not None and work.step.sampler_gap is not None:
            self._sampler_gap.observe(work.step.sampler_gap)

    def ended(self, _: str, result: Result) -> None:
        """Count an operation that has its result."""
        outcome = "done" if result.failure_category is None else f"{result.failure_category}_error"
        self._ended.labels(result.operation_kind, outcome).inc()
