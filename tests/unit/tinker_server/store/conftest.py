"""Fixtures of the store's tests."""

from collections.abc import AsyncIterator

import pytest

from tinker_server.store.database import Database
from tinker_server.store.futures.store import FutureStore


@pytest.fixture
def recent_bytes() -> int:
    """Bytes of results that a store keeps in memory: few."""
    return 1000


@pytest.fixture
async def futures(db: Database, recent_bytes: int) -> AsyncIterator[FutureStore]:
    """A store that runs."""
    store = FutureStore(db, recent_bytes=recent_bytes)
    await store.start()
    yield store
    await store.stop()
