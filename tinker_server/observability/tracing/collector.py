"""Export of spans to the collector, with few log lines about its failures."""

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)


class Collector(SpanExporter):
    """Sends spans to the collector. `export` blocks, so the event loop must not call it."""

    def __init__(self, endpoint: str) -> None:
        self._address = urlsplit(endpoint).netloc.rpartition("@")[2]
        self._exporter: SpanExporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._failures = _FirstFailure(self._address)
        self._has_ended = False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._logger = logging.getLogger(OTLPSpanExporter.__module__)
        self._logger.setLevel(logging.WARNING)
        self._logger.addFilter(self._failures)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Try for some seconds, then drop the spans."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS and self._failures.is_reported:
            self._failures.is_reported = False
            log.info("the collector at %s accepts traces again", self._address)
        return result

    def shutdown(self) -> None:
        """Stop a running export."""
        if not self._has_ended:
            self._has_ended = True
            self._exporter.shutdown()
            self._logger.setLevel(logging.CRITICAL)
            self._logger.removeFilter(self._failures)


class _FirstFailure(logging.Filter):
    """Logs a line for the exporter's failures, until an export succeeds."""

    def __init__(self, collector: str) -> None:
        super().__init__()
        self._collector = collector
        self.is_reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Suppress every line of the exporter; log the first as our own."""
        if not self.is_reported:
            self.is_reported = True
            text = "the collector at %s takes no traces, which are dropped after some tries: %s"
            log.warning(text, self._collector, record.getMessage())
        return False
