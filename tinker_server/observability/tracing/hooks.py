"""Where the server's work meets its traces: what is begun and ended, and when.

Nothing is imported, kept or done unless a collector is set, and nothing here fails an operation. How spans look and
where they go is the other files' to know.
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
"""Of the operation that is carried out here."""


def note(**attributes: str | int) -> None:
    """Say more of the operation that is carried out here. Never what a client wrote."""
    if (trace := _current.get()) is not None:
        with _harmless():
            trace.note(attributes)


class Tracing:
    """The traces of operations that are not finished."""

    def __init__(self, exporter: "Exporter | None") -> None:
        """None: nothing is traced."""
        self._exporter = exporter
        self._traces: dict[str, Trace] = {}
        """By request_id."""

    def accepted(self, operation: Operation, request_id: str) -> None:
        """It is stored under this id, by this server or an earlier one, and waits."""
        if self._exporter is not None:
            with _harmless():
                self._traces[request_id] = self._exporter.begin(operation, request_id)

    @contextlib.contextmanager
    def running(self, operation: Operation) -> Iterator[None]:
        """While it is carried out."""
        if (trace := self._traces.get(operation.request_id)) is None:
            yield
            return

        def heard(span: ProcessSpan) -> None:
            with _harmless():
                trace.heard(span)

        with _harmless():
            trace.begin("run")
        token = _current.set(trace)
        try:
            with spans_to(heard):
                yield
        finally:
            _current.reset(token)
            with _harmless():
                trace.end("run")

    def ended(self, request_id: str, failure_category: str | None) -> None:
        """It has a result, which is stored next."""
        if (trace := self._traces.get(request_id)) is not None:
            with _harmless():
                trace.ended(failure_category)

    def stored(self, request_id: str) -> None:
        """Its result can be fetched."""
        if (trace := self._traces.pop(request_id, None)) is not None:
            with _harmless():
                trace.stored()

    async def close(self) -> None:
        """Send what has ended, for a while. What has not goes on with the next server."""
        if self._exporter is not None:
            await self._exporter.close()


def start_tracing(settings: Settings) -> Tracing:
    """Raises StartFailed where a collector is set and OpenTelemetry is not installed, or is set up wrongly."""
    if not settings.otel_endpoint:
        return Tracing(None)
    try:
        from tinker_server.observability.tracing.exporter import Exporter
    except ImportError as error:
        raise StartFailed(
            f"otel_endpoint is set, and OpenTelemetry is not installed ({error}): pip install 'tinker-server[otel]'"
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
        log.exception("a trace is not whole")
