"""Drives the trainer processes of one base model: 1..N of them, restarted together when one dies or hangs.

The only place where the async server meets sync torch. Commands go to all ranks one after the other, owners taking
turns, and then their models; a forward_backward takes a turn for each of its rows. Rank 0's answer counts. The ranks
agree on what they refuse (`parallel.agreed`): after anything else they are ended, and their models with them.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from api_schemas.training import AdamParams, ForwardBackwardOutput, OptimStepResponse, Trainable
from backends.processes.fair_queue import FairTurns
from backends.processes.launcher import launch_trainer, rank_name
from backends.processes.rpc import STOP_S, Child, ChildBroke, ChildDied, Command
from backends.processes.spans import Listener, ProcessSpan, current_listener, heard_by
from backends.protocol import (
    BackendFailed,
    EncodedBatch,
    InvalidInput,
    Loading,
    LoadingHearer,
    ModelLost,
    ProcessState,
    unheard,
)
from backends.trainer import commands
from backends.trainer.commands import TrainerConfig

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")
PATIENCE_S = 60
"""How much longer than a piece of work may take (`distributed`) a rank may be silent."""
_START_PATIENCE_S = 600
"""A new process imports torch and transformers first: more than a minute on a busy machine."""
_LAST_GRACE_S = 1
"""For ranks that have failed, to end by themselves."""
_APART_S = 300.0
"""After ranks have ended at work."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before ranks that did not start, or soon ended, are started again: each twice the one before."""


@dataclass(eq=False)
class _Pass:
    """A forward_backward that is not finished."""

    new: commands.NewPass
    taken_up: bool = False
    """Whether the ranks know of it."""
    finished: asyncio.Future[ForwardBackwardOutput] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    listener: Listener | None = field(default_factory=current_listener)
    """Who is told of its rows."""

    def finish(self, outcome: ForwardBackwardOutput | Exception) -> None:
        """Done, or failed."""
        if isinstance(outcome, Exception):
            self.finished.set_exception(outcome)
            self.finished.exception()  # whoever waited may be gone
        else:
            self.finished.set_result(outcome)


class TrainerClient:
    """`protocol.Trainer` over child processes, one command at a time."""

    def __init__(self, config: TrainerConfig, *, num_ranks: int, patience_s: float = PATIENCE_S) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._patience_s = patience_s
        self._ranks: list[Child] = []
        self._hear: LoadingHearer = unheard
        self._owners: dict[str, str] = {}
        """Of the models that are loaded."""
        self._begun: dict[str, int] = {}
        """By loaded model, its latest piece of work."""
        self._worked_s: dict[str, float] = {}
        """By loaded model, what its work has taken."""
        self._turns = FairTurns()
        """Ranks run commands in the same order, time limits count from a command's own beginning, and none meets
        ranks that are being started."""
        self._apart_until_s = 0.0
        """By the event loop's clock: rows are not shared, so that whatever ends the ranks again is known."""
        self._numbers = itertools.count(1)
        self._passes: dict[int, _Pass] = {}
        """By number, the forward_backwards that are not finished."""
        self._watching: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        """Before the next start that nobody waits for."""
        self._num_restarts = 0
        self._restart = asyncio.Condition()

    async def start(self, hear: LoadingHearer = unheard) -> None:
        """Load the base on every rank. `hear` is told of this and of later starts. Raises BackendFailed."""
        self._hear = hear
        await self._start()

    async def _start(self) -> None:
        names, began = [rank_name(self._config.name, rank) for rank in range(self._num_ranks)], time.monotonic()
        try:
            for name in names:
                self._hear(name, Loading("starts"))
            self._ranks = await launch_trainer(
                self._config.name, num_ranks=self._num_ranks, device=self._config.device, gpus=self._config.gpus
            )
            await self._on_all(commands.Start(self._config), _START_PATIENCE_S, self._hear)
        except BaseException:
            await self._end(_LAST_GRACE_S)
            raise
        finally:
            for name in names:
                self._hear(name, None)
        log.info("%s: the trainer is ready after %.0f s", self._config.name, time.monotonic() - began)
        watching = self._watch(self._ranks)
        self._watching = asyncio.create_task(
            watching, name=f"watch over trainer {self._config.name}", context=Context()
        )

    async def stop(self) -> None:
        """End every rank."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._end(STOP_S)

    async def restarted(self, seen: int) -> int:
        """As the protocol says."""
        async with self._restart:
            await self._restart.wait_for(lambda: self._num_restarts > seen)
            return self._num_restarts

    async def create_model(self, model_id: str, lora: Trainable, owner: str) -> None:
        """Starts the ranks where they have died."""
        await self._add(commands.CreateModel(model_id, lora), owner)

    async def resume(self, model_id: str, lora: Trainable, owner: str, directory: Path) -> None:
        """Starts the ranks where they have died."""
        await self._add(commands.Resume(model_id, lora, directory), owner)

    def restoring(self, model_id: str, owner: str) -> AbstractContextManager[None]:
        """As the protocol says."""
        return self._turns.first(owner, model_id)

    def holds(self, model_id: str) -> bool:
        """As the protocol says."""
        return model_id in self._owners

    def last_turn(self, model_id: str) -> int:
        """As the protocol says."""
        return self._begun.get(model_id, 0)

    def worked_s(self, model_id: str) -> float:
        """As the protocol says."""
        return self._worked_s.get(model_id, 0)

    def processes(self) -> list[ProcessState]:
        """The ranks that were started last."""
        return [
            ProcessState(one.name, one.process.pid, not one.died.is_set(), self._num_restarts) for one in self._ranks
        ]

    async def snapshot(self, model_id: str, directory: Path) -> Awaitable[None]:
        """As the protocol says; rank 0 writes."""
        async with self._turns.turn(self._owner(model_id), model_id):
            await self._require(model_id)
            self._begin(model_id)
            await self._command(commands.Snapshot(model_id, directory))
            return asyncio.ensure_future(self._ranks[0].call(commands.SnapshotWritten(directory)))

    async def delete_model(self, model_id: str) -> None:
        """As the protocol says."""
        if (owner := self._owners.get(model_id)) is None:
            return
        async with self._turns.turn(owner, model_id):
            if await self._alive():
                await self._command(commands.DeleteModel(model_id))
            self._forget(model_id)

    async def forward_backward(self, model_id: str, batch: EncodedBatch, *, backward: bool) -> ForwardBackwardOutput:
        """As the protocol says; the batch is decoded and checked on the ranks."""
        owner = self._owner(model_id)
        this = _Pass(commands.NewPass(next(self._numbers), model_id, owner, batch, backward))
        self._passes[this.new.number] = this
        try:
            while not this.finished.done():
                async with self._turns.turn(owner, model_id):
                    if not this.finished.done():  # in another's row
                        await self._compute_rows(this)
            return this.finished.result()
        finally:
            await self._leave(this)

    async def _compute_rows(self, first: "_Pass") -> None:
        """One row of this pass, and of those that wait for their turn and may be in its company."""
        await self._require(first.new.model_id)
        company: list[_Pass] = []
        if self._config.shares_rows and asyncio.get_running_loop().time() > self._apart_until_s:
            waiting = [one for one in self._passes.values() if one is not first and not one.finished.done()]
            waiting = [one for one in waiting if one.new.model_id in self._owners]
            company = sorted(waiting, key=lambda one: self._turns.standing(one.new.owner, one.new.model_id))
        passes = [first, *company]
        new = tuple(one.new for one in passes if not one.taken_up)
        for one in passes:
            one.taken_up = True
            self._begin(one.new.model_id)
        with self._working(*(one.new.model_id for one in passes)):
            await _to_the_end(self._computed(commands.ComputeRows(new, tuple(one.new.number for one in passes))))

    async def _computed(self, command: commands.ComputeRows) -> None:
        spans: list[ProcessSpan] = []
        concerned = {command.order[0]}
        try:
            with heard_by(spans.append):
                rows = await self._on_all_or_end(command)
            concerned = {*rows.in_rows, *dict(rows.finished)}
        finally:
            self._tell(spans, concerned)
        for number, outcome in rows.finished:
            if (one := self._passes.get(number)) is not None and not one.finished.done():
                one.finish(outcome)

    def _tell(self, spans: list[ProcessSpan], numbers: set[int]) -> None:
        """Those whose rows they were: some were computed in another's turn."""
        for number in numbers & self._passes.keys():
            if (listener := self._passes[number].listener) is not None:
                for span in spans:
                    listener(span)

    async def _leave(self, this: "_Pass") -> None:
        """Of one that nobody waits for any more the ranks are told."""
        del self._passes[this.new.number]
        if this.taken_up and not this.finished.done() and this.new.model_id in self._owners:
            async with self._turns.turn(this.new.owner, this.new.model_id):
                if await self._alive():
                    await self._command(commands.DropPasses((this.new.number,)))

    async def mark_incomplete(self, model_id: str) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.MarkIncomplete(model_id))

    async def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """As the protocol says."""
        return await self._run(model_id, commands.OptimStep(model_id, adam))

    async def save_state(self, model_id: str, directory: Path) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.SaveState(model_id, directory))

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.LoadState(model_id, directory, with_optimizer))

    async def save_sampler_weights(self, model_id: str, directory: Path, *, for_elsewhere: bool) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.SaveSamplerWeights(model_id, directory, for_elsewhere))

    async def _add(self, command: commands.CreateModel | commands.Resume, owner: str) -> None:
        async with self._turns.turn(owner, command.model_id):
            await self._revive()
            if self._config.full:
                self._require_free(command.model_id, owner)
            await self._command(command)
            self._owners[command.model_id] = owner
            self._begin(command.model_id)

    def _require_free(self, model_id: str, owner: str) -> None:
        """Raises InvalidInput where another model trains the weights of the base. Others' ids are not told."""
        for other, its_owner in self._owners.items():
            if other != model_id:
                holder = f"model {other}" if its_owner == owner else "a model of another user"
                raise InvalidInput(
                    f"{holder} trains all weights of {self._config.name}, and this server has one such model at a time"
                    " on each base (setting backend.full): unload it, or finish its session, or wait"
                )

    async def _watch(self, ranks: list[Child]) -> None:
        """Start the ranks again once one of them has died, whether anybody needs them or not."""
        loop = asyncio.get_running_loop()
        began, deaths = loop.time(), [asyncio.create_task(rank.died.wait()) for rank in ranks]
        try:
            await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for death in deaths:
                death.cancel()
        lived_long = loop.time() - began > _LONGEST_PAUSE_S
        self._pause_s = 0 if lived_long else min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        await asyncio.sleep(self._pause_s)
        async with self._turns.turn("", ""):
            await self._revive()

    async def _revive(self) -> None:
        """Have the ranks run, however often they must be started for it. Whoever needs them waits."""
        pause_s = _FIRST_PAUSE_S
        while not await self._alive():
            log.warning("starting the trainer of %s again", self._config.name)
            try:
                await self._start()
            except (BackendFailed, OSError) as error:
                log.error("%s: %s; training waits, the next try is in %s s", self._config.name, error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            async with self._restart:
                self._num_restarts += 1
                self._restart.notify_all()

    def _begin(self, model_id: str) -> None:
        self._begun[model_id] = next(self._numbers)

    @contextlib.contextmanager
    def _working(self, *model_ids: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            for model_id in self._owners.keys() & model_ids:
                self._worked_s[model_id] = self.worked_s(model_id) + time.monotonic() - began

    def _forget(self, model_id: str) -> None:
        self._owners.pop(model_id, None)
        self._begun.pop(model_id, None)
        self._worked_s.pop(model_id, None)

    async def _run(self, model_id: str, command: Command[R]) -> R:
        async with self._turns.turn(self._owner(model_id), model_id):
            await self._require(model_id)
            self._begin(model_id)
            with self._working(model_id):
                return await self._command(command)

    def _owner(self, model_id: str) -> str:
        if model_id not in self._owners:
            raise ModelLost(f"{model_id} is no longer loaded: create it again, from a checkpoint to go on where it was")
        return self._owners[model_id]

    async def _require(self, model_id: str) -> None:
        """Raises ModelLost where the model has ended with its ranks."""
        await self._alive()
        self._owner(model_id)

    async def _alive(self) -> bool:
        """Whether every rank runs. Where one has died since the last command, the others are ended too."""
        if any(rank.died.is_set() for rank in self._ranks):
            log.error("the trainer of %s has died; its models must be loaded again", self._config.name)
            await self._end(_LAST_GRACE_S)
        return bool(self._ranks)

    async def _end(self, grace_s: float) -> None:
        ranks, self._ranks = self._ranks, []
        self._owners.clear()
        self._begun.clear()
        self._worked_s.clear()
        for one in self._passes.values():
            if one.taken_up and not one.finished.done():
                one.finish(ModelLost(f"{one.new.model_id} is no longer loaded: its trainer has ended"))
        await asyncio.gather(*(rank.stop(grace_s) for rank in ranks))

    async def _command(self, command: Command[R]) -> R:
        return await _to_the_end(self._on_all_or_end(command))

    async def _on_all_or_end(self, command: Command[R]) -> R:
        try:
            return await self._on_all(command, self._patience_s)
        except (ChildDied, ChildBroke) as error:
            if self._num_ranks > 1 or isinstance(error, ChildDied):
                log.error("the trainer of %s ends (%s); its models must be loaded again", self._config.name, error)
                self._apart_until_s = asyncio.get_running_loop().time() + _APART_S
                await self._end(_LAST_GRACE_S)
                raise error if isinstance(error, ChildDied) else ChildDied(str(error)) from error
            raise

    async def _on_all(self, command: Command[R], patience_s: float, hear: LoadingHearer = unheard) -> R:
        """Rank 0's answer, once every rank has one; `hear` gets what each of them tells before. Raises what the ranks
        agree on; ChildDied or ChildBroke as soon as one of them will not answer, or has failed by itself."""
        calls = [
            asyncio.ensure_future(rank.call(command, patience_s, partial(hear, rank.name))) for rank in self._ranks
        ]
        try:
            waiting = set(calls)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    if isinstance(error := call.exception(), (ChildDied, ChildBroke)):
                        raise error
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        errors = [call.exception() for call in calls]
        if len({type(error) for error in errors}) > 1:
            raise ChildBroke(f"the ranks do not agree: {errors}")
        return calls[0].result()


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Its result, and its end even if the caller stops waiting: half a command on one rank is worse than a result
    nobody reads."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody will ask for
        await asyncio.wait([task])
        raise
