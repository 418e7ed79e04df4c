"""Creates the traces of operations, and exports their spans in batches from a thread.

The ids of a trace and of its root span are derived from the request_id, so that a server that resumes an operation
continues its trace. Only a trace that a client began has the client's id.
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
"""Seconds to send ended spans when the server stops."""
SERVICES = ("server", "trainer", "sampler")
"""Kinds of processes; `service.name` is `tinker-` and the kind."""


class Exporter:
    """Creates and exports the traces of a server."""

    def __init__(self, endpoint: str) -> None:
        """Start exporting to `endpoint`, the collector's URL for OTLP over HTTP without `/v1/traces`."""
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

    def begin(self, operation: Operation) -> Trace:
        """Begin the trace of an operation that was accepted."""
        accepted_ns = round(operation.accepted_at * 1e9)
        parent = TraceContextTextMapPropagator().extract({"traceparent": operation.traceparent}, Context())
        attributes = _attributes(operation)
        with self._ids.derive_ids(operation.request_id):
            root = self._tracers["server"].start_span(
                operation.operation_kind, parent, SpanKind.SERVER, attributes, start_time=accepted_ns
            )
        trace = Trace(root, self._tracers)
        if operation.tries is None:  # else an earlier server accepted it
            trace.begin("accept", accepted_ns)
        trace.begin("queue")
        return trace

    async def close(self) -> None:
        """Send the remaining spans, for at most FLUSH_S, and stop."""
        closing = threading.Thread(target=self._shut_down, name="end of tracing", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_S)
        self._collector.shutdown()

    def _shut_down(self) -> None:
        for provider in self._providers:
            provider.shutdown()


def _attributes(operation: Operation) -> dict[str, str | int]:
    lane_name = "sampling_session_id" if operation.operation_kind == "sample" else "model_id"
    attributes: dict[str, str | int] = {
        "tinker.operation": operation.operation_kind,
        "tinker.request_id": operation.request_id,
        f"tinker.{lane_name}": operation.lane.removesuffix(UNLOAD_SUFFIX),
        "tinker.seq_id": operation.seq_id,
        "tinker.owner": operation.owner,
    }
    return attributes if operation.tries is None else attributes | {"tinker.tries": operation.tries}


class _Ids(RandomIdGenerator):
    """OpenTelemetry's generator of ids: random, except for the root of an operation's trace."""

    def __init__(self) -> None:
        self._request_id = ""

    @contextlib.contextmanager
    def derive_ids(self, request_id: str) -> Iterator[None]:
        """Derive the ids of the root span made in the block from a request_id, a random UUID in hexadecimal digits."""
        self._request_id = request_id
        try:
            yield
        finally:
            self._request_id = ""

    def generate_trace_id(self) -> int:
        """Return the UUID with its halves swapped: trace samplers read the last 56 bits, and the UUID's last half
        begins with constant bits."""
        if not self._request_id:
            return super().generate_trace_id()
        return int(self._request_id[16:] + self._request_id[:16], 16)

    def generate_span_id(self) -> int:
        """Return the UUID's first half, which is never 0, since it holds the version."""
        return int(self._request_id[:16], 16) if self._request_id else super().generate_span_id()

    def is_trace_id_random(self) -> bool:
        """Return False: some bits of a UUID are constant."""
        return False
