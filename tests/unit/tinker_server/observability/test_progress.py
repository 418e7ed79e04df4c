"""Progress while models load: bars on a terminal, lines of the log elsewhere, with true bytes."""

import asyncio
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeBackend
from tests.terminal import terminal
from tinker_server.app import create_app
from tinker_server.backends.protocol import Loading
from tinker_server.errors import StartFailed
from tinker_server.observability.progress import Bars, Lines, Processes, amount
from tinker_server.settings import Settings


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


@pytest.mark.heavy
async def test_the_server_reports_its_own_steps_until_it_is_ready(tmp_path: Path) -> None:
    reported: list[tuple[str, Loading | None]] = []
    app = create_app(Settings(data_dir=tmp_path), FakeBackend(), on_loading=lambda *what: reported.append(what))
    async with app.router.lifespan_context(app):
        steps = [Loading("opens the database"), None, Loading("resumes unfinished operations"), None]
        assert reported == [("server", step) for step in steps]


@pytest.mark.heavy
async def test_a_step_that_fails_is_reported_no_longer(tmp_path: Path) -> None:
    starting = Processes()
    (tmp_path / "tinker-server.db").write_bytes(b"no database" * 100)
    app = create_app(Settings(data_dir=tmp_path), FakeBackend(), on_loading=starting.note)
    with pytest.raises(StartFailed, match="not a database"):
        async with app.router.lifespan_context(app):
            pass
    assert not starting


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
