"""The log has one line for any request of a client, of bounded length and without keys."""

import io
import json
import logging
import subprocess
import sys

import pytest

from tinker_server.observability.log_config import MAX_CHARS, OneLine


def logged(text: str, error: Exception | None = None) -> str:
    """Return the log line of a message that quotes a client."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    record = logging.LogRecord(
        "room",
        logging.INFO,
        "",
        0,
        "client %s",
        (text,),
        None if error is None else (type(error), error, error.__traceback__),
    )
    handler.handle(record)
    return stream.getvalue()


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x85", "\u2028", "\x1b[2K", "\0", "\x7f"])
def test_no_text_begins_a_line_of_its_own(end: str) -> None:
    line = logged(f"a{end}ERROR tinker_server.auth.keys: forged")
    assert len(line.splitlines()) == 1 and line.startswith("INFO room: client a") and "forged" in line
    assert line[:-1].isprintable()


def test_no_error_begins_a_line_of_its_own() -> None:
    try:
        raise ValueError("a\nERROR tinker_server.auth.keys: forged\n" + "x" * 100_000)
    except ValueError as error:
        text = logged("b", error)
    first, *others = text.splitlines()
    assert first == "INFO room: client b" and "Traceback" in others[0]
    assert all(line.startswith("    ") for line in others) and len(text) < 2 * MAX_CHARS + 2000


def test_a_long_text_is_cut_and_says_how_long_it_was() -> None:
    line = logged("x" * 10_000_000)
    assert len(line) < MAX_CHARS + 100 and "10000007 characters" in line


def test_keys_are_replaced_wherever_they_stand() -> None:
    line = logged("tml-abc_DEF-123.x and eyJhbGciOi.J9.sig")
    assert "abc" not in line and "hbGci" not in line and line.count("[key]") == 2


def test_plain_words_of_any_language_stay_as_they_are() -> None:
    assert logged("Grüße, 你好 – ok") == "INFO room: client Grüße, 你好 – ok\n"


LOGS = """
import logging, sys
from tinker_server.observability.log_config import configure
configure()
configure(*sys.argv[1:])
log = logging.getLogger("tinker_server.room")
log.debug("a")
log.info("b with tml-secret\\nERROR forged")
log.error("c")
try:
    raise ValueError("d")
except ValueError:
    log.exception("e")
logging.getLogger("library").info("f")
logging.getLogger("library").warning("g")
"""


def lines_of(level: str, log_format: str) -> list[str]:
    said = subprocess.run([sys.executable, "-c", LOGS, level, log_format], capture_output=True, text=True, check=True)
    return said.stderr.splitlines()


def test_lines_are_json_where_that_is_set() -> None:
    found = [json.loads(line) for line in lines_of("info", "json")]
    assert [(one["level"], one["logger"]) for one in found] == [
        ("info", "tinker_server.room"),
        ("error", "tinker_server.room"),
        ("error", "tinker_server.room"),
        ("warning", "library"),
    ]
    assert found[0]["message"] == "b with [key]\\nERROR forged" and found[0]["time"].endswith("+00:00")
    assert "ValueError: d" in found[2]["error"] and "error" not in found[1]


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", "abceg"), ("info", "bceg"), ("warning", "ceg"), ("error", "ceg")]
)
def test_the_level_is_the_servers_and_libraries_say_only_what_is_wrong(level: str, shown: str) -> None:
    lines = [line for line in lines_of(level, "text") if line.startswith("20")]
    assert "".join(line.split(": ")[1][0] for line in lines) == shown
