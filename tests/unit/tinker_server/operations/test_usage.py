"""Usage counts every token once, for the owner of the request."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from tests.fakes import FakeBackend
from tinker_server.accounts import Records
from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.auth.keys import Keys
from tinker_server.backends.protocol import SamplingTask
from tinker_server.errors import DatabaseUnavailable
from tinker_server.models.base_models import BaseModels
from tinker_server.operations import sampling
from tinker_server.store.audit import AuditStore
from tinker_server.store.checkpoints import CheckpointStore
from tinker_server.store.database import Database
from tinker_server.store.directories import Storage
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation
from tinker_server.store.holdings import Holdings
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.usage import UsageStore
from tinker_server.weights.lookup import WeightStores

IMAGE_TOKENS = 4
"""As the fake base model expands every image."""


async def amounts(usage: UsageStore, owner: str) -> dict[str, int]:
    return {one.kind: one.amount async for page in usage.between(owner, 0, time.time() + 1) for one in page}


@pytest.mark.parametrize("expected_tokens", [None, IMAGE_TOKENS])
async def test_images_count_as_they_are_expanded_whoever_found_them_in_the_cache(
    db: Database, tmp_path: Path, expected_tokens: int | None
) -> None:
    backend, usage, storage = FakeBackend(), UsageStore(db), Storage(tmp_path, db)
    sequence = SampledSequence(
        stop_reason="length", tokens=np.array([1, 2], np.int32), logprobs=np.array([-1, -1], np.float32)
    )

    async def sample(task: SamplingTask) -> SampleResponse:
        return SampleResponse(sequences=[sequence] * task.num_samples, prompt_cache_hit_tokens=6)

    backend.tiny.sampler.sample = sample  # type: ignore[method-assign]
    holdings, bases = Holdings(db, storage, 1000, 1), BaseModels(backend.models)
    keys, audit = Keys(tmp_path / "keys"), AuditStore(db, Records())
    stores = WeightStores(bases, CheckpointStore(db), SamplerStore(db), storage, usage, holdings, keys, audit)
    image = ImageChunk(data=b"x", format="png", expected_tokens=expected_tokens)
    request = SampleRequest(
        base_model="tiny",  # of no session, and counted all the same
        prompt=ModelInput(chunks=[EncodedTextChunk(tokens=np.array([1, 2, 3])), image, image]),
        num_samples=3,
        sampling_params=SamplingParams(max_tokens=2),
    )
    work = Work(Operation("sample", "direct", 0, b"", "application/json", "alice"), request)
    await sampling.sample(stores, None, work)
    await usage.on_success(work)
    assert await amounts(usage, "alice") == {"prefill": 3 + 2 * IMAGE_TOKENS - 6, "cached_prefill": 6, "sampled": 6}
    assert await amounts(usage, "bob") == {}
    (any_,) = {one.session_id async for page in usage.between("alice", 0, time.time() + 1) for one in page}
    assert any_ == ""


async def test_nothing_negative_is_counted(db: Database) -> None:
    usage = UsageStore(db)
    with pytest.raises(AssertionError):
        usage.count("prefill", "alice", "s", "tiny", -246)


async def test_time_of_the_trainer_is_counted_for_each_rank_and_is_no_event_of_the_api(db: Database) -> None:
    usage = UsageStore(db, {"tiny": 4}.__getitem__)
    operation = Operation("forward_backward", "run", 1, b"", "application/json", "alice")
    await usage.on_success(Work(operation, None, base_model="tiny", used={"training": 7}, run_s=1.5))
    day = int(time.time() // 86400)
    found = await usage.by_day(None, (day - 1) * 86400.0)
    assert found == {(day, "alice", "trainer_ms"): 6000, (day, "alice", "training"): 7}
    assert await usage.by_day("bob", 0.0) == {}
    assert await amounts(usage, "alice") == {"training": 7}


async def test_what_was_written_without_an_answer_is_not_added_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, usage, write = UsageStore(db), UsageStore(db), db.write
    before.count("sampled", "alice", "s", "tiny", 100)
    await before.save()

    @asynccontextmanager
    async def commit_without_an_answer() -> AsyncIterator[AsyncSession]:
        async with write() as session:
            yield session
        raise DatabaseUnavailable("the database does not answer")

    usage.count("sampled", "alice", "s", "tiny", 1)
    with monkeypatch.context() as silent:
        silent.setattr(db, "write", commit_without_an_answer)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                await usage.save()
            usage.count("sampled", "alice", "s", "tiny", 10)
    assert await amounts(usage, "alice") == {"sampled": 121}
    assert await amounts(usage, "alice") == {"sampled": 121}


async def test_each_hour_has_its_own_amounts_whichever_server_counted_them(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may go back, too."""
    for hours in ([5, 5, 6], [6, 7, 5]):  # each of another server
        usage = UsageStore(db)
        for hour in hours:
            monkeypatch.setattr(time, "time", lambda hour=hour: hour * 3600.0 + 9)
            usage.count("training", "alice", "s", "tiny", hour)
            await usage.save()
    found = [(each.hour / 3600, each.amount) async for page in usage.between("alice", 0, 1e9) for each in page]
    assert found == [(5, 15), (6, 12), (7, 7)]
