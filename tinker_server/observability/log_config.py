"""How log lines look: one line each, whatever a client's text in it holds, and without its keys."""

import logging
import re
from types import TracebackType

MAX_CHARS = 4000
"""Of a message, and of a line of a traceback."""
MAX_LINES = 200
"""Of a traceback, the last."""
_KEY = re.compile(r"tml-[\w.-]+|eyJ[\w.-]+")


def configure() -> None:
    """Log to standard error; libraries only what they warn of."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for chatty in ("uvicorn", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class OneLine(logging.Formatter):
    """No text of a client's can look like a line of its own: what is no printable character is escaped."""

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
    """The text's beginning, with its API keys and control characters replaced."""
    text = _KEY.sub("[key]", text)
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
