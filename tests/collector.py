"""A collector of OpenTelemetry traces in a thread of the test: takes OTLP over HTTP, as protobuf."""

import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """One that has arrived."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]


class Collector:
    """The received spans, and the answer to give."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.append(self.path)
                if collector.status == 200:
                    collector.bodies.append(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """To nobody."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def spans(self) -> list[Span]:
        """All that have arrived."""
        return [
            Span(
                service=_values(of_resource.resource.attributes)["service.name"],
                trace_id=one.trace_id.hex(),
                span_id=one.span_id.hex(),
                parent_id=one.parent_span_id.hex(),
                name=one.name,
                began_ns=one.start_time_unix_nano,
                ended_ns=one.end_time_unix_nano,
                failed=one.status.code == one.status.STATUS_CODE_ERROR,
                attributes=_values(one.attributes),
            )
            for body in list(self.bodies)
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for of_scope in of_resource.scope_spans
            for one in of_scope.spans
        ]

    def trace(self, request_id: str) -> dict[str, Span]:
        """An operation's spans by name; two of one name are an error."""
        (root,) = [one for one in self.spans() if one.attributes.get("tinker.request_id") == request_id]
        found: defaultdict[str, list[Span]] = defaultdict(list)
        for one in self.spans():
            if one.trace_id == root.trace_id:
                found[one.name].append(one)
        assert all(len(spans) == 1 for spans in found.values()), found
        return {name: spans[0] for name, spans in found.items()}


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
