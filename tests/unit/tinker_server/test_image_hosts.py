"""Images from hosts: which addresses are public, and what a host may answer."""

import asyncio
import gzip
import http.server
import ipaddress
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.factories import photo
from tinker_server.errors import BadRequest
from tinker_server.image_addresses import MAX_ADDRESSES, ImageAddresses
from tinker_server.image_hosts import is_global

IMAGE = photo(16, 16)
LARGE = 512 << 20
BODIES = {
    "/plain.png": ("", IMAGE),
    "/identity.png": ("identity", IMAGE),
    "/capitals.png": ("", IMAGE),
    "/gzip.png": ("gzip", gzip.compress(IMAGE)),
    "/bomb.png": ("zstd", zstandard.compress(bytes(LARGE))),
    "/two.png": ("gzip, zstd", zstandard.compress(gzip.compress(IMAGE))),
}


class Host(http.server.BaseHTTPRequestHandler):
    """Encodes without being asked to."""

    seen: list[dict[str, str]] = []

    def do_GET(self) -> None:
        self.seen.append(dict(self.headers))
        encoding, body = BODIES[self.path]
        self.send_response(200)
        self.send_header("content-type", "IMAGE/PNG" if self.path == "/capitals.png" else "image/png")
        if encoding:
            self.send_header("content-encoding", encoding)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        Host.seen.clear()
        yield host.server_port
        host.shutdown()


def allowing(*hosts: str, directories: tuple[Path, ...] = (), max_bytes: int = 1 << 30) -> ImageAddresses:
    return ImageAddresses(hosts, directories, max_bytes)


@pytest.mark.parametrize("name", ["/plain.png", "/identity.png", "/capitals.png"])
async def test_an_image_is_asked_for_and_taken_as_it_is(port: int, name: str) -> None:
    assert await allowing(f"127.0.0.1:{port}").read(f"http://127.0.0.1:{port}{name}", "alice") == IMAGE
    [headers] = Host.seen
    assert headers["Accept-Encoding"] == "identity" and headers["Host"] == f"127.0.0.1:{port}"


@pytest.mark.parametrize("name", ["/gzip.png", "/bomb.png", "/two.png"])
async def test_an_encoded_image_is_refused_before_it_grows(port: int, name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match=f"Content-Encoding '{BODIES[name][0]}'.*as it is"):
            await allowing(f"127.0.0.1:{port}").read(f"http://127.0.0.1:{port}{name}", "alice")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


async def test_a_name_of_this_machine_is_refused_unless_its_address_is_listed_too(port: int) -> None:
    url, name, address = f"http://localhost:{port}/plain.png", f"localhost:{port}", f"127.0.0.1:{port}"
    with pytest.raises(BadRequest, match=r"has the address (127\.0\.0\.1|::1), which is not public.*image_hosts"):
        await allowing(name).read(url, "alice")
    for hosts in ((name, "127.0.0.1"), (name, "127.0.0.1:1"), (name, f"[::1]:{port}")):
        with pytest.raises(BadRequest):
            await allowing(*hosts).read(url, "alice")
    assert not Host.seen
    assert await allowing(name, address).read(url, "alice") == IMAGE
    assert Host.seen[0]["Host"] == name


async def test_a_name_is_looked_up_once_and_the_address_that_was_checked_is_connected_to(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next answer may be an address of the private network."""
    asked: list[object] = []

    def look_up(host: Any, *more: Any, **named: Any) -> Any:
        asked.append(host)
        return find("127.0.0.1" if host == "changing.example" else host, *more, **named)

    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    hosts = [f"{host}:{port}" for host in ("changing.example", "127.0.0.1")]
    assert await allowing(*hosts).read(f"http://changing.example:{port}/plain.png", "alice") == IMAGE
    assert [host for host in asked if host in ("changing.example", b"changing.example")] == ["changing.example"]
    assert Host.seen[0]["Host"] == hosts[0]


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "0", "[::ffff:127.0.0.1]", "[::]"])
async def test_other_spellings_of_this_machine_are_refused_whoever_lists_them(port: int, host: str) -> None:
    with pytest.raises(BadRequest):
        await allowing(f"{host}:{port}").read(f"http://{host}:{port}/plain.png", "alice")
    assert not Host.seen


def certificate(folder: Path) -> tuple[Path, Path]:
    key, signed = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", key, "-out", signed], check=True, capture_output=True)
    return key, signed


async def test_tls_names_the_host_and_not_its_address(tmp_path: Path) -> None:
    """The certificate is refused, since nobody has signed it; the name that the server was asked for is known then."""
    files = certificate(tmp_path)
    context, named = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[str | None]()
    context.load_cert_chain(files[1], files[0])
    context.sni_callback = lambda _, name, __: named.append(name)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BadRequest, match="ConnectError"):
            url = f"https://localhost:{port}/plain.png"
            await allowing(f"localhost:{port}", f"127.0.0.1:{port}").read(url, "alice")
    assert named == ["localhost"]


NOT_PUBLIC = """
    127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 0.1.2.3 224.0.0.1 240.0.0.1
    255.255.255.255 192.0.2.1 198.18.0.1 :: ::1 fe80::1 fec0::1 fc00::1 fd00:ec2::254 ff02::1 ff0e::1 2001:db8::1
    ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 2002:7f00:1::1
    2002:a00:1::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_global(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_global(ipaddress.ip_address(address))


async def test_hosts_are_listed_with_the_port_that_a_url_has(port: int) -> None:
    for listed in ("127.0.0.1", f"127.0.0.2:{port}", f"evil@127.0.0.1:{port}"):
        with pytest.raises(BadRequest, match="image_hosts"):
            await allowing(listed).read(f"http://127.0.0.1:{port}/plain.png", "alice")
    with pytest.raises(BadRequest, match="image_hosts"):
        await allowing(f"127.0.0.1:{port}").read(f"http://127.0.0.1:{port}@127.0.0.2:{port}/plain.png", "alice")
    assert not Host.seen


async def test_addresses_are_counted_before_the_first_is_read(tmp_path: Path) -> None:
    """None of them exists, so the first that was read would be named."""
    addresses = [("a", f"{tmp_path}/{number}.png") for number in range(MAX_ADDRESSES + 1)]
    with pytest.raises(BadRequest, match="messages name 4097 addresses of images; 4096 are allowed"):
        await allowing(directories=(tmp_path,)).read_all(addresses, "messages", "alice")


@pytest.mark.flaky(reruns=1)  # holds a limit of processor time
@pytest.mark.heavy
async def test_the_time_for_many_addresses_grows_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(IMAGE)
    for number in range(4000):
        (tmp_path / f"{number}.png").symlink_to(tmp_path / "one.png")
    allowed, took_s = allowing(directories=(tmp_path,)), dict[int, float]()
    for count in (250, 4000):
        began = time.process_time()
        named = [("a", f"{tmp_path}/{number}.png") for number in range(count)]
        files = await allowed.read_all(named, "messages", "alice")
        took_s[count] = time.process_time() - began
        assert len(files) == count
    assert took_s[4000] < 22 * took_s[250], took_s  # 16 times as many
