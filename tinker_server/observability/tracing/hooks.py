"""Hooks that the server calls as operations begin and end.

Without a collector in the settings they import, store and do nothing. No error here fails an operation. The form of
spans and their export are defined in `trace.py` and `exporter.py`.
"""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from backends.processes.spans import ProcessSpan, spans_to
from tinker_server.errors import StartFailed
from tinker_server.settings import Settings
from tinker_server.store.futures.records import Operation

if TYPE_CHECKING:
    from tinker_server.observability.tracing.exporter import Exporter
    from tinker_server.observability.tracing.trace import Trace

log = logging.getLogger(__name__)
_current: ContextVar["Trace | None"] = ContextVar("trace", default=None)
"""Trace of the operation that runs in this context."""


def note(**attributes: str | int) -> None:
    """Add attributes to the trace of the operation that runs in this context. Never pass a client's text."""
    if (trace := _current.get()) is not None:
        with _harmless():
            trace.note(attributes)


class Tracing:
    """Traces of unfinished operations."""

    def __init__(self, exporter: "Exporter | None") -> None:
        """Trace with this exporter; None: trace nothing."""
        self._exporter = exporter
        self._traces: dict[str, Trace] = {}
        """Traces by request_id."""

    def accepted(self, operation: Operation, request_id: str) -> None:
        """Begin a trace: this server or an earlier one stored the operation under this id, and it waits."""
        if self._exporter is not None:
            with _harmless():
                self._traces[request_id] = self._exporter.begin(operation, request_id)

    @contextlib.contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """Trace the operation while it runs in the block."""
        if (trace := self._traces.get(operation.request_id)) is None:
            yield
            return

        def on_span(span: ProcessSpan) -> None:
            with _harmless():
                trace.add_process_span(span)

        with _harmless():
            trace.begin("run")
        token = _current.set(trace)
        try:
            with spans_to(on_span):
                yield
        finally:
            _current.reset(token)
            with _harmless():
                trace.end("run")

    def ended(self, request_id: str, failure_category: str | None) -> None:
        """End the run: the operation has a result, which is stored next."""
        if (trace := self._traces.get(request_id)) is not None:
            with _harmless():
                trace.ended(failure_category)

    def stored(self, request_id: str) -> None:
        """End the trace: the result can be fetched."""
        if (trace := self._traces.pop(request_id, None)) is not None:
            with _harmless():
                trace.stored()

    async def close(self) -> None:
        """Send the ended traces, for a limited time. The next server continues the others."""
        if self._exporter is not None:
            await self._exporter.close()


def start_tracing(settings: Settings) -> Tracing:
    """Start tracing. Raises StartFailed if a collector is set, and OpenTelemetry is missing or misconfigured."""
    if not settings.otel_endpoint:
        return Tracing(None)
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


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:  # a trace must not cost a result
        log.exception("a trace is incomplete")
