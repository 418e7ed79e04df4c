"""With deaths between any operations, results and states equal those of the operations alone, in order."""

import asyncio
import contextlib
import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.submitting import Client, server
from tinker_server.models.crash_isolation import MAX_TRIES

EVENTS = ["part", "part", "step", "snapshot", "suspend", "the trainer dies", "the server crashes", "all is answered"]
PATIENCE_S = 60


class Story:
    """One model, through all its servers, and what it must be."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._stack = AsyncExitStack()
        self._seq_id = 0
        self._parts = 0
        self._crashes = 0
        """Since all was answered."""
        self._submitted: list[tuple[str, int | None]] = []
        """The request_ids in order; of steps, which one it is."""
        self._steps: list[list[int]] = []

    async def begin(self) -> None:
        self._client: Client = await self._stack.enter_async_context(server(self._data_dir))
        self._model_id = self._client.model_id
        await self._client.result(await self._client.create_model())

    async def happen(self, event: str) -> None:
        client, scheduler = self._client, self._client.services.scheduler
        match event:
            case "part":
                self._seq_id += 1
                self._submitted.append((await client.forward_backward(self._seq_id, model_id=self._model_id), None))
                self._parts += 1
            case "step":
                self._seq_id += 1
                self._steps.append([1] * self._parts)
                self._parts = 0
                self._submitted.append((await client.optim_step(self._seq_id, self._model_id), len(self._steps)))
            case "snapshot":  # after the next operation, while those after it run
                scheduler.actor(self._model_id).model.log.must_end = True
            case "suspend":
                await scheduler.suspend(self._model_id)
            case "the trainer dies":
                await client.trainer.die()
            case "the server crashes":
                await self._crash()
            case "all is answered":
                await self.assert_answered()

    async def _crash(self) -> None:
        """The next server has a copy of the disk at any moment. Too many deaths would make an operation the culprit."""
        self._crashes += 1
        if self._crashes > MAX_TRIES:
            await self.assert_answered()
        left = self._data_dir.with_name(f"{self._data_dir.name}+")
        async with self._client.services.futures.rows._db._write_lock:  # a copy of one moment
            with contextlib.suppress(shutil.Error):  # what was just being deleted
                shutil.copytree(self._data_dir, left)
        await self._stack.aclose()
        self._data_dir = left
        self._client = await self._stack.enter_async_context(server(left))

    async def assert_answered(self) -> None:
        for request_id, step in self._submitted:
            result = await self._client.result(request_id)
            assert not result.failed, result.body
            assert step is None or json.loads(result.body)["metrics"]["step"] == step
        self._crashes = 0

    async def end(self) -> None:
        await self.happen("step")
        await self.assert_answered()
        assert self._client.trainer.applied[-1] == (self._model_id, self._steps[-1])
        assert self._client.trainer.steps[self._model_id] == len(self._steps)
        await self._stack.aclose()


async def play(events: list[str], data_dir: Path) -> None:
    story = Story(data_dir)
    async with asyncio.timeout(PATIENCE_S):
        await story.begin()
        for event in events:
            await story.happen(event)
        await story.end()


@hypothesis_settings(max_examples=8, derandomize=True, deadline=None, database=None)
@given(events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=12))
@example(events=["part", "step", "part", "snapshot", "part", "the server crashes", "part", "the trainer dies"])
@pytest.mark.heavy
def test_any_interleaving_gives_what_the_operations_alone_give(
    events: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asyncio.run(play(events, tmp_path_factory.mktemp("story") / "data"))


@pytest.mark.slow
@hypothesis_settings(max_examples=25, deadline=None, database=None)
@given(events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=20))
def test_many_interleavings_give_what_the_operations_alone_give(
    events: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asyncio.run(play(events, tmp_path_factory.mktemp("story") / "data"))
