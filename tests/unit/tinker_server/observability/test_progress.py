"""Progress while models load: bars on a terminal, lines of the log elsewhere, with true bytes."""

import asyncio
import logging
import os
import re
import subprocess
import sys

import pytest

from backends.protocol import Loading
from tests.terminal import terminal
from tinker_server.observability.progress import Bars, Lines, amount


def test_amounts_have_the_unit_of_the_whole() -> None:
    assert amount(Loading("reads", 3 << 30, 9 << 30)) == "3.0 of 9.0 GiB"
    assert amount(Loading("reads", 1 << 20, 9 << 30)) == "0.0 of 9.0 GiB"
    assert amount(Loading("reads", 7, 900)) == "7 of 900 bytes"
    assert amount(Loading("compiles")) == ""


async def test_the_log_has_a_line_for_each_process_until_it_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinker_server.observability.progress")
    lines = Lines(every_s=0.01)
    lines.on_loading("trainer qwen rank 0", Loading("reads weights", 1 << 30, 9 << 30))
    lines.on_loading("sampler qwen", Loading("starts"))
    lines.on_loading("sampler ready", Loading("starts"))
    lines.on_loading("sampler ready", None)
    async with asyncio.timeout(20):
        while len(caplog.messages) < 2:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.01)
    lines.on_loading("trainer qwen rank 0", None)
    lines.on_loading("sampler qwen", None)
    first, second = caplog.messages[:2]
    assert re.fullmatch(r"loading: trainer qwen rank 0 reads weights, 1\.0 of 9\.0 GiB, \d+ s", first)
    assert re.fullmatch(r"loading: sampler qwen starts, \d+ s", second)
    num_lines = len(caplog.messages)
    await asyncio.sleep(0.05)
    assert len(caplog.messages) == num_lines


def test_on_a_terminal_each_process_has_a_line_and_no_other_line_is_lost() -> None:
    """A child process and the log write while two processes load."""
    with terminal() as seen, os.fdopen(os.dup(seen.end), "w") as end:
        handler = logging.StreamHandler(end)
        log = logging.getLogger()
        log.addHandler(handler)
        try:
            with Bars(end) as bars:
                bars.on_loading("trainer qwen rank 0", Loading("reads weights", 1 << 30, 9 << 30))
                bars.on_loading("sampler qwen", Loading("starts"))
                seen.wait(lambda lines: len(lines) == 2)
                for number in range(3):
                    subprocess.run(["sh", "-c", f"echo child {number} >&2"], stderr=sys.stderr, check=True, timeout=60)
                    log.warning("server %d", number)
                bars.on_loading("trainer qwen rank 0", Loading("reads weights", 9 << 30, 9 << 30))
                lines = seen.wait(lambda lines: len(lines) == 8 and "9.0 of 9.0" in lines[6])
                said = [f"{who} {number}" for number in range(3) for who in ("child", "server")]
                assert sorted(lines[:6]) == sorted(said)
                assert lines[6].startswith("trainer qwen rank 0 ") and lines[6].endswith("reads weights 9.0 of 9.0 GiB")
                assert re.fullmatch(r"sampler qwen .* \d+ s starts", lines[7])
                bars.on_loading("sampler qwen", None)
                bars.on_loading("trainer qwen rank 0", None)
                log.warning("ready")
                bars.on_loading("sampler qwen", Loading("starts"))  # it died
                seen.wait(lambda lines: len(lines) == 8 and lines[6] == "ready")
            log.warning("ended")
        finally:
            log.removeHandler(handler)
        end.close()
        assert seen.close()[6:] == ["ready", "ended"]
