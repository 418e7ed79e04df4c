"""Fixtures of the store's tests."""

from collections.abc import AsyncIterator

import pytest

from tinker_server.store.database import Database
from tinker_server.store.futures.store import FutureStore


@pytest.fixture
async def futures(db: Database) -> AsyncIterator[FutureStore]:
    """A store that keeps few results in memory."""
    store = FutureStore(db, recent_bytes=1000)
    await store.start()
    yield store
    await store.stop()
