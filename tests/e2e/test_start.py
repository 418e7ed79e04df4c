"""The output of a real server at its start.

pytest tests/e2e/test_start.py
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.factories import present
from tests.servers import MODEL, Server
from tests.terminal import terminal

SMALL = {"TINKER_SERVER_BACKEND__KV_CACHE_BYTES": str(64 << 20), "TINKER_SERVER_BACKEND__MAX_CONTEXT_LENGTH": "512"}


def test_the_log_of_a_start_has_whole_lines_and_no_bars(server: Server) -> None:
    text = server.log.read_text()
    assert re.search(rf"{MODEL}: the trainer is ready after \d+ s", text)
    of_engine = (
        "starts",
        "starts vLLM",
        "begins on its device",
        "reads weights",
        "measures memory",
        "makes the KV cache",
    )
    phases = ", ".join(rf"{doing} \d+ s" for doing in of_engine)
    assert re.search(rf"{MODEL}: the sampler is ready after \d+ s: {phases}, ", text)
    assert "\r" not in text and "\x1b" not in text and "it/s" not in text
    first_start = text[: text.index("Ready in ")]
    assert [line for line in first_start.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)] == []


@pytest.mark.slow
def test_on_a_terminal_two_models_load_with_bars_above_which_the_log_stays_whole(
    tiny_vl: Path, tiny_text: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tinker_server", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    command += ["--model", f"seeing={tiny_vl}", "--model", f"blind={tiny_text}"]
    names = [f"{model}: the {part}" for model in ("seeing", "blind") for part in ("trainer", "sampler")]
    with terminal() as seen:
        environment = {**os.environ, **SMALL, "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=seen.end, text=True, env=environment) as server:
            timer = threading.Timer(240, server.kill)
            timer.start()
            try:
                bars = seen.wait(lambda lines: all(num_lines(lines, name) for name in names), 120)
                url = present(server.stdout).readline()
                server.send_signal(signal.SIGINT)
                code = server.wait(60)
            finally:
                timer.cancel()
                server.kill()
        lines = seen.close()
    assert url.startswith("http://") and code == 0, lines
    assert [num_lines(bars, name) for name in names] == [1] * 4
    assert not [line for line in lines if "━" in line or "it/s" in line or num_lines([line], "seeing: the sampler")]
    for name in ("seeing", "blind"):
        for part in ("the trainer is ready", "the sampler is ready", "ready"):
            assert sum(f"{name}: {part} after" in line for line in lines) == 1


def num_lines(lines: list[str], process: str) -> int:
    """Bars of a process."""
    return sum(line.startswith(f"{process} ") for line in lines)
