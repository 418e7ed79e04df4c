"""The way to the collector, and what is logged of it."""

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)


class Collector(SpanExporter):
    """Where spans are sent to; `export` waits for it, so the event loop must not call it."""

    def __init__(self, endpoint: str) -> None:
        self._to = urlsplit(endpoint).netloc.rpartition("@")[2]
        self._exporter: SpanExporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._trouble = _Trouble(self._to)
        self._has_ended = False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._logger = logging.getLogger(OTLPSpanExporter.__module__)
        self._logger.setLevel(logging.WARNING)
        self._logger.addFilter(self._trouble)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Tries for some seconds, then drops the spans."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS and self._trouble.is_told:
            self._trouble.is_told = False
            log.info("the collector at %s takes traces again", self._to)
        return result

    def shutdown(self) -> None:
        """Ends what is being tried."""
        if not self._has_ended:
            self._has_ended = True
            self._exporter.shutdown()
            self._logger.setLevel(logging.CRITICAL)
            self._logger.removeFilter(self._trouble)


class _Trouble(logging.Filter):
    """Of what the exporter says of each try, one line is logged until a try succeeds."""

    def __init__(self, collector: str) -> None:
        super().__init__()
        self._collector = collector
        self.is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """None of its own lines."""
        if not self.is_told:
            self.is_told = True
            text = "the collector at %s takes no traces, which are dropped after some tries: %s"
            log.warning(text, self._collector, record.getMessage())
        return False
