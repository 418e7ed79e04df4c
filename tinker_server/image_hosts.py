"""Images from hosts that the operator allows: fetched from addresses that were checked, and counted as they come."""

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from typing import TypeAlias

import httpx

from tinker_server.backends.processes.fair_threads import FairThreads
from tinker_server.errors import BadRequest

FETCH_S = 10.0
"""Time limit for an image."""
_KINDS = {"image/png", "image/jpeg"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOOKUPS = FairThreads(8, "names of hosts", of_owner=4)
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


async def fetch(url: str, hosts: Sequence[str], max_bytes: int, owner: str) -> bytes | None:
    """Fetch an image of at most so many bytes, without following redirects; None if its host is not listed. Raises
    BadRequest.

    A name is looked up once. The connection goes to an address that was checked, while certificate and header Host stay
    those of the name.
    """
    try:
        target = httpx.URL(url)
        if not any(_is_listed(name, target, hosts) for name in (target.host, target.raw_host.decode("ascii"))):
            return None
        addresses = await _LOOKUPS.run(owner, _look_up, target)
    except (httpx.InvalidURL, OSError, UnicodeError) as error:
        raise BadRequest(f"{_quote(url)} cannot be fetched ({type(error).__name__})") from None
    if not (
        allowed := [address for address in addresses if is_global(address) or _is_listed(str(address), target, hosts)]
    ):
        raise BadRequest(
            f"{_quote(url)} is not fetched: its host has the address {addresses[0]}, which is not public; the operator"
            " may list it in the setting image_hosts, as an address and with the port if the URL has one"
        )
    try:
        async with asyncio.timeout(FETCH_S):
            return await _fetch_from(allowed, target, max_bytes)
    except TimeoutError:
        raise BadRequest(f"the image {_quote(url)} was not read within {FETCH_S:.0f} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadRequest(f"{_quote(url)} cannot be fetched ({type(error).__name__})") from None


def is_global(address: Address) -> bool:
    """Return whether everybody reaches the same machine at this address. Addresses of IPv6 that stand for one of IPv4
    are as global as that one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(address.packed[-4:])
        if inner is not None:
            return is_global(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_link_local)


def _look_up(url: httpx.URL) -> list[Address]:
    """Return the addresses of a URL's host, each once."""
    port = url.port or _DEFAULT_PORTS[url.scheme]
    found = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(place[4][0])) for place in found))


def _is_listed(host: str, url: httpx.URL, hosts: Sequence[str]) -> bool:
    """Return whether the operator has listed a name or an address, with the URL's port if it has one."""
    name = f"[{host}]" if ":" in host else host
    with_port = f"{name}:{url.port or _DEFAULT_PORTS[url.scheme]}"
    return with_port in hosts or (url.port is None and name in hosts)


async def _fetch_from(addresses: Sequence[Address], url: httpx.URL, max_bytes: int) -> bytes:
    """Fetch from the first address that takes connections."""
    for address in addresses[:-1]:
        try:
            return await _read_body(address, url, max_bytes)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    return await _read_body(addresses[-1], url, max_bytes)


async def _read_body(address: Address, url: httpx.URL, max_bytes: int) -> bytes:
    """Return the body as it is on the way: an encoded one could become much larger than what was counted."""
    name = url.raw_host.decode("ascii")
    headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity", "Accept": ", ".join(sorted(_KINDS))}
    data = bytearray()
    async with (
        httpx.AsyncClient(verify=_tls(), follow_redirects=False, trust_env=False, timeout=FETCH_S) as client,
        client.stream(
            "GET",
            url.copy_with(host=str(address)),
            headers=headers,
            extensions={"sni_hostname": name},
        ) as answer,
    ):
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if answer.status_code != 200 or kind not in _KINDS:
            raise BadRequest(f"{_quote(str(url))} answers {answer.status_code} with {kind or 'nothing'}")
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise BadRequest(
                f"{_quote(str(url))} answers with Content-Encoding {encoding[:100]!r}; an image has to come as it is"
                " (identity), which was asked for"
            )
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > max_bytes:
                raise BadRequest(f"{_quote(str(url))} has more than {max_bytes} bytes")
    return bytes(data)


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the certificates that are trusted; reading them takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


def _quote(url: str) -> str:
    return repr(url[:100])
