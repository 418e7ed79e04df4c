"""Two machines recognise each other by the token, and refuse everybody else by name."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.cluster.connections import serving
from tests.factories import present
from tinker_server.backends.cluster.handshake import Connection, Unreachable, accept, connect
from tinker_server.backends.cluster.join import until_answered
from tinker_server.backends.cluster.token import make_token, read_token
from tinker_server.backends.cluster.versions import differences, versions
from tinker_server.backends.protocol import BackendFailed

TOKEN, OTHER = secrets.token_hex(32), secrets.token_hex(32)


@asynccontextmanager
async def accepting(token: str) -> AsyncIterator[tuple[str, list[Connection | None]]]:
    accepted: list[Connection | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(connection := await accept(reader, writer, token))
        if connection is not None:
            connection.send(welcome=True)
            connection.close()

    async with serving(serve) as address:
        yield address, accepted


async def test_a_request_arrives_and_is_answered() -> None:
    async with accepting(TOKEN) as (address, accepted):
        connection = await connect(address, TOKEN, ask="join", name="a")
        assert connection.said == {"welcome": True}
        assert present(accepted[0]).said == {"ask": "join", "name": "a"}
        assert await connection.receive() is None
        connection.close()


async def test_another_token_is_noticed_by_the_machine_that_joins() -> None:
    async with accepting(TOKEN) as (address, accepted):
        with pytest.raises(BackendFailed, match="has another token"):
            await connect(address, OTHER, ask="join")
        await asyncio.sleep(0.05)
    assert accepted == [None]


@pytest.mark.parametrize("nonce", ["1", "\ud800"])
@pytest.mark.parametrize("proof", ["", "0" * 64, "\u00fc", "\ud800"])
async def test_a_machine_without_the_token_is_refused(proof: str, nonce: str) -> None:
    async with accepting(TOKEN) as (address, accepted):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(json.dumps({"greeting": "tinker-server cluster 1", "nonce": nonce}).encode() + b"\n")
        assert json.loads(await reader.readline())["greeting"]
        writer.write(json.dumps({"proof": proof, "request": '{"ask": "join"}'}).encode() + b"\n")
        assert json.loads(await reader.readline()) == {"refused": "the token is wrong"}
        assert await reader.read() == b""
        writer.close()
    assert accepted == [None]


async def test_a_proof_is_of_one_request_alone() -> None:
    async with accepting(TOKEN) as (address, _):
        host, port = address.split(":")

        async def changing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Pass lines on, and change what is asked for."""
            theirs, ours = await asyncio.open_connection(host, int(port))
            for _ in range(2):
                ours.write((await reader.readline()).replace(b"join", b"kill"))
                writer.write(await theirs.readline())
            for one in (ours, writer):
                one.close()

        async with serving(changing) as between:
            with pytest.raises(BackendFailed, match="refuses: the token is wrong"):
                await connect(between, TOKEN, ask="join")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"[1]\n", b"\xff\n", b"[" * 9999 + b"\n"])
async def test_the_port_of_another_program_is_named_as_such(answer: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with serving(other) as address:
        with pytest.raises(BackendFailed, match=f"{address} is not the cluster port of a server"):
            await connect(address, TOKEN, ask="join")


async def test_a_port_at_which_nothing_listens_may_be_asked_later() -> None:
    async with serving(lambda *_: asyncio.sleep(0)) as address:
        pass
    with pytest.raises(Unreachable, match=f"no server answers at {address}"):
        await connect(address, TOKEN, ask="join")
    with pytest.raises(BackendFailed, match="write HOST:PORT"):
        await connect("somewhere", TOKEN, ask="join")


async def test_a_server_that_starts_later_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async with accepting(TOKEN) as (address, accepted):
        tried = 0

        async def ask() -> Connection:
            nonlocal tried
            tried += 1
            return await connect(address if tried > 2 else "127.0.0.1:1", TOKEN, ask="join")

        (await until_answered(ask)).close()
        assert tried == 3 and caplog.text.count("no server answers at 127.0.0.1:1") == 2
        with pytest.raises(Unreachable):
            await until_answered(lambda: connect("127.0.0.1:1", TOKEN, ask="join"), for_s=0)
        assert len(accepted) == 1


async def test_garbage_at_the_port_is_no_connection() -> None:
    async with accepting(TOKEN) as (address, accepted):
        host, port = address.split(":")
        for garbage in (b"\x00\xff\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * (2 << 20)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            writer.write_eof()
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    assert accepted == [None] * 4


def test_the_token_is_made_once_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "data/token"
    token = make_token(path)
    assert len(token) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert make_token(path) == read_token(path) == token
    path.chmod(0o640)
    with pytest.raises(BackendFailed, match=f"others may read the token file {path}: chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(BackendFailed, match="holds no token"):
        read_token(path)
    with pytest.raises(BackendFailed, match="cannot be read: No such file"):
        read_token(tmp_path / "missing")


def test_a_version_that_differs_is_named() -> None:
    ours = versions()
    assert set(ours) == {"Python", "tinker-server", "Ray", "torch", "vLLM"} and "none" not in ours.values()
    assert differences(ours, ours) == ""
    assert differences({**ours, "Ray": "2.1"}, ours) == f"Ray 2.1 and the server has {ours['Ray']}"
    without = {name: one for name, one in ours.items() if name != "vLLM"}
    assert differences(without, ours) == f"vLLM none and the server has {ours['vLLM']}"
