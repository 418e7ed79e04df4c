"""Format of the log: a line per record, with clients' text escaped and API keys removed."""

import json
import logging
import re
from datetime import UTC, datetime
from types import TracebackType

MAX_CHARS = 4000
"""Length of a message, and of a line of a traceback."""
MAX_LINES = 200
"""Number of last lines of a traceback."""
_KEY = re.compile(r"tml-[\w.-]+|eyJ[\w.-]+")


_OURS = ("tinker_server", "__main__")
"""Loggers whose level is the setting."""


def configure(level: str = "info", log_format: str = "text") -> None:
    """Log to standard error; from libraries only warnings and errors. A later call changes level and format."""
    formatter = JsonLine() if log_format == "json" else OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])  # the first call's handler stays
    for installed in logging.getLogger().handlers:
        if isinstance(installed.formatter, OneLine):
            installed.setFormatter(formatter)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())


class OneLine(logging.Formatter):
    """Formatter that escapes unprintable characters, so that a client's text cannot forge a log line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = harmless(record.message)
        return super().formatMessage(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        lines = super().formatException(ei).splitlines()[-MAX_LINES:]
        return "\n".join(f"    {harmless(line)}" for line in lines)


class JsonLine(OneLine):
    """Formatter that makes a JSON object of a record: time in UTC, level, logger, message and, if any, error."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        line["message"] = harmless(record.getMessage())
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def harmless(text: str) -> str:
    """Return the text's beginning, with its API keys and control characters replaced."""
    text = _KEY.sub("[key]", text)
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
