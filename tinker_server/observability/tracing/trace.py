"""An operation's trace in OpenTelemetry: its stages, and the work of processes in them."""

import re
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context

from tinker_server.backends.processes.spans import ANSWERED, ProcessSpan

MAX_PROCESS_SPANS = 256
"""Spans of trainer and sampler in a trace; further spans are only counted."""
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class Trace:
    """The trace of an operation: a root span with a child per stage, in succession."""

    def __init__(self, root: Span, tracers: Mapping[str, Tracer]) -> None:
        self._root = root
        self._context = set_span_in_context(root, Context())
        self._tracers = tracers
        self._stage: tuple[str, Span] | None = None
        self._has_result = False
        self._num_process_spans = 0

    def begin(self, name: str, since_ns: int | None = None) -> None:
        """Begin the next stage, and end the stage before."""
        self._end_stage()
        self._stage = name, self._tracers["server"].start_span(name, self._context, start_time=since_ns)

    def end(self, name: str) -> None:
        """End a stage, unless it has ended already."""
        if self._stage is not None and self._stage[0] == name:
            self._end_stage()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage[1].end()
        self._stage = None

    def note(self, attributes: Mapping[str, str | int]) -> None:
        """Add attributes to the operation's root span."""
        self._root.set_attributes({f"tinker.{name}": value for name, value in attributes.items()})

    def add_process_span(self, of_process: ProcessSpan) -> None:
        """Add a process's work to the stage `run`, if it is the current stage."""
        if self._stage is None or self._stage[0] != "run":
            return
        self._num_process_spans += 1
        if self._num_process_spans > MAX_PROCESS_SPANS:
            self.note({"spans_left_out": self._num_process_spans - MAX_PROCESS_SPANS})
            return
        service = of_process.process.partition(" ")[0]
        span = self._tracers[service].start_span(
            f"{service}.{_WORD.sub('_', of_process.command).lower()}",
            set_span_in_context(self._stage[1], Context()),
            attributes={"tinker.process": of_process.process},
            start_time=of_process.began_ns,
        )
        if of_process.outcome != ANSWERED:
            _fail(span, of_process.outcome)
        span.end(of_process.ended_ns)

    def ended(self, failure_category: str | None) -> None:
        """Begin the stage `store` with the operation's outcome; only the first outcome counts."""
        if self._has_result:
            return
        self._has_result = True
        if failure_category is not None:
            _fail(self._root, failure_category)
        self.begin("store")

    def stored(self) -> None:
        """End the trace."""
        self._end_stage()
        self._root.end()


def _fail(span: Span, category: str) -> None:
    """Mark a span as failed, without the error's text, which may contain a client's."""
    span.set_attribute("error.type", category)
    span.set_status(StatusCode.ERROR)
