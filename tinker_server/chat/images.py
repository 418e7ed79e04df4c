"""Images that a conversation names by their address: fetched from hosts that the operator named, else refused."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from backends.protocol import ChatEndpoint
from tinker_server.errors import BadField

FETCH_S = 10.0
"""For the whole of one image."""
FETCH_BYTES = 20 << 20
_KINDS = {"image/png", "image/jpeg"}


async def with_data(endpoint: ChatEndpoint, body: dict[str, Any], hosts: Sequence[str]) -> None:
    """Put what addresses lead to in their places. Raises BadField for those that may not be fetched, or cannot."""
    found = list(_sources(body.get("messages")))
    if endpoint != "completions" and found:
        async with httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=FETCH_S) as client:
            for holder, key in found:
                if isinstance(holder[key], str) and not holder[key].startswith("data:"):
                    holder[key] = await _fetched(client, holder[key], hosts)


def _sources(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place of an image's address, in either vendor's form, with what holds it."""
    if isinstance(value, list):
        for part in value:
            yield from _sources(part)
    elif isinstance(value, dict):
        image = value.get("image_url")
        if isinstance(image, str):
            yield value, "image_url"
        elif isinstance(image, dict) and "url" in image:
            yield image, "url"
        source = value.get("source")
        if isinstance(source, dict) and source.get("type") == "url":
            yield source, "url"
        yield from _sources(value.get("content"))


async def _fetched(client: httpx.AsyncClient, address: str, hosts: Sequence[str]) -> str:
    """A data URI. No redirect is followed: it would lead to a host that nobody named."""
    try:
        parts = urlsplit(address)
        host, scheme = parts.netloc.rpartition("@")[2].lower(), parts.scheme
    except ValueError:
        host, scheme = "", ""
    if scheme not in ("http", "https") or host not in hosts:
        raise BadField(
            f"the image address {address[:100]!r} is not fetched: send the image as a data URI, or have the operator"
            " name its host in the setting image_hosts",
            "messages",
        )
    try:
        async with client.stream("GET", address) as answer:
            kind = answer.headers.get("content-type", "").partition(";")[0].strip()
            if answer.status_code != 200 or kind not in _KINDS:
                raise BadField(f"{address[:100]!r} answers {answer.status_code} with {kind or 'nothing'}", "messages")
            data = bytearray()
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > FETCH_BYTES:
                    raise BadField(f"{address[:100]!r} has more than {FETCH_BYTES} bytes", "messages")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadField(f"{address[:100]!r} cannot be fetched ({type(error).__name__})", "messages") from None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
