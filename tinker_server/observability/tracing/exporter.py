"""Makes operations' traces, and has their spans sent from a thread, in batches.

A trace's id and its root's are made of the request_id, so that a server that takes up what an earlier one left goes on
with the same trace. Only a trace that a client began has the client's id.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tinker_server.observability.tracing.collector import Collector
from tinker_server.observability.tracing.trace import Trace
from tinker_server.store.futures.records import UNLOAD_SUFFIX, Operation

FLUSH_S = 2.0
"""For what has ended to be sent, when the server stops."""
SERVICES = ("server", "trainer", "sampler")
"""`service.name` of the kinds of processes, behind `tinker-`."""


class Exporter:
    """One for a server."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: where the collector takes OTLP over HTTP, without `/v1/traces`."""
        self._collector = Collector(endpoint)
        processor = BatchSpanProcessor(self._collector)
        self._ids = _Ids()
        self._providers: list[TracerProvider] = []
        self._tracers: dict[str, Tracer] = {}
        for service in SERVICES:
            resource = Resource.create({"service.name": f"tinker-{service}"})
            provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
            provider.add_span_processor(processor)
            self._providers.append(provider)
            self._tracers[service] = provider.get_tracer("tinker_server")

    def begin(self, operation: Operation, request_id: str) -> Trace:
        """The trace of an operation that was accepted under this id."""
        accepted_ns = round(operation.accepted_at * 1e9)
        parent = TraceContextTextMapPropagator().extract({"traceparent": operation.traceparent}, Context())
        attributes = _attributes(operation, request_id)
        with self._ids.of(request_id):
            root = self._tracers["server"].start_span(
                operation.operation_kind, parent, SpanKind.SERVER, attributes, start_time=accepted_ns
            )
        trace = Trace(root, self._tracers)
        if operation.tries is None:  # else an earlier server accepted it
            trace.begin("accept", accepted_ns)
        trace.begin("queue")
        return trace

    async def close(self) -> None:
        """Send what is there, for FLUSH_S at most, and end."""
        closing = threading.Thread(target=self._shut_down, name="end of tracing", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_S)
        self._collector.shutdown()

    def _shut_down(self) -> None:
        for provider in self._providers:
            provider.shutdown()


def _attributes(operation: Operation, request_id: str) -> dict[str, str | int]:
    of = "sampling_session_id" if operation.operation_kind == "sample" else "model_id"
    found: dict[str, str | int] = {
        "tinker.operation": operation.operation_kind,
        "tinker.request_id": request_id,
        f"tinker.{of}": operation.lane.removesuffix(UNLOAD_SUFFIX),
        "tinker.seq_id": operation.seq_id,
        "tinker.owner": operation.owner,
    }
    return found if operation.tries is None else found | {"tinker.tries": operation.tries}


class _Ids(RandomIdGenerator):
    """Random, except for the root of an operation's trace."""

    def __init__(self) -> None:
        self._request_id = ""

    @contextlib.contextmanager
    def of(self, request_id: str) -> Iterator[None]:
        """The root that is made in the block has ids of a request_id, which is a random UUID in hexadecimal digits."""
        self._request_id = request_id
        try:
            yield
        finally:
            self._request_id = ""

    def generate_trace_id(self) -> int:
        """The halves change places: samplers go by the last bits, and a UUID's last half begins with a constant."""
        if not self._request_id:
            return super().generate_trace_id()
        return int(self._request_id[16:] + self._request_id[:16], 16)

    def generate_span_id(self) -> int:
        """Never 0: a UUID has its version in its first half."""
        return int(self._request_id[:16], 16) if self._request_id else super().generate_span_id()

    def is_trace_id_random(self) -> bool:
        """Not in every bit."""
        return False
