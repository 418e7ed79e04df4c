"""What one operation's trace looks like in OpenTelemetry: its stages, and what processes did in them."""

import re
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context

from backends.processes.spans import ANSWERED, ProcessSpan

MAX_HEARD = 256
"""Spans of trainer and sampler in one trace; the others are counted."""
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class Trace:
    """One operation's: a root, and beneath it one stage after the other."""

    def __init__(self, root: Span, tracers: Mapping[str, Tracer]) -> None:
        self._root = root
        self._context = set_span_in_context(root, Context())
        self._tracers = tracers
        self._stage: tuple[str, Span] | None = None
        self._has_result = False
        self._num_heard = 0

    def begin(self, name: str, since_ns: int | None = None) -> None:
        """The next stage, which ends the one before."""
        self._end_stage()
        self._stage = name, self._tracers["server"].start_span(name, self._context, start_time=since_ns)

    def end(self, name: str) -> None:
        """A stage, unless it has ended by now."""
        if self._stage is not None and self._stage[0] == name:
            self._end_stage()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage[1].end()
        self._stage = None

    def note(self, attributes: Mapping[str, str | int]) -> None:
        """Of the operation."""
        self._root.set_attributes({f"tinker.{name}": value for name, value in attributes.items()})

    def heard(self, of_process: ProcessSpan) -> None:
        """A process has worked for the stage that runs."""
        if self._stage is None or self._stage[0] != "run":
            return
        self._num_heard += 1
        if self._num_heard > MAX_HEARD:
            self.note({"spans_left_out": self._num_heard - MAX_HEARD})
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
        """There is a result; the first one stays."""
        if self._has_result:
            return
        self._has_result = True
        if failure_category is not None:
            _fail(self._root, failure_category)
        self.begin("store")

    def stored(self) -> None:
        """The end."""
        self._end_stage()
        self._root.end()


def _fail(span: Span, category: str) -> None:
    """Without the error's text, which may hold a client's."""
    span.set_attribute("error.type", category)
    span.set_status(StatusCode.ERROR)
