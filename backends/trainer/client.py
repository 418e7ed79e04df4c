"""Drive the trainer processes of a base model: 1..N ranks, restarted together when any dies or hangs.

Only here does the async server meet sync torch. Commands go to all ranks in order; a fair queue grants the
ranks. A forward_backward waits for a grant before each of its microbatches. Rank 0's answer counts. The
ranks agree on errors (`distributed.agreed`): after any other error they are ended, and their models with them.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tinker_server.api_schemas.training import AdamParams, ForwardBackwardOutput, OptimStepResponse, Trainable
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes import spans
from tinker_server.backends.processes.fair_queue import FairQueue
from tinker_server.backends.processes.launcher import StartRanks, launch_trainer
from tinker_server.backends.processes.rpc import Child, ChildBroke, ChildDied, Command
from tinker_server.backends.processes.spans import OnSpan, ProcessSpan, spans_to
from tinker_server.backends.processes.supervisor import Supervisor, call_all
from tinker_server.backends.protocol import (
    EncodedBatch,
    LoadedModel,
    ModelLost,
    OnLoading,
    ProcessState,
    SavedForm,
    ignore_loading,
)
from tinker_server.backends.tasks import to_the_end
from tinker_server.backends.trainer import commands
from tinker_server.backends.trainer.replicas import Replica, Replicas

log = logging.getLogger(__name__)
R = TypeVar("R")
PATIENCE_S = 60
"""Time for which a rank may be silent beyond the time that it asked for."""
_START_PATIENCE_S = 600
"""The same at start: a new process imports torch and transformers, for more than a minute on a busy machine."""
IDLE_S = 3.0
"""Time without an operation after which an idle trainer starts again, where machines have joined: shorter pauses lie
between the operations of a step."""
_EXCLUSIVE_S = 300.0
"""Time after ranks have ended at work during which models share no microbatch, so that the culprit is known."""


@dataclass(eq=False)
class _Request:
    """A forward_backward in flight."""

    model: LoadedModel
    new: commands.NewRequest
    finished: asyncio.Future[ForwardBackwardOutput]
    on_span: OnSpan | None
    """Called with the spans of its microbatches."""
    admitted: bool = False
    """True once the ranks have it."""

    def finish(self, outcome: ForwardBackwardOutput | Exception) -> None:
        """Set the output or the error."""
        if isinstance(outcome, Exception):
            self.finished.set_exception(outcome)
            self.finished.exception()  # retrieved here, since the caller may be gone
        else:
            self.finished.set_result(outcome)


class TrainerClient:
    """`protocol.Trainer` over child processes, a command at a time."""

    def __init__(
        self, spec: ModelSpec, start_ranks: StartRanks = launch_trainer, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._spec = spec
        self._patience_s = patience_s
        self._replicas = Replicas(spec, start_ranks)
        self._growing: asyncio.Task[None] | None = None
        name = f"{spec.name}: the trainer"
        self._supervisor = Supervisor(name, self._replicas.launch, self._load, restart=self._restart)
        self._models: dict[str, LoadedModel] = {}
        """The models that the ranks hold."""
        self._base: asyncio.Future[LoadCheck] | None = None
        """The base's scores at the first start. An engine may have asked for them before."""
        self._queue = FairQueue()
        """One command runs at a time: all ranks see the same order, time limits count from a command's own beginning,
        and no command meets ranks that are being started."""
        self._exclusive_until_s = 0.0
        """End of the time, by the event loop's clock, during which models share no microbatch."""
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        """The forward_backwards in flight, by number."""
        self._writing: set[asyncio.Future[None]] = set()
        """Snapshots that rank 0 writes."""

    async def start(self, on_loading: OnLoading = ignore_loading) -> None:
        """Load the base on every rank. `on_loading` is called during this start and later starts. Raises
        BackendFailed."""
        await self._supervisor.start(on_loading)

    async def score_base(self) -> LoadCheck:
        """Return how the ranks score a text by the base alone, once they have started."""
        return await asyncio.shield(self._base_scores())

    def _base_scores(self) -> "asyncio.Future[LoadCheck]":
        if self._base is None:
            self._base = asyncio.get_running_loop().create_future()
        return self._base

    async def stop(self) -> None:
        """End every rank."""
        if self._growing is not None:
            self._growing.cancel()
        await self._supervisor.stop()
        await self._end()

    def attach(self, replica: Replica) -> None:
        """Have another machine hold ranks too, from the next start on, which an idle trainer makes soon."""
        self._replicas.add(replica)
        self._grow_later()

    async def detach(self, replica: Replica) -> None:
        """Use a machine no longer, which has left or is lost: the ranks there have ended, and all others end."""
        await self._replicas.remove(replica)

    @property
    def ranks(self) -> str:
        """Number of ranks, and what else of them the last bits of results depend on."""
        return self._replicas.ranks

    def waits_for(self) -> str | None:
        """Implement the protocol."""
        return None if self._supervisor.is_alive else self._replicas.reason()

    async def wait_for_restart(self, seen: int) -> int:
        """Implement the protocol."""
        return await self._supervisor.wait_for_restart(seen)

    def processes(self) -> list[ProcessState]:
        """Return the states of the ranks that were started last."""
        return self._supervisor.processes()

    async def create_model(
        self, model_id: str, lora: Trainable, owner: str, snapshot: Path | None = None
    ) -> LoadedModel:
        """Implement the protocol; starts the ranks if they have died."""
        async with self._queue.grant(owner, model_id):
            await self._revive()
            self._release(model_id)
            made = await to_the_end(self._call_or_end(commands.CreateModel(model_id, lora, snapshot)))
            model = self._models[model_id] = LoadedModel(model_id, owner, *made, next(self._numbers))
            return model

    def restoring(self, model_id: str, owner: str) -> AbstractContextManager[None]:
        """Implement the protocol."""
        return self._queue.prioritize(owner, model_id)

    async def snapshot(self, model: LoadedModel, directory: Path) -> Awaitable[None]:
        """Implement the protocol; rank 0 writes."""
        async with self._queue.grant(model.owner, model.model_id), self._working(model):
            writer = self._supervisor.children[0]
            await to_the_end(self._call_or_end(commands.Snapshot(model.model_id, directory)))
            written = asyncio.ensure_future(writer.call(commands.AwaitSnapshot(directory)))
            self._writing.add(written)
            written.add_done_callback(self._writing.discard)
            return written

    async def delete_model(self, model: LoadedModel) -> None:
        """Implement the protocol."""
        if model.is_lost:
            return
        async with self._queue.grant(model.owner, model.model_id):
            if not self._supervisor.is_alive:
                await self._end()
            if not model.is_lost:
                await to_the_end(self._call_or_end(commands.DeleteModel(model.model_id)))
                self._release(model.model_id)

    async def forward_backward(
        self, model: LoadedModel, batch: EncodedBatch, *, backward: bool
    ) -> ForwardBackwardOutput:
        """Implement the protocol; the batch is decoded and checked on the ranks."""
        new = commands.NewRequest(next(self._numbers), model.model_id, model.owner, batch, backward)
        finished = asyncio.get_running_loop().create_future()
        this = self._requests[new.number] = _Request(model, new, finished, spans.CURRENT.get())
        try:
            while not this.finished.done():
                async with self._queue.grant(model.owner, model.model_id):
                    if not this.finished.done():  # by another's microbatch
                        await self._compute_microbatch(this)
            return this.finished.result()
        finally:
            await self._discard(this)

    async def _compute_microbatch(self, first: "_Request") -> None:
        """Compute a microbatch of this request. Others that wait for a grant may have datums in it."""
        batch_mates: list[_Request] = []
        if self._spec.shares_microbatches and asyncio.get_running_loop().time() > self._exclusive_until_s:
            unfinished = (request for request in self._requests.values() if not request.finished.done())
            waiting = (request for request in unfinished if request is not first and not request.model.is_lost)
            batch_mates = sorted(waiting, key=lambda mate: self._queue.priority(mate.model.owner, mate.model.model_id))
        requests = [first, *batch_mates]
        async with self._working(*(request.model for request in requests)):
            new = tuple(request.new for request in requests if not request.admitted)
            for request in requests:
                request.admitted = True
            command = commands.ComputeMicrobatch(new, tuple(request.new.number for request in requests))
            await to_the_end(self._run_microbatch(command))

    async def _run_microbatch(self, command: commands.ComputeMicrobatch) -> None:
        spans: list[ProcessSpan] = []
        members = {command.order[0]}
        try:
            with spans_to(spans.append):
                computed = await self._call_or_end(command)
            members = {*computed.members, *dict(computed.finished)}
        finally:
            self._emit(spans, members)
        for number, outcome in computed.finished:
            if (request := self._requests.get(number)) is not None and not request.finished.done():
                request.finish(outcome)

    def _emit(self, spans: list[ProcessSpan], numbers: set[int]) -> None:
        """Emit the spans of a microbatch to all whose datums were in it, not just to the request that has the grant."""
        for number in numbers & self._requests.keys():
            if (on_span := self._requests[number].on_span) is not None:
                for span in spans:
                    on_span(span)

    async def _discard(self, this: "_Request") -> None:
        """Forget a request, which is cancelled on the ranks if it was abandoned."""
        del self._requests[this.new.number]
        if this.admitted and not this.finished.done() and not this.model.is_lost:
            async with self._queue.grant(this.model.owner, this.model.model_id):
                if self._supervisor.is_alive:
                    await to_the_end(self._call_or_end(commands.CancelRequests((this.new.number,))))
                else:
                    await self._end()

    async def mark_incomplete(self, model: LoadedModel) -> None:
        """Implement the protocol."""
        await self._run(model, commands.MarkIncomplete(model.model_id))

    async def optim_step(self, model: LoadedModel, adam: AdamParams) -> OptimStepResponse:
        """Implement the protocol."""
        return await self._run(model, commands.OptimStep(model.model_id, adam))

    async def save(self, model: LoadedModel, directory: Path, form: SavedForm) -> None:
        """Implement the protocol."""
        await self._run(model, commands.Save(model.model_id, directory, form))

    async def load_state(self, model: LoadedModel, directory: Path, *, with_optimizer: bool) -> None:
        """Implement the protocol."""
        loading = commands.LoadState(model.model_id, directory, with_optimizer)
        made = await self._run(model, loading)
        model.size_bytes, model.layout = made

    async def _load(self, ranks: list[Child]) -> None:
        starts = [commands.Start(spec) for spec in self._replicas.specs()]
        scores = await call_all(ranks, starts, _START_PATIENCE_S, self._supervisor.on_loading, agreed=False)
        if (first := self._base_scores()).done():
            for difference in first.result().require_same_base(scores, self._spec, "the trainer, started again,"):
                log.info("%s", difference)
        else:
            first.set_result(scores)
        self._replicas.has_started()
        if self._replicas.unused:
            self._grow_later()

    def _grow_later(self) -> None:
        if self._growing is None or self._growing.done():
            name = f"{self._spec.name}: a larger trainer"
            self._growing = asyncio.create_task(self._grow(), name=name, context=Context())

    async def _grow(self) -> None:
        """Start the ranks again, with machines that are there and not used, once nothing has been asked for a while."""
        while self._replicas.unused:
            await asyncio.sleep(IDLE_S / 2)
            if self._queue.idle_s < IDLE_S or not self._replicas.can_grow():
                continue
            async with self._queue.grant("", ""):
                await asyncio.gather(*self._writing, return_exceptions=True)
                await self._end()
                await self._supervisor.running()

    async def _restart(self) -> None:
        """Start the ranks again, even if no request needs them. Requests that do wait for the grant."""
        async with self._queue.grant("", ""):
            await self._revive()

    async def _revive(self) -> None:
        if not self._supervisor.is_alive:
            await self._end()
            await self._supervisor.running()

    def _release(self, model_id: str) -> None:
        if (model := self._models.pop(model_id, None)) is not None:
            model.is_lost = True

    @contextlib.asynccontextmanager
    async def _working(self, model: LoadedModel, *batch_mates: LoadedModel) -> AsyncIterator[None]:
        """Count the block as work for these models. Raise ModelLost if `model` is lost. If a rank has died since the
        last command, end all of them first."""
        if not self._supervisor.is_alive:
            await self._end()
        if model.is_lost:
            raise ModelLost(
                f"{model.model_id} is no longer loaded: create it again, from a checkpoint to go on where it was"
            )
        models, began = {model, *batch_mates}, time.monotonic()
        for worked in models:
            worked.latest_work = next(self._numbers)
        try:
            yield
        finally:
            for worked in models:
                worked.worked_s += time.monotonic() - began

    async def _run(self, model: LoadedModel, command: Command[R]) -> R:
        async with self._queue.grant(model.owner, model.model_id), self._working(model):
            return await to_the_end(self._call_or_end(command))

    async def _end(self) -> None:
        if self._models:
            log.error("%s: trainer ended; its models must be restored", self._spec.name)
        for model_id in list(self._models):
            self._release(model_id)
        for request in self._requests.values():
            if request.admitted and not request.finished.done():
                request.finish(ModelLost(f"{request.model.model_id} is no longer loaded: its trainer has ended"))
        await self._supervisor.end()

    async def _call_or_end(self, command: Command[R]) -> R:
        """Have the ranks do a command. If they do not agree on how it ended, end them."""
        if not (ranks := self._supervisor.children):
            raise ChildDied(f"{self._spec.name}: the trainer has ended")
        try:
            return await call_all(ranks, [command] * len(ranks), self._patience_s)
        except (ChildDied, ChildBroke) as error:
            if len(ranks) == 1 and not isinstance(error, ChildDied):
                raise
            log.error("%s: ending the trainer: %s", self._spec.name, error)
            if machine := await self._replicas.wait_for_end():  # by no fault of the operation, or not for sure
                await self._end()
                raise ModelLost(f"the trainer has ended with its ranks on {machine}") from error
            self._exclusive_until_s = asyncio.get_running_loop().time() + _EXCLUSIVE_S
            await self._end()
            raise error if isinstance(error, ChildDied) else ChildDied(str(error)) from error
