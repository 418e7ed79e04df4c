"""Traces of operations, from their acceptance until their results are stored.

Without a collector in the settings nothing is imported or observed. The form of spans and their export are defined in
`trace.py` and `exporter.py`.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tinker_server.backends.processes.spans import ProcessSpan, spans_to
from tinker_server.errors import StartFailed
from tinker_server.settings import Settings
from tinker_server.store.futures.observers import Observers, Work, notify
from tinker_server.store.futures.records import Operation, Result

if TYPE_CHECKING:
    from tinker_server.observability.tracing.exporter import Exporter
    from tinker_server.observability.tracing.trace import Trace

TOKENS = {"training": "trained_tokens", "cached_prefill": "cached_tokens", "sampled": "sampled_tokens"}
"""Attributes by what their amounts are counted as."""


class Tracing:
    """Traces of unfinished operations, as an observer of them."""

    def __init__(self, exporter: "Exporter") -> None:
        self._exporter = exporter
        self._traces: dict[str, Trace] = {}
        """Traces by request_id."""

    def observe(self, observers: Observers) -> None:
        """Subscribe to all events of operations."""
        observers.accepted.append(self.accepted)
        observers.running.append(self.running)
        observers.succeeded.append(self.on_success)
        observers.ended.append(self.ended)
        observers.stored.append(self.stored)

    def accepted(self, operation: Operation) -> None:
        """Begin a trace: this or an earlier server stored the operation, and it waits."""
        self._traces[operation.request_id] = self._exporter.begin(operation)

    @contextlib.contextmanager
    def running(self, work: Work[Any]) -> Iterator[None]:
        """Trace the operation while it runs in the block."""
        if (trace := self._traces.get(work.operation.request_id)) is None:
            yield
            return

        def on_span(span: ProcessSpan) -> None:
            notify([trace.add_process_span], span)

        notify([trace.begin], "run")
        try:
            with spans_to(on_span):
                yield
        finally:
            notify([trace.end], "run")
            if work.base_model:
                notify([trace.note], {"base_model": work.base_model})

    async def on_success(self, work: Work[Any]) -> None:
        """Note how many tokens the operation took. No attribute holds a client's text."""
        counts = {TOKENS[kind]: amount for kind, amount in work.used.items() if kind in TOKENS}
        if "prefill" in work.used:
            counts["prompt_tokens"] = work.used["prefill"] + work.used["cached_prefill"]
        self._traces[work.operation.request_id].note(counts)

    def ended(self, request_id: str, result: Result) -> None:
        """End the run: the operation has a result, which is stored next."""
        self._traces[request_id].ended(result.failure_category)

    def stored(self, request_id: str, _: Result) -> None:
        """End the trace: the result can be fetched."""
        self._traces.pop(request_id).stored()

    async def close(self) -> None:
        """Send the ended traces, for a limited time. The next server continues the others."""
        await self._exporter.close()


def start_tracing(settings: Settings) -> Tracing | None:
    """Start tracing, if a collector is set. Raises StartFailed if OpenTelemetry is missing or misconfigured."""
    if not settings.otel_endpoint:
        return None
    try:
        from tinker_server.observability.tracing.exporter import Exporter
    except ImportError as error:
        raise StartFailed(
            f"otel_endpoint is set, and OpenTelemetry is not installed ({error}): run pip install '.[otel]' in the"
            " server's source folder"
        ) from None
    try:
        return Tracing(Exporter(settings.otel_endpoint))
    except ValueError as error:  # in its own variables, OTEL_*
        raise StartFailed(f"OpenTelemetry cannot start: {error}") from None
