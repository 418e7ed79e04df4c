"""What a machine's processes write is in a bounded file there, and arrives at the server with the machine's name."""

import asyncio
import logging
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.connections import serving
from tests.factories import present
from tests.waiting import until
from tinker_server.backends.cluster import lines
from tinker_server.backends.cluster.handshake import accept
from tinker_server.backends.cluster.lines import BACKLOG_BYTES, LINE_BYTES, LOG, Backlog, Lines, show

TOKEN = secrets.token_hex(32)


@asynccontextmanager
async def showing() -> AsyncIterator[str]:
    """The address of a server that logs lines, each connection's to its end."""
    num_open = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        num_open += 1
        await show(present(await accept(reader, writer, TOKEN)))
        writer.close()
        num_open -= 1

    async with serving(serve) as address:
        yield address
        await until(lambda: num_open == 0)


async def test_lines_arrive_with_the_machines_name_and_stay_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_RETRY_S", 0.05)

    with caplog.at_level(logging.WARNING):
        async with showing() as address:
            written = Lines(tmp_path, "a", address, TOKEN)
            forwarding = asyncio.create_task(written.forward())
            print("out of memory\n" + "x" * 30_000, file=written.file)
            await until(lambda: "".join(caplog.messages).count("x") == 30_000)
            written.file.close()
            await forwarding
    assert caplog.messages[0] == "a: out of memory"
    assert max(map(len, caplog.messages)) < 2 * LINE_BYTES + 10
    assert "".join(one.removeprefix("a: ") for one in caplog.messages[1:]) == "x" * 30_000
    assert (tmp_path / LOG).read_text().replace("\n", "") == "out of memory" + "x" * 30_000


async def test_lines_arrive_where_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What logging says of it would come back as lines, and fill the pipe that is read here."""
    (tmp_path / LOG).symlink_to("/dev/full")

    with caplog.at_level(logging.WARNING):
        async with showing() as address:
            written = Lines(tmp_path, "a", address, TOKEN)
            monkeypatch.setattr(sys, "stderr", written.file)
            forwarding = asyncio.create_task(written.forward())
            print("out of memory", file=written.file)
            await until(lambda: "a: out of memory" in caplog.messages)
            monkeypatch.undo()
            written.file.close()
            await forwarding
    assert caplog.messages == ["a: out of memory"]


async def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "FILE_BYTES", 10_000)
    written = Lines(tmp_path, "a", "127.0.0.1:1", TOKEN)
    forwarding = asyncio.create_task(written.forward())
    for number in range(3000):
        await asyncio.to_thread(print, f"line {number}", file=written.file)
    await until(lambda: "line 2999" in (tmp_path / LOG).read_text())
    assert size(tmp_path) <= 20_000
    written.file.close()
    await forwarding


async def test_the_oldest_lines_are_left_out_and_counted() -> None:
    backlog, line = Backlog(), b"x" * 1000
    for _ in range(BACKLOG_BYTES // 1000 + 5):
        backlog.put(line)
    backlog.put(b"the last words")
    found = [await backlog.get()]
    while found[-1] != "the last words":
        found.append(await backlog.get())
    assert found[0] in ("(5000 bytes are left out)", "(6000 bytes are left out)")
    assert sum(map(len, found[1:])) <= BACKLOG_BYTES


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
