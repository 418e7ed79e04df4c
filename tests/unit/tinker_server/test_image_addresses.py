"""Images of requests that are read by their addresses."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tinker_server.image_addresses import ImageAddresses


async def test_an_owners_requests_read_their_images_in_turn_and_others_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of each are counted once they are read: many at once would be more than an owner may hold."""
    reading, most, may_read = Counter[str](), Counter[str](), asyncio.Event()

    async def read(_: ImageAddresses, address: str, owner: str) -> bytes:
        reading[owner] += 1
        most[owner] = max(most[owner], reading[owner])
        await may_read.wait()
        reading[owner] -= 1
        return address.encode()

    monkeypatch.setattr(ImageAddresses, "read", read)
    addresses = ImageAddresses((), (tmp_path,), 100)
    asked = [
        asyncio.create_task(addresses.read_all([("a", f"/{owner}{number}"), ("b", "/b")], "messages", owner))
        for owner in ("alice", "bob")
        for number in range(5)
    ]
    await asyncio.sleep(0.05)
    assert reading == {"alice": 1, "bob": 1}
    assert await addresses.read_all([], "messages", "alice") == {}
    may_read.set()
    assert await asked[4] == {"/alice4": b"/alice4", "/b": b"/b"}
    await asyncio.gather(*asked)
    assert most == {"alice": 1, "bob": 1}
