"""Format of the log: one line per record, with clients' text escaped and API keys removed."""

import logging
import re
from types import TracebackType

MAX_CHARS = 4000
"""Length of a message, and of a line of a traceback."""
MAX_LINES = 200
"""Number of lines of a traceback, the last ones."""
_KEY = re.compile(r"tml-[\w.-]+|eyJ[\w.-]+")


def configure() -> None:
    """Log to standard error; from libraries only warnings and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("uvicorn", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


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


def harmless(text: str) -> str:
    """Return the text's beginning, with its API keys and control characters replaced."""
    text = _KEY.sub("[key]", text)
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
