"""A pool of engines: deaths, isolation, publishing, shares. Real processes, with light ones in the engines' place.

pytest tests/contract/test_sampler_pool.py
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests.factories import prompt, words
from tests.sampling import ask, request, sample, sampler_config
from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.configure.create import LocalModel, start_models
from tinker_server.backends.model_spec import ModelSpec, Placement
from tinker_server.backends.processes.crash_isolation import CrashIsolation, Suspect
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.protocol import BackendFailed, ChatTask, OnLoading, ignore_loading
from tinker_server.backends.sampler import pool as sampler_pool
from tinker_server.backends.sampler.client import EngineClient, Sending
from tinker_server.backends.sampler.pool import SamplerPool

STARTS: list[int] = []
"""Numbers of the engines that were started."""


async def launch_light(spec: ModelSpec) -> list[Child]:
    assert spec.engine is not None
    STARTS.append(spec.engine)
    return [await launch(f"{spec.name} {spec.engine}", "tests.fake_sampler_process", {})]


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[SamplerPool]:
    STARTS.clear()
    spec = replace(sampler_config(tmp_path, tmp_path / "scratch"), placement=Placement(engines=((), (), ())))
    running = SamplerPool(replace(spec, silence_s=4), launch_light)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def small_pool(pool: SamplerPool, monkeypatch: pytest.MonkeyPatch) -> SamplerPool:
    """Engines that draw four sequences at once."""
    monkeypatch.setattr(pool, "_spec", replace(pool._spec, max_concurrent_samples=4))
    return pool


def kill(engine: EngineClient) -> None:
    psutil.Process(engine.supervisor.children[0].process.pid).kill()


def on(pool: SamplerPool) -> list[int]:
    return [len(engine.requests) for engine in pool.engines]


async def draw(pool: SamplerPool, token: int, num_samples: int, seed: int = 0) -> SampleResponse:
    prompted = request(prompt(words(1).model_copy(update={"tokens": np.array([token, seed])})), prompt_logprobs=True)
    return await sample(pool, prompted.model_copy(update={"num_samples": num_samples}), None)


def numbers(response: SampleResponse) -> list[int]:
    return [-int(sequence.logprobs[0]) for sequence in response.sequences]


@pytest.mark.parametrize(
    ("count", "taken", "on_each"),
    [
        (4, [], [4, 0, 0]),
        (5, [], [4, 1, 0]),
        (10, [], [4, 4, 2]),
        (17, [], [6, 6, 5]),
        (5, [4, 2], [4, 3, 4]),  # two have room for six
        (5, [4, 4], [4, 4, 5]),  # one has room
        (5, [4, 4, 4], [9, 4, 4]),  # none has
    ],
)
async def test_a_prompt_with_more_samples_than_an_engine_has_room_for_goes_to_several(
    small_pool: SamplerPool, count: int, taken: list[int], on_each: list[int]
) -> None:
    pool = small_pool
    before = [asyncio.create_task(draw(pool, 1, number, seed)) for seed, number in enumerate(taken, 1)]
    await asyncio.sleep(0.1)
    asked = asyncio.create_task(draw(pool, 1, count))
    await asyncio.sleep(0.1)
    assert [sum(request.num_samples for request in engine.requests) for engine in pool.engines] == on_each
    response = await asked
    assert numbers(response) == list(range(count))
    assert response.prompt_logprobs is not None and response.prompt_logprobs.shape == (2,)
    assert [numbers(one) for one in await asyncio.gather(*before)] == [list(range(number)) for number in taken]


def samples_on(pool: SamplerPool) -> list[int]:
    return [engine.num_samples for engine in pool.engines]


async def test_parts_go_to_the_engines_with_the_room_whatever_tokens_they_expect(small_pool: SamplerPool) -> None:
    pool = small_pool
    one = prompt(words(1).model_copy(update={"tokens": np.array([1, 5])}))
    asked_before = [request(one, {"max_tokens": 1}, num_samples=4), *[request(one, {"max_tokens": 1000})] * 2]
    before = [asyncio.create_task(sample(pool, other, None, f"owner {i}")) for i, other in enumerate(asked_before)]
    await asyncio.sleep(0.1)
    assert samples_on(pool) == [4, 1, 1]
    asked = asyncio.create_task(draw(pool, 1, 6))
    await asyncio.sleep(0.1)
    assert samples_on(pool) == [4, 4, 4]
    assert numbers(await asked) == list(range(6))
    await asyncio.gather(*before)


async def test_each_choice_of_a_chat_takes_room_of_its_engine(small_pool: SamplerPool) -> None:
    pool = small_pool
    task = ChatTask("messages", {"first": None}, None, "good", num_sequences=4)
    chat = asyncio.create_task(pool.chat(task, lambda _: None))
    await asyncio.sleep(0.05)
    assert samples_on(pool) == [4, 0, 0]
    asked = asyncio.create_task(draw(pool, 1, 5))
    await asyncio.sleep(0.05)
    assert samples_on(pool) == [4, 4, 1]
    await asyncio.gather(chat, asked)


async def test_parts_of_a_prompt_whose_engine_dies_run_elsewhere_and_a_deadly_one_fails_alone(
    small_pool: SamplerPool,
) -> None:
    pool = small_pool
    asked = asyncio.create_task(draw(pool, 1, 10))
    await asyncio.sleep(0.3)
    kill(pool.engines[2])
    assert numbers(await asked) == list(range(10))
    with pytest.raises(BackendFailed, match="the engine died twice while it worked on this request"):
        await draw(pool, 13, 10)
    async with asyncio.timeout(90):
        assert await ask(pool, 0) == 0


async def ask_all(pool: SamplerPool, owners: list[str]) -> list[asyncio.Task[int]]:
    """A request of each owner, of one second."""
    asked = [asyncio.create_task(ask(pool, 1, owner)) for owner in owners]
    await asyncio.sleep(0.3)
    return asked


async def test_a_killed_engines_requests_run_on_another_at_once_and_it_starts_again_by_itself(
    pool: SamplerPool, tmp_path: Path
) -> None:
    asked = await ask_all(pool, [f"owner {number}" for number in range(9)])
    assert on(pool) == [3, 3, 3]
    (tmp_path / "scratch/engine-0/broken").touch()  # it cannot start again for now
    kill(pool.engines[0])
    async with asyncio.timeout(8):
        assert await asyncio.gather(*asked) == [1] * 9
        assert await ask(pool, 0) == 0
    assert not pool.engines[0].supervisor.is_alive
    (tmp_path / "scratch/engine-0/broken").unlink()
    async with asyncio.timeout(90):
        while not pool.engines[0].supervisor.is_alive:  # noqa: ASYNC110 - it starts though nobody asks
            await asyncio.sleep(0.05)
    assert STARTS.count(1) == STARTS.count(2) == 1


async def test_a_request_that_kills_engines_kills_two_that_others_use_and_then_itself_alone(pool: SamplerPool) -> None:
    """Others are served all the while, beside five requests of its own owner."""
    waits: list[float] = []

    async def serve(owner: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            assert await ask(pool, 0, owner) == 0
            waits.append(loop.time() - began)
            await asyncio.sleep(0.01)

    serving = [asyncio.create_task(serve(f"other {number}")) for number in range(3)]
    own = await ask_all(pool, ["bad"] * 5)
    async with asyncio.timeout(120):
        with pytest.raises(BackendFailed, match="the engine died twice while it worked on this request"):
            await ask(pool, 14, "bad")
        assert await asyncio.gather(*own) == [1] * 5
    assert not any(one.done() for one in serving)
    for one in serving:
        one.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    assert max(waits) < 2  # less than an engine takes to start
    async with asyncio.timeout(90):
        await asyncio.gather(*(engine.wait_until_open() for engine in pool.engines))
    assert len(STARTS) <= 3 + 4  # two shared; its owner's group; itself
    assert 1 in [STARTS.count(number) for number in range(3)]  # one has never died


async def test_many_killing_requests_of_one_owner_leave_an_engine_to_others(pool: SamplerPool) -> None:
    """They move together, so that they end two engines and not all."""
    good = await ask_all(pool, [f"owner {number}" for number in range(3)])
    bad = [asyncio.create_task(ask(pool, 14, "bad")) for _ in range(4)]
    async with asyncio.timeout(90):
        failures = await asyncio.gather(*bad, return_exceptions=True)
        assert all(isinstance(one, BackendFailed) for one in failures), failures
        assert await asyncio.gather(*good) == [1] * 3
        assert await ask(pool, 0) == 0


async def test_what_an_owner_had_on_a_dead_engine_moves_together(pool: SamplerPool) -> None:
    asked = [asyncio.create_task(ask(pool, 1, "one", seed)) for seed in range(12)]
    await asyncio.sleep(0.3)
    assert on(pool) == [4, 4, 4]
    kill(pool.engines[0])
    await asyncio.sleep(0.6)
    moved = [sum(request.deaths == 1 for request in engine.requests) for engine in pool.engines]
    assert sorted(moved) == [0, 0, 4]
    assert await asyncio.gather(*asked) == [1] * 12


async def test_an_engine_that_runs_suspects_is_passed_over(pool: SamplerPool) -> None:
    suspect = Suspect()
    pool.engines[1].isolation.isolate([suspect], 1)
    asked = [asyncio.create_task(ask(pool, 1, "one", seed)) for seed in range(6)]
    await asyncio.sleep(0.3)
    assert on(pool) == [3, 0, 3]
    pool.engines[1].isolation.release(suspect)
    assert await asyncio.gather(*asked) == [1] * 6


async def test_while_no_engine_lives_requests_wait_for_the_first_that_starts(pool: SamplerPool, tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"scratch/engine-{number}/broken").touch()
    for engine in pool.engines:
        kill(engine)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(90):
        assert await asyncio.gather(*(ask(pool, token, f"owner {token}") for token in (0, 1, 0))) == [0, 1, 0]
    assert pool.engines[2].supervisor.is_alive


async def test_what_was_under_way_when_all_engines_died_runs_on_the_first_that_starts(
    pool: SamplerPool, tmp_path: Path
) -> None:
    asked = await ask_all(pool, [f"owner {number}" for number in range(6)])
    for number in (0, 1):
        (tmp_path / f"scratch/engine-{number}/broken").touch()
    for engine in pool.engines:
        kill(engine)
    async with asyncio.timeout(90):
        assert await asyncio.gather(*asked) == [1] * 6


async def test_a_suspect_does_not_wait_for_ever_for_an_engine_that_does_not_start(
    pool: SamplerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines die under it in turn, and the second is broken then."""
    monkeypatch.setattr(sampler_pool, "PATIENCE_S", 0.5)
    [asked] = await ask_all(pool, ["good"])
    kill(pool.engines[0])
    while not pool.engines[1].requests:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (tmp_path / "scratch/engine-1/broken").touch()
    kill(pool.engines[1])
    async with asyncio.timeout(90):
        assert await asked == 1
    assert not pool.engines[1].supervisor.is_alive


@pytest.mark.parametrize("told", [True, False])
async def test_a_chat_moves_unless_a_part_of_its_answer_was_told(pool: SamplerPool, told: bool) -> None:
    parts: list[str] = []
    chat = pool.chat(ChatTask("messages", {"first": "hello" if told else None}, None, "good"), parts.append)
    async with asyncio.timeout(90):
        if told:
            with pytest.raises(BackendFailed, match="died while it answered; send the request again"):
                await chat
        else:
            # The light process dies of the first chat of its directory: of two, then it is tried alone.
            await chat
    assert parts == (["hello"] if told else ["done"])
    assert await ask(pool, 0) == 0


def published(tmp_path: Path) -> list[str | None]:
    files = [tmp_path / f"scratch/engine-{number}/published" for number in range(3)]
    return [file.read_text() if file.exists() else None for file in files]


async def test_weights_are_published_once_every_living_engine_has_them(pool: SamplerPool, tmp_path: Path) -> None:
    await pool.publish(Path("first"), "good")
    assert published(tmp_path) == ["first"] * 3
    with pytest.raises(BackendFailed, match="engine 2 of the sampler: the scores differ"):
        await pool.publish(Path("refused-2"), "good")
    with pytest.raises(BackendFailed, match="engine 0 of the sampler: the scores differ"):
        await pool.publish(Path("refused-0"), "good")


async def test_all_engines_read_weights_while_the_first_computes_with_them(pool: SamplerPool, tmp_path: Path) -> None:
    await pool.publish(Path("slow"), "good")
    filled, published = (
        [(tmp_path / f"scratch/engine-{number}" / name).stat().st_mtime_ns for number in range(3)]
        for name in ("filled", "published")
    )
    assert max(filled) < min(published)


@pytest.mark.parametrize("number", [0, 2])
async def test_an_engine_that_dies_meanwhile_fails_no_save(pool: SamplerPool, tmp_path: Path, number: int) -> None:
    async with asyncio.timeout(10):
        await pool.publish(Path(f"deadly-{number}"), "good")
    assert [name is None for name in published(tmp_path)] == [one == number for one in range(3)]


async def test_weights_that_end_engines_end_two_and_are_then_tried_alone(pool: SamplerPool) -> None:
    with pytest.raises(BackendFailed, match="engine 1 of the sampler: the engine died twice"):
        await asyncio.wait_for(pool.publish(Path("deadly"), "bad"), 60)
    assert STARTS.count(2) == 1
    assert await ask(pool, 0) == 0


async def test_a_dead_engine_acknowledges_nothing(pool: SamplerPool, tmp_path: Path) -> None:
    kill(pool.engines[1])
    await asyncio.sleep(0.3)
    async with asyncio.timeout(1):
        await pool.publish(Path("first"), "good")
    assert published(tmp_path) == ["first", None, "first"]


async def test_each_engine_knows_what_owners_have_running_in_the_others(pool: SamplerPool, tmp_path: Path) -> None:
    asked = await ask_all(pool, ["a", "a", "b"])
    assert on(pool) == [2, 1, 0] or sum(on(pool)) == 3
    seen = [json.loads((tmp_path / f"scratch/engine-{number}/elsewhere").read_text()) for number in range(3)]
    total = {owner: sum(one.get(owner, 0) for one in seen) for owner in ("a", "b")}
    assert total == {"a": 4, "b": 2}  # each is seen by the two engines where it is not
    await asyncio.gather(*asked)


async def test_processes_and_scratch_directories_are_told_apart(pool: SamplerPool) -> None:
    assert len({state.name for state in pool.processes()}) == 3
    assert [engine._spec.scratch_dir.name for engine in pool.engines] == ["engine-0", "engine-1", "engine-2"]


class HeldTrainer:
    """A trainer that has started when `loaded` is set."""

    def __init__(self) -> None:
        self.loaded = asyncio.Event()

    async def start(self, _on_loading: OnLoading) -> None:
        await self.loaded.wait()


def on_gpu(directory: Path, trainer: HeldTrainer) -> LocalModel:
    """A model with light engines, as on GPU 0."""
    spec = replace(sampler_config(directory, directory / "scratch"), placement=Placement((0,), engines=((0,), (0,))))
    spec = replace(spec, name=directory.name)
    sampler = SamplerPool(spec, launch_light)
    return LocalModel(spec, BaseWeights(spec), trainer, sampler, Any, Any)  # type: ignore[arg-type]


async def test_engines_of_a_gpu_load_while_trainers_and_other_engines_load(tmp_path: Path) -> None:
    models = [on_gpu(tmp_path / name, HeldTrainer()) for name in "ab"]
    starting = asyncio.create_task(start_models(models, ignore_loading))
    try:
        engines = [engine for model in models for engine in model.sampler.engines]
        async with asyncio.timeout(8):
            while not all(engine.is_open for engine in engines):  # noqa: ASYNC110 - nobody asks for them
                await asyncio.sleep(0.05)
        assert not starting.done()
        for model in models:
            model.trainer.loaded.set()  # type: ignore[attr-defined]
        async with asyncio.timeout(8):
            await starting
        assert await asyncio.gather(*(ask(model.sampler, 0) for model in models)) == [0, 0]
    finally:
        starting.cancel()
        await asyncio.gather(*(model.sampler.stop() for model in models))


async def test_a_trainer_that_fails_ends_the_engines_that_load_beside_it(tmp_path: Path) -> None:
    class Fails(HeldTrainer):
        async def start(self, _on_loading: OnLoading) -> None:
            await asyncio.sleep(0.5)
            raise BackendFailed("no memory")

    model = on_gpu(tmp_path, Fails())
    with pytest.raises(BackendFailed, match="no memory"):
        await start_models([model], ignore_loading)
    await model.sampler.stop()  # waits for processes that are being ended
    states = model.sampler.processes()
    assert len(states) == 2 and not any(state.is_alive for state in states)


def attached(pool: SamplerPool) -> EngineClient:
    """An engine of another machine, which has just been attached."""
    return attached_with(pool, {})


def attached_with(pool: SamplerPool, sending: Sending, received_dir: Path | None = None) -> EngineClient:
    spec = replace(pool.engines[0]._spec, received_dir=received_dir)
    return pool.attach(
        lambda number: replace(spec, engine=number, scratch_dir=spec.scratch_dir.parent / f"engine-{number}"),
        launch_light,
        sending,
    )


async def opened(engine: EngineClient) -> None:
    async with asyncio.timeout(90):
        while not engine.is_open:  # noqa: ASYNC110 - it starts though nobody asks
            await asyncio.sleep(0.05)


async def test_an_attached_engine_takes_requests_and_those_move_when_it_is_detached(pool: SamplerPool) -> None:
    engine = attached(pool)
    assert engine.number == 3 and not engine.is_open
    await opened(engine)
    asked = await ask_all(pool, [f"owner {number}" for number in range(8)])
    assert on(pool) == [2, 2, 2, 2]
    await pool.detach(engine)
    async with asyncio.timeout(8):
        assert await asyncio.gather(*asked) == [1] * 8
    assert sum(on(pool)) == 0 and engine not in pool.engines and STARTS.count(3) == 1
    again = attached(pool)
    assert again.number == 4
    await opened(again)
    use = await pool.engine_use()
    assert use is None or 3 not in use.engines


async def test_an_engine_that_leaves_convicts_nothing_that_was_tried_there_alone(pool: SamplerPool) -> None:
    engine = attached(pool)
    await opened(engine)
    for other in pool.engines[:3]:
        other.isolation.isolate([Suspect()], 1)
    asked = asyncio.create_task(ask(pool, 1))
    await asyncio.sleep(0.3)
    [request] = engine.requests
    engine.isolation.isolate([request], 1)
    request.deaths = 2
    for other in pool.engines[:3]:
        other.isolation = CrashIsolation(is_exclusive=True)
    await pool.detach(engine)
    assert await asked == 1
    assert request.deaths == 2


async def test_an_engine_that_leaves_while_requests_wait_for_it_is_not_started_again(pool: SamplerPool) -> None:
    engine, suspects = attached(pool), [Suspect() for _ in range(4)]
    await opened(engine)
    for tried, suspect in zip(pool.engines, suspects, strict=True):
        tried.isolation.isolate([suspect], 1)
    asked = asyncio.create_task(ask(pool, 0))
    await asyncio.sleep(0.1)
    await pool.detach(engine)
    engine.isolation.release(suspects[3])
    await asyncio.sleep(1)
    assert STARTS.count(3) == 1 and not asked.done()
    pool.engines[0].isolation.release(suspects[0])
    assert await asyncio.wait_for(asked, 8) == 0


async def with_machine_of_two(pool: SamplerPool, tmp_path: Path) -> None:
    """Attach two engines, 3 and 4, of one other machine."""
    sending: Sending = {}
    for engine in [attached_with(pool, sending, tmp_path / "received") for _ in range(2)]:
        await opened(engine)


def saved(tmp_path: Path, name: str) -> Path:
    weights = tmp_path / "weights" / name
    weights.mkdir(parents=True)
    (weights / "adapter.safetensors").write_bytes(b"x" * 1000)
    return weights


def receipts(tmp_path: Path) -> list[str]:
    """Names of the weights that each engine of the other machine was sent."""
    files = [tmp_path / f"scratch/engine-{number}/received" for number in (3, 4)]
    return [file.read_text() if file.exists() else "" for file in files]


async def test_weights_travel_once_to_all_engines_of_a_machine(pool: SamplerPool, tmp_path: Path) -> None:
    await with_machine_of_two(pool, tmp_path)
    for name in ("first", "second"):
        await pool.publish(saved(tmp_path, name), "good")
        published_by = [(tmp_path / f"scratch/engine-{number}/published").read_text() for number in range(5)]
        assert published_by == [name] * 5
    assert sorted("".join(receipts(tmp_path)).split()) == ["first", "second"]


async def test_an_engine_gets_weights_itself_whose_travel_ended_with_another_of_its_machine(
    pool: SamplerPool, tmp_path: Path
) -> None:
    await with_machine_of_two(pool, tmp_path)
    for name in ("unreceived-3", "unreceived-4"):
        await pool.publish(saved(tmp_path, name), "good")
        async with asyncio.timeout(90):
            while not all(engine.is_open for engine in pool.engines):  # noqa: ASYNC110 - they start by themselves
                await asyncio.sleep(0.05)
    assert receipts(tmp_path) == ["unreceived-4 ", "unreceived-3 "]


async def test_an_engine_that_is_detached_while_it_does_not_start_is_not_tried_again(
    pool: SamplerPool, tmp_path: Path
) -> None:
    directory = tmp_path / "scratch/engine-3"
    directory.mkdir(parents=True)
    (directory / "broken").touch()
    engine = attached(pool)
    async with asyncio.timeout(90):
        while STARTS.count(3) < 2:  # noqa: ASYNC110 - it starts though nobody asks
            await asyncio.sleep(0.05)
    await pool.detach(engine)
    with pytest.raises(BackendFailed, match="engine 3 of the sampler is gone with its machine"):
        await engine.running()
    tried = STARTS.count(3)
    await asyncio.sleep(3)
    assert STARTS.count(3) == tried and await ask(pool, 0) == 0


async def test_a_request_that_waits_for_an_engine_whose_machine_is_lost_runs_elsewhere(pool: SamplerPool) -> None:
    """It has seen an engine end before, so that it would be tried there alone."""
    engine = attached(pool)
    await opened(engine)
    for other in pool.engines[:3]:
        suspect = Suspect("somebody")
        other.isolation.isolate([suspect], 1)
    asked = asyncio.create_task(ask(pool, 1, "bad"))
    await asyncio.sleep(0.3)
    [request] = engine.requests
    request.deaths = 1
    engine.is_gone = True  # as it is while its machine's connections are closed one by one
    kill(engine)
    for other in pool.engines[:3]:
        other.isolation = CrashIsolation(is_exclusive=True)
    await pool.detach(engine)
    async with asyncio.timeout(8):
        assert await asked == 1


async def test_the_only_engine_of_a_pool_that_may_grow_starts_again_by_itself(tmp_path: Path) -> None:
    STARTS.clear()
    spec = replace(sampler_config(tmp_path, tmp_path / "scratch"), engine=0)
    growing = SamplerPool(spec, launch_light, may_grow=True)
    await growing.start()
    try:
        kill(growing.engines[0])
        async with asyncio.timeout(90):
            while len(STARTS) < 2:  # noqa: ASYNC110 - it starts though nobody asks
                await asyncio.sleep(0.05)
        assert await ask(growing, 0) == 0
    finally:
        await growing.stop()
