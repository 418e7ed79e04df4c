"""Samples from one base model with one engine or several, each on GPUs and in processes of its own.

A request goes to the engine that has the beginning of its prompt in its cache, unless that engine is clearly busier
than another (`prefix_routes.py`). It waits until there is an engine, however long that takes. A prompt with more
samples than an engine has room for goes to several that have room.

**Fairness.** Each engine admits its sequences itself (`fair_admission.py`): a grant follows the end of a sequence at
once, and only the engine's process knows the sequences of a chat, and which adapters have a slot. So that an owner's
grants are of the whole pool, the pool tells each engine, ten times a second while several owners are there, how many
sequences each owner has in the others. Admission before routing would need a round trip for each sequence.

**Deaths.** A request whose engine died runs at once on another engine, or the first that lives, beside what is there.
If that engine dies too, it waits for it to start again, and runs there apart from all others, as crash isolation says
(`crash_isolation.py`), until the culprit is found; everybody else's work goes on elsewhere. So a request ends at most
two shared engines; one that is divided, those of its parts and another. An owner's requests move together, so they end
no more. With a single engine a request is isolated after the first death.
"""

import asyncio
import itertools
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from tinker_server.api_schemas.sampling import SampleResponse
from tinker_server.backends import tasks
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import StartWorkers, launch_sampler
from tinker_server.backends.processes.rpc import Child, ChildDied, Command
from tinker_server.backends.protocol import (
    BackendFailed,
    ChatTask,
    ChatUsage,
    EngineBatch,
    EngineUse,
    OnLoading,
    ProcessState,
    PromptScores,
    SamplingTask,
    ignore_loading,
)
from tinker_server.backends.sampler.client import EngineClient, Request, ScoreBase, Sending
from tinker_server.backends.sampler.commands import Chat, Publish, Sample
from tinker_server.backends.sampler.prefix_routes import (
    Piece,
    PrefixRoutes,
    chat_pieces,
    chat_tokens,
    task_pieces,
    task_tokens,
)

log = logging.getLogger(__name__)
R = TypeVar("R")

PATIENCE_S = 60.0
"""Time for which a suspect waits for its engine where that fails to start."""
_SETTLING_S = 0.3
"""Time before a request runs elsewhere. Where several engines die at once, the deaths of all are noticed by then: else
the request would be sent to an engine that is dead already, and would seem to have ended two."""
_SHARING_S = 0.1
"""Time between two exchanges of what owners have running: many sequences end in it, and none by the exchange."""


class SamplerPool:
    """`protocol.Sampler`."""

    def __init__(
        self,
        spec: ModelSpec,
        start_workers: StartWorkers = launch_sampler,
        *,
        may_grow: bool = False,
        score_base: ScoreBase | None = None,
    ) -> None:
        """If it `may_grow`, engines of other machines are attached later. `score_base` gives the trainer's scores, with
        which every engine's must agree; None where there is no trainer."""
        numbers = range(len(spec.placement.engines))
        self._spec, self._score_base = spec, score_base
        is_alone = len(numbers) == 1 and not may_grow
        self.engines = [
            EngineClient(spec.of_engine(number), start_workers, is_alone=is_alone, score_base=score_base)
            for number in numbers
        ]
        self._numbers = itertools.count(len(numbers))
        """Those of engines that are attached, which are never used again."""
        self._on_loading: OnLoading = ignore_loading
        self._attaching: set[asyncio.Task[None]] = set()
        self._routes = PrefixRoutes()
        self._owners: Counter[str] = Counter()
        """Requests in flight."""
        self._sharing: asyncio.Task[None] | None = None

    async def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """Return once every engine can sample. `on_loading` is called during this start and later starts. Raises
        BackendFailed."""
        self._on_loading = on_loading
        if self._is_several:  # a single engine empties it itself
            await asyncio.to_thread(shutil.rmtree, self._spec.scratch_dir, ignore_errors=True)
        await tasks.gather(engine.start(on_loading) for engine in self.engines)

    async def stop(self) -> None:
        """End all children and their engines."""
        if self._sharing is not None:
            self._sharing.cancel()
        for task in self._attaching:
            task.cancel()
        await asyncio.gather(*(engine.supervisor.stop() for engine in self.engines))

    def attach(
        self, describe: Callable[[int], ModelSpec], start_workers: StartWorkers, sending: Sending
    ) -> EngineClient:
        """Add an engine on another machine, and return it; it takes requests once it is ready. `describe` makes its
        spec from the number that it gets; `sending` is that of all engines of the machine."""
        spec = describe(next(self._numbers))
        engine = EngineClient(spec, start_workers, is_alone=False, sending=sending, score_base=self._score_base)
        self.engines.append(engine)
        task = asyncio.create_task(_start_attached(engine, self._on_loading), context=Context())
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)
        return engine

    async def detach(self, engine: EngineClient) -> None:
        """Remove an engine whose machine has left or is lost; what runs there runs on another engine."""
        engine.is_gone = True
        self.engines.remove(engine)
        await engine.supervisor.stop()

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """Implement the protocol."""
        pieces = task_pieces(task) if self._is_several else []
        parts = [task] if task.num_samples == 1 else self._parts(task)
        asked = [
            Request(
                task.owner,
                num_tokens=task_tokens(part, pieces),
                num_samples=part.num_samples,
                is_part=len(parts) > 1,
            )
            for part in parts
        ]
        if len(parts) == 1:
            return await self._run(asked[0], Sample(task), pieces)
        answers = await tasks.gather(
            self._run(request, Sample(part), ()) for request, part in zip(asked, parts, strict=True)
        )
        sequences = [sequence for answer in answers for sequence in answer.sequences]
        return answers[0].model_copy(update={"sequences": sequences})

    async def chat(self, task: ChatTask, emit: Callable[[str], None]) -> ChatUsage:
        """Implement the protocol."""
        pieces = chat_pieces(task) if self._is_several else []
        request = Request(task.owner, num_tokens=chat_tokens(task, pieces), num_samples=task.num_sequences)
        return await self._run(request, Chat(task), pieces, emit)

    async def publish(self, weights: Path, owner: str) -> None:
        """Implement the protocol. A first engine computes with them alone: weights that end engines must not end all
        of them. Meanwhile all read them into a slot."""
        request, command = Request(owner), Publish(weights)
        filled = self.engines if self._is_several else ()
        reading = Publish(weights, only_reads=True)
        async with tasks.running(self._acknowledge(engine, reading, owner) for engine in filled) as filling:
            try:
                await self._run(request, command, ())
            except BackendFailed as error:
                if not filled:
                    raise
                raise _of_engine(request.engine, error) from error
            if filling:
                await asyncio.wait(filling)  # if that failed, publishing fails likewise
        await asyncio.gather(
            *(self._acknowledge(engine, command, owner) for engine in self.engines if engine is not request.engine)
        )

    def processes(self) -> list[ProcessState]:
        """Return the state of each engine's process that was started last."""
        return [state for engine in self.engines for state in engine.supervisor.processes()]

    async def engine_use(self) -> EngineUse | None:
        """Implement `protocol.BaseModel.engine_use`."""
        if not self._is_several:
            return await self.engines[0].use()
        engines = list(self.engines)
        uses = await asyncio.gather(*(engine.use() for engine in engines))
        return _sum({engine.number: use for engine, use in zip(engines, uses, strict=True) if use is not None})

    def _parts(self, task: SamplingTask) -> list[SamplingTask]:
        """Divide a task whose samples no engine has room for, while several have room for some: by their rooms, and
        what is left over evenly. The first part scores the prompt."""
        most, count = self._spec.max_concurrent_samples, task.num_samples
        taken = [engine.num_samples for engine in self.engines if engine.is_open]
        rooms = sorted((most - number for number in taken if number < most), reverse=True)
        if len(rooms) < 2 or count <= rooms[0]:
            return [task]
        share, more = divmod(max(0, count - sum(rooms)), len(rooms))
        parts, first = [], 0
        for index, room in enumerate(rooms):
            own = min(room + share + (index < more), count - first)
            if own:
                scores = PromptScores() if first else task.scores
                parts.append(replace(task, num_samples=own, first=first, scores=scores))
            first += own
        return parts

    async def _acknowledge(self, engine: EngineClient, command: Publish, owner: str) -> None:
        """Have an engine load what another loads. An engine that is dead, or runs suspects, or dies of it, checks it on
        its first use. Raises BackendFailed, naming the engine, where it cannot load it."""
        if not engine.is_open:
            return
        request = Request(owner)
        try:
            async with engine.isolation.admit(request, partial(self._child, engine)) as child:
                try:
                    await engine.call(child, command)
                except ChildDied:
                    engine.isolation.note_crash(child)
                except BackendFailed as error:
                    raise _of_engine(engine, error) from error
        except _Moves:
            pass
        finally:
            engine.isolation.release(request)

    @property
    def _is_several(self) -> bool:
        return len(self.engines) > 1

    async def _run(
        self, request: Request, command: Command[R], pieces: Sequence[Piece], emit: Callable[[str], None] | None = None
    ) -> R:
        """Return an engine's answer; `request.engine` is the engine."""

        def on_part(part: str) -> None:
            request.has_begun = True
            assert emit is not None
            emit(part)

        self._owners[request.owner] += 1
        if len(self._owners) > 1 and self._is_several and (self._sharing is None or self._sharing.done()):
            name = f"shares of {self._spec.name}"
            self._sharing = asyncio.create_task(self._share_running(), name=name, context=Context())
        try:
            while True:
                engine = request.engine = await self._choose(request, pieces)
                with engine.having(request), suppress(_Moves):
                    return await self._run_on(engine, request, command, None if emit is None else on_part)
                await asyncio.sleep(_SETTLING_S)
        finally:
            self._owners[request.owner] -= 1
            if not self._owners[request.owner]:
                del self._owners[request.owner]

    async def _run_on(
        self, engine: EngineClient, request: Request, command: Command[R], on_part: Callable[[str], None] | None
    ) -> R:
        """Return the engine's answer. Raises _Moves after a death if another engine takes the request."""
        try:
            while not request.is_culprit:
                async with engine.isolation.admit(request, partial(self._child, engine)) as child:
                    try:
                        return await engine.call(child, command, on_part, request.owner)
                    except ChildDied:
                        if not engine.is_gone:  # no request ended it
                            engine.isolation.note_crash(child)
                        if request.has_begun:  # another answer would not begin as this one did
                            raise BackendFailed("the engine died while it answered; send the request again") from None
                        if engine.is_gone:
                            raise _Moves from None
                        request.deaths += 1
                        if request.deaths == 1 and self._is_several:
                            raise _Moves from None
        finally:
            engine.isolation.release(request)
        raise BackendFailed(
            "the engine died twice while it worked on this request, the second time on nothing else. It was started"
            " again for the others; this request is not tried a third time"
        )

    async def _child(self, engine: EngineClient) -> Child:
        """Return the engine's process, once there is one. Raises _Moves where it is gone, or does not start and another
        lives."""
        if engine.supervisor.is_alive and not engine.is_gone:
            return engine.supervisor.children[0]
        if not self._is_several and not engine.is_gone:
            return await engine.running()
        starting = asyncio.create_task(engine.running())
        try:
            while not (await asyncio.wait({starting}, timeout=PATIENCE_S))[0]:
                if engine.supervisor.num_failed_starts and any(other.is_open for other in self.engines):
                    raise _Moves
            if engine.is_gone:
                raise _Moves
            return starting.result()
        finally:
            starting.cancel()

    async def _choose(self, request: Request, pieces: Sequence[Piece]) -> EngineClient:
        """Return the engine for a request. Requests of an owner that survived an engine move together."""
        if not self._is_several:
            return self.engines[0]
        found = await self._open()
        if request.deaths:
            owner = request.owner
            found = [engine for engine in found if any(a.deaths and a.owner == owner for a in engine.requests)] or found
        if request.is_part:  # whoever has the prompt in its cache
            return min(found, key=lambda engine: (engine.num_samples, engine.waiting_tokens))
        by_number = {engine.number: engine for engine in found}
        waiting = {number: engine.waiting_tokens for number, engine in by_number.items()}
        return by_number[self._routes.choose(pieces, waiting)]

    async def _open(self) -> list[EngineClient]:
        """Return the engines that take requests, once there is one."""
        while not (found := [engine for engine in self.engines if engine.is_open]):
            async with tasks.running(engine.wait_until_open() for engine in self.engines) as opening:
                done, _ = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled():  # it is where its engine has left
                        task.result()
        return found

    async def _share_running(self) -> None:
        """Tell each engine what owners have running in the others, while there are several owners."""
        running: dict[EngineClient, Mapping[str, int]] = {}

        async def exchange(engine: EngineClient) -> None:
            elsewhere = Counter[str]()
            for other, counts in running.items():
                if other is not engine:
                    elsewhere.update(counts)
            found = await engine.share_running(dict(elsewhere))
            if found is not None or not engine.supervisor.is_alive:
                running[engine] = found or {}

        while len(self._owners) > 1:
            running = {engine: running.get(engine, {}) for engine in self.engines}
            await asyncio.gather(*map(exchange, self.engines))
            await asyncio.sleep(_SHARING_S)


class _Moves(Exception):
    """The request runs on another engine."""


async def _start_attached(engine: EngineClient, on_loading: OnLoading) -> None:
    try:
        await engine.start(on_loading)
    except (BackendFailed, OSError) as error:
        log.error("%s failed to start: %s", engine.name, error)
        if not engine.is_gone:
            await engine.running()


def _of_engine(engine: EngineClient | None, error: BackendFailed) -> BackendFailed:
    return error if engine is None else BackendFailed(f"{engine.name}: {error}")


def _sum(engines: Mapping[int, EngineUse]) -> EngineUse | None:
    """Return the load of all engines that answer; None if none does."""
    if not engines:
        return None
    uses = engines.values()
    batches = [use.batch for use in uses if use.batch is not None]
    return EngineUse(
        sequences_running=sum(use.sequences_running for use in uses),
        sequences_waiting=sum(use.sequences_waiting for use in uses),
        max_sequences=sum(use.max_sequences for use in uses),
        adapters=sum(use.adapters for use in uses),
        max_adapters=sum(use.max_adapters for use in uses),
        batch=None if not batches else _sum_batches(batches),
        engines=engines,
    )


def _sum_batches(batches: Sequence[EngineBatch]) -> EngineBatch:
    return EngineBatch(
        sum(batch.running for batch in batches),
        sum(batch.waiting for batch in batches),
        sum(batch.cache_used for batch in batches) / len(batches),
    )
