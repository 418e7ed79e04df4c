"""Images that a conversation names by address: each address is replaced by a data URI of the image."""

import base64
from collections.abc import Iterator
from typing import Any

from tinker_server.backends.protocol import ChatEndpoint
from tinker_server.errors import BadField, BadRequest
from tinker_server.image_addresses import ImageAddresses
from tinker_server.offload import off_loop

DATA = "data:"
"""Begins a data URI, in capitals or not (RFC 3986, section 3.1)."""
_SLICE = 1 << 20
"""Characters of base64, four of which are three bytes."""
_PNG = b"\x89PNG"


async def with_data(endpoint: ChatEndpoint, body: dict[str, object], addresses: ImageAddresses, owner: str) -> int:
    """Replace addresses of images by data URIs, and return the bytes of the files. Raises BadField for an address that
    is not allowed or not readable, and for too many bytes in all."""
    if endpoint == "completions":
        return 0
    named = [
        (field, holder, key)
        for field, holder, key in sources(body.get("messages"), "messages")
        if key != "data" and isinstance(holder[key], str) and not _is_data(holder[key])
    ]
    try:
        data = await addresses.read_all([(field, holder[key]) for field, holder, key in named], "messages", owner)
    except BadRequest as error:
        raise BadField(str(error), "messages") from None
    num_bytes = sum(map(len, data.values()))
    uris = await off_loop(owner, num_bytes, _uris, data)
    for _, holder, key in named:
        holder[key] = uris[holder[key]]
    return num_bytes


def _uris(files: dict[str, bytes]) -> dict[str, str]:
    return {address: _uri(data) for address, data in files.items()}


def _uri(data: bytes) -> str:
    kind = "image/png" if data.startswith(_PNG) else "image/jpeg"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def files(body: dict[str, object]) -> list[bytes]:
    """Return the image files that a conversation has as base64. Invalid base64 gives an empty file, which the sampler
    refuses with the reason."""
    found: list[bytes] = []
    decoded: dict[str, bytes] = {}
    """A file for an image that the conversation has several times."""
    for _, holder, key in sources(body.get("messages"), "messages"):
        text = holder[key]
        if isinstance(text, str) and (key == "data" or _is_data(text)):
            if text not in decoded:
                decoded[text] = _decode(text if key == "data" else text.partition(",")[2])
            found.append(decoded[text])
    return found


def _is_data(address: str) -> bool:
    return address[: len(DATA)].lower() == DATA


def _decode(text: str) -> bytes:
    """Decode in slices, since a long call would hold up every other thread."""
    try:
        return b"".join(base64.b64decode(text[at : at + _SLICE]) for at in range(0, len(text), _SLICE))
    except ValueError:
        return b""


def sources(value: object, field: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each field that is an image's address or data, in either vendor's form, with the object that
    holds it and its key there. `field` names the value."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from sources(part, f"{field}.{index}")
    elif isinstance(value, dict):
        image = value.get("image_url")
        if isinstance(image, str):
            yield f"{field}.image_url", value, "image_url"
        elif isinstance(image, dict) and "url" in image:
            yield f"{field}.image_url.url", image, "url"
        source = value.get("source")
        if isinstance(source, dict) and source.get("type") == "url":
            yield f"{field}.source.url", source, "url"
        if isinstance(source, dict) and source.get("type") == "base64" and "data" in source:
            yield f"{field}.source.data", source, "data"
        yield from sources(value.get("content"), f"{field}.content")
