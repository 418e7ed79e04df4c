"""A model's files arrive once, whole or as far as they came, and only where they have room."""

import asyncio
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster.connections import serving
from tests.factories import present
from tinker_server.backends.cluster import fetching
from tinker_server.backends.cluster.fetching import fetch_files, give
from tinker_server.backends.cluster.handshake import accept
from tinker_server.backends.formats.model_files import fingerprint
from tinker_server.backends.protocol import BackendFailed

TOKEN = secrets.token_hex(32)


class Counting:
    """A stream that counts what passes, spoils its `spoiled`-th byte, and ends after `limit` bytes."""

    def __init__(self, writer: asyncio.StreamWriter, limit: int | None, spoiled: int | None) -> None:
        self._writer, self._limit, self._spoiled, self.sent = writer, limit, spoiled, 0

    def write(self, data: bytes) -> None:
        if self._spoiled is not None and self.sent <= self._spoiled < self.sent + len(data):
            place = self._spoiled - self.sent
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        if self._limit is not None and self.sent + len(data) > self._limit:
            raise ConnectionResetError
        self.sent += len(data)
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def giving(model: Path, *limits: int, spoiled: int | None = None) -> AsyncIterator[tuple[str, list[Counting]]]:
    """A server of one model, whose first connections end after so many bytes."""
    streams: list[Counting] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = present(await accept(reader, writer, TOKEN))
        is_first = not streams
        limit = limits[len(streams)] if len(streams) < len(limits) else None
        streams.append(stream := Counting(writer, limit, spoiled if is_first else None))
        object.__setattr__(connection, "writer", stream)
        try:
            await give(connection, model)
        except ConnectionResetError:
            pass
        finally:
            writer.close()

    async with serving(serve) as address:
        yield address, streams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large file of random bytes, a small one, one in a folder, and what no model is served from."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text("{}")
    numbers, length = secrets.token_bytes(5 << 20), 5 << 20
    header = f'{{"a": {{"dtype": "U8", "shape": [{length}], "data_offsets": [0, {length}]}}}}'.encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tools.jinja").write_text("")
    (directory / "pytorch_model.bin").write_bytes(bytes(1000))
    return directory


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*")]


def content(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".bin")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


async def test_files_arrive_once(model: Path, tmp_path: Path) -> None:
    async with giving(model) as (address, streams):
        directory = await fetch_files(address, TOKEN, "a", tmp_path)
        assert content(directory) == content(model) and directory.name == fingerprint(model)
        assert await fetch_files(address, TOKEN, "another name", tmp_path) == directory
    assert streams[0].sent > 5 << 20 and streams[1].sent < 1 << 16
    assert len(names(tmp_path)) == len(names(model))  # without the weights of another kind, and with the directory


async def test_what_has_arrived_is_not_sent_again(model: Path, tmp_path: Path) -> None:
    async with giving(model, 2 << 20, 2 << 20) as (address, streams):
        directory = await fetch_files(address, TOKEN, "a", tmp_path)
    assert content(directory) == content(model)
    assert len(streams) == 3 and sum(one.sent for one in streams) < (5 << 20) + (1 << 16) + 2 * fetching._PIECE_BYTES


async def test_a_file_whose_last_byte_has_arrived_is_only_checked(model: Path, tmp_path: Path) -> None:
    arrived = tmp_path / f"{fingerprint(model)}.part/model.safetensors.part"
    arrived.parent.mkdir()
    shutil.copy(model / "model.safetensors", arrived)
    async with giving(model) as (address, streams):
        directory = await fetch_files(address, TOKEN, "a", tmp_path)
    assert content(directory) == content(model) and streams[0].sent < 1 << 16


async def test_a_connection_that_brings_nothing_is_not_tried_forever(model: Path, tmp_path: Path) -> None:
    async with giving(model, *[1000] * 10) as (address, streams):
        with pytest.raises(BackendFailed, match="the server has closed the connection at byte"):
            await fetch_files(address, TOKEN, "a", tmp_path)
    assert len(streams) < 5


async def test_a_file_that_is_spoilt_on_its_way_is_sent_again(model: Path, tmp_path: Path) -> None:
    async with giving(model, spoiled=3 << 20) as (address, streams):
        directory = await fetch_files(address, TOKEN, "a", tmp_path)
    assert content(directory) == content(model) and len(streams) == 2


async def test_a_model_without_room_is_refused_with_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(fetching, "_SPARE_BYTES", free - (2 << 20))
    async with giving(model) as (address, _):
        with pytest.raises(BackendFailed) as caught:
            await fetch_files(address, TOKEN, "a/model", tmp_path)
    assert re.search(r"0\.00 GiB of model a/model are missing, and .* has [\d.]+ GiB free", str(caught.value))
    assert not [name for name in names(tmp_path) if "safetensors" in name]


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "a/../../b"])
def test_a_file_stays_within_its_model(name: str) -> None:
    with pytest.raises(BackendFailed, match="outside its model"):
        fetching._require_inside(name)
