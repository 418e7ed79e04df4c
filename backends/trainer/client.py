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
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from api_schemas.training import AdamParams, ForwardBackwardOutput, OptimStepResponse, Trainable
from backends.processes.fair_queue import FairTurns
from backends.processes.launcher import TrainerRanks
from backends.processes.rpc import Child, ChildBroke, ChildDied, Command
from backends.processes.spans import Listener, ProcessSpan, current_listener, heard_by
from backends.processes.supervisor import Supervisor
from backends.protocol import EncodedBatch, InvalidInput, ModelLost, OnLoading, ProcessState, ignore_loading
from backends.trainer import commands
from backends.trainer.commands import TrainerConfig

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")
PATIENCE_S = 60
"""How much longer than a piece of work may take (`time_limits`) a rank may be silent."""
_START_PATIENCE_S = 600
"""A new process imports torch and transformers first: more than a minute on a busy machine."""
_APART_S = 300.0
"""After ranks have ended at work."""


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
        ranks = TrainerRanks(config.name, num_ranks, config.device, config.gpus)
        self._supervisor = Supervisor(ranks, self._load, on_end=self._lose_models, restart=self._restart)
        self._owners: dict[str, str] = {}
        """By loaded model."""
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

    async def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """Load the base on every rank. `on_loading` is called during this start and later ones. Raises
        BackendFailed."""
        await self._supervisor.start(on_loading)

    async def stop(self) -> None:
        """End every rank."""
        await self._supervisor.stop()

    async def restarted(self, seen: int) -> int:
        """As the protocol says."""
        return await self._supervisor.restarted(seen)

    def processes(self) -> list[ProcessState]:
        """Return the states of the ranks that were started last."""
        return self._supervisor.processes()

    async def create_model(self, model_id: str, lora: Trainable, owner: str) -> None:
        """Starts the ranks where they have died."""
        await self._add(commands.CreateModel(model_id, lora), owner)

    async def resume(self, model_id: str, lora: Trainable, owner: str, directory: Path) -> None:
        """Starts the ranks where they have died."""
        await self._add(commands.Resume(model_id, lora, directory), owner)

    def holds(self, model_id: str) -> bool:
        """As the protocol says."""
        return model_id in self._owners

    def last_turn(self, model_id: str) -> int:
        """As the protocol says."""
        return self._begun.get(model_id, 0)

    def worked_s(self, model_id: str) -> float:
        """As the protocol says."""
        return self._worked_s.get(model_id, 0)

    async def snapshot(self, model_id: str, directory: Path) -> Awaitable[None]:
        """As the protocol says; rank 0 writes."""
        async with self._turns.turn(self._owner(model_id), model_id):
            await self._require(model_id)
            self._begin(model_id)
            writer = self._supervisor.children[0]
            await self._command(commands.Snapshot(model_id, directory))
            return asyncio.ensure_future(writer.call(commands.SnapshotWritten(directory)))

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
            await self._supervisor.running()
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

    async def _load(self, ranks: list[Child]) -> None:
        await self._on_all(commands.Start(self._config), ranks, _START_PATIENCE_S, self._supervisor.on_loading)

    async def _restart(self) -> None:
        """Start the ranks again whether anybody needs them or not. Whoever needs them waits."""
        async with self._turns.turn("", ""):
            await self._supervisor.running()

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
        if not self._supervisor.is_alive:
            await self._supervisor.end()
        return self._supervisor.is_alive

    def _lose_models(self) -> None:
        """The ranks have ended."""
        if self._owners:
            log.error("%s: the trainer has ended; its models must be loaded again", self._config.name)
        self._owners.clear()
        self._begun.clear()
        self._worked_s.clear()
        for one in self._passes.values():
            if one.taken_up and not one.finished.done():
                one.finish(ModelLost(f"{one.new.model_id} is no longer loaded: its trainer has ended"))

    async def _command(self, command: Command[R]) -> R:
        return await _to_the_end(self._on_all_or_end(command))

    async def _on_all_or_end(self, command: Command[R]) -> R:
        if not (ranks := self._supervisor.children):
            raise ChildDied(f"{self._config.name}: the trainer has ended")
        try:
            return await self._on_all(command, ranks, self._patience_s)
        except (ChildDied, ChildBroke) as error:
            if self._num_ranks > 1 or isinstance(error, ChildDied):
                log.error("%s: the trainer is ended: %s", self._config.name, error)
                self._apart_until_s = asyncio.get_running_loop().time() + _APART_S
                await self._supervisor.end()
                raise error if isinstance(error, ChildDied) else ChildDied(str(error)) from error
            raise

    async def _on_all(
        self, command: Command[R], ranks: Sequence[Child], patience_s: float, on_loading: OnLoading = ignore_loading
    ) -> R:
        """Rank 0's answer, once every rank has one; `on_loading` gets what each of them tells before. Raises what the
        ranks agree on; ChildDied or ChildBroke as soon as one of them will not answer, or has failed by itself."""
        calls = [
            asyncio.ensure_future(rank.call(command, patience_s, partial(on_loading, rank.name))) for rank in ranks
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
