"""Sequences and adapter slots of a sampling engine are shared out fairly; the engine here only sleeps."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tinker_server.backends.sampler.engine.fair_admission import RESERVE, FairAdmission


class Engine:
    """Runs sequences until they are finished from outside, and remembers the order in which they entered."""

    def __init__(self, max_sequences: int, max_adapters: int) -> None:
        self.admission = FairAdmission(max_sequences, max_adapters)
        self.entered: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def submit(self, name: str, owner: str, adapter: str | None = None) -> None:
        self.tasks[name] = asyncio.create_task(self._run(name, owner, Path(adapter) if adapter else None))

    async def _run(self, name: str, owner: str, adapter: Path | None) -> None:
        async with self.admission.admission(owner, adapter):
            self.entered.append(name)
            self.running[name] = asyncio.Event()
            try:
                await self.running[name].wait()
            finally:
                del self.running[name]

    async def finish(self, *names: str) -> None:
        for name in names:
            self.running[name].set()
        await settle()

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


Start = Callable[..., Engine]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Makes engines, which are stopped after the test."""
    engines: list[Engine] = []

    def make(max_sequences: int, max_adapters: int) -> Engine:
        engines.append(Engine(max_sequences, max_adapters))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()


async def test_an_owner_who_floods_delays_anothers_first_sequences_not_at_all(start: Start) -> None:
    engine = start(max_sequences=4, max_adapters=2)
    for i in range(100):
        engine.submit(f"flood {i}", "a")
    await settle()
    assert len(engine.running) == 4
    engine.submit("small", "b")
    await settle()
    assert engine.entered[-1] == "small" and len(engine.running) == 5


async def test_sequences_that_end_make_room_for_the_owner_with_the_fewest(start: Start) -> None:
    engine = start(max_sequences=4, max_adapters=2)
    for i in range(20):
        engine.submit(f"a{i}", "a")
    await settle()
    for i in range(20):
        engine.submit(f"b{i}", "b")
    await settle()
    while not {"a3", "b3"} <= set(engine.entered):
        await engine.finish(next(iter(engine.running)))
    owners = Counter(name[0] for name in engine.running)
    assert abs(owners["a"] - owners["b"]) <= 1


async def test_owners_who_have_nothing_running_are_admitted_beyond_the_limit_only_so_far(start: Start) -> None:
    engine = start(max_sequences=2, max_adapters=2)
    for i in range(50):
        engine.submit(f"sequence {i}", f"owner {i}")
    await settle()
    assert len(engine.running) == 2 + RESERVE


async def test_a_fifth_adapter_beside_four_busy_ones_gets_the_first_slot_that_is_free(start: Start) -> None:
    """Three streams of each of four adapters, every one asking again as soon as it has been served."""
    engine = start(max_sequences=64, max_adapters=4)
    numbers = dict.fromkeys("abcd", 0)

    def ask(adapter: str) -> None:
        numbers[adapter] += 1
        engine.submit(f"{adapter}{numbers[adapter]}", adapter, adapter)

    for adapter in "abcd" * 3:
        ask(adapter)
    await settle()
    engine.submit("fifth", "e", "e")
    await settle()
    served = 0
    while "fifth" not in engine.entered:
        name = next(iter(engine.running))
        ask(name[0])
        await engine.finish(name)
        served += 1
    assert served <= 12  # each stream once at most: its slot's other sequences had to end


async def test_a_sequence_that_ends_before_it_gets_a_slot_lets_in_what_waited_for_it(start: Start) -> None:
    engine = start(max_sequences=8, max_adapters=1)
    for name, owner, adapter in (("first", "a", "A"), ("other", "b", "B"), ("second", "a", "A")):
        engine.submit(name, owner, adapter)
        await settle()
    assert engine.entered == ["first"]
    engine.tasks["other"].cancel()
    await settle()
    assert engine.entered == ["first", "second"]


async def test_the_old_snapshots_of_one_owner_do_not_keep_anothers_adapter_out(start: Start) -> None:
    engine = start(max_sequences=64, max_adapters=4)
    for i in range(40):
        for k in range(30):
            engine.submit(f"a{i}.{k}", "a", f"a{i}")
    await settle()
    engine.submit("b", "b", "b")
    await settle()
    running = list(engine.running)
    rounds = 0
    while "b" not in engine.entered:
        rounds += 1
        await engine.finish(*running)
        running = list(engine.running)
    assert rounds == 1


async def test_many_adapters_of_one_owner_fill_the_engine_and_all_are_served(start: Start) -> None:
    engine = start(max_sequences=32, max_adapters=4)
    for i in range(12):
        for k in range(20):
            engine.submit(f"{i}.{k}", "a", f"a{i}")
    least, steps = 32, 0
    await settle()
    while engine.running:
        if len(engine.entered) < 200:
            least = min(least, len(engine.running))
        await engine.finish(*list(engine.running))
        steps += 1
    assert len(engine.entered) == 240
    assert least >= 16 and steps <= 16
    first = {name.split(".")[0]: at for at, name in reversed(list(enumerate(engine.entered)))}
    assert max(first.values()) < 120


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_ends_or_is_cancelled_everybody_is_served_within_the_limits(
    seed: int, start: Start
) -> None:
    draw = random.Random(seed)
    max_sequences, max_adapters = draw.randint(1, 6), draw.randint(1, 3)
    engine = start(max_sequences, max_adapters)
    for i in range(150):
        owner = draw.choice("abc")
        engine.submit(f"{i}", owner, draw.choice([None, f"{owner}1", f"{owner}2", "shared"]))
        for _ in range(draw.randint(0, 2)):
            if engine.running and draw.random() < 0.7:
                await engine.finish(draw.choice(list(engine.running)))
        if draw.random() < 0.2:
            engine.tasks[draw.choice(list(engine.tasks))].cancel()
        if draw.random() < 0.5:
            await settle()
        assert len(engine.admission._slots) <= max_adapters
        assert engine.admission._running.total() <= max_sequences + RESERVE
    for _ in range(2000):
        await settle()
        if not engine.running:
            break
        await engine.finish(*[name for name in list(engine.running) if draw.random() < 0.8])
    assert all(task.done() for task in engine.tasks.values())
    assert not engine.admission._queues and not engine.admission._running
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*engine.tasks.values())


@pytest.mark.asyncio
async def test_sequences_of_an_owner_in_other_engines_count_as_if_they_ran_here() -> None:
    """Both have one running and many waiting here; `a` has two more elsewhere."""
    engine = Engine(max_sequences=2, max_adapters=2)
    for name in ("a", "b"):
        engine.submit(f"{name} first", name)
    await settle()
    engine.admission.elsewhere = {"a": 2}
    for i in range(4):
        engine.submit(f"a{i}", "a")
        engine.submit(f"b{i}", "b")
    await settle()
    engine.entered.clear()
    await engine.finish("a first")
    await engine.finish("b first")
    assert engine.entered == ["a0", "b0"]  # who has none here is served, or would starve
    await engine.finish("b0")
    assert engine.entered[-1] == "b1"
    engine.admission.elsewhere = {"b": 9}
    await engine.finish("b1")
    assert engine.entered[-1] == "b2"  # again the only one with none here
    engine.admission.elsewhere = {}
    await engine.stop()


@pytest.mark.asyncio
async def test_room_goes_to_the_owner_with_the_fewest_in_all_engines() -> None:
    engine = Engine(max_sequences=6, max_adapters=2)
    for i in range(10):
        engine.submit(f"a{i}", "a")
        engine.submit(f"b{i}", "b")
    await settle()
    assert Counter(name[0] for name in engine.running) == {"a": 3, "b": 3}
    engine.admission.elsewhere = {"a": 4}
    await engine.finish(*[name for name in engine.running if name[0] == "a"][:2])
    assert Counter(name[0] for name in engine.running) == {"a": 1, "b": 5}
    await engine.stop()
