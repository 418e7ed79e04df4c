"""Restores a model: its snapshot, or a fresh model, and the operations of its log run again on it, in order.

A restoration goes before all new work on its trainer. `on_replayed` may take a snapshot between two operations, so that
a second interruption costs no more than what came after that.

Results were given the first time, so nothing is stored or counted here. An operation that failed the first time is not
run again: the gradient is left as it was left then. Operations that change nothing, such as saves, are not logged.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from tinker_server.api_schemas.training import AdamParams, OptimStepRequest
from tinker_server.api_schemas.weights import LoadWeightsRequest
from tinker_server.backends.protocol import EncodedBatch, InvalidInput, LoadedModel, Trainer
from tinker_server.errors import LostModel
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.directories import Storage
from tinker_server.store.futures.replay_log import Entry
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import TrainingRun
from tinker_server.weights.lookup import loadable_directory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replayed:
    """An operation of a log, run again."""

    position: int
    size_bytes: int
    """Bytes of its request; 0 where the request is not needed again."""
    seconds: float
    needs_weights: bool
    """True if it reads saved weights, which may be deleted."""


OnReplayed = Callable[[Replayed], Awaitable[None]]
"""Called after each operation and before the next. The model is as it was after that operation."""


class LogReplay:
    """Reads snapshots and logs, and changes neither."""

    def __init__(self, futures: FutureStore, checkpoints: CheckpointStore, storage: Storage) -> None:
        self._futures = futures
        self._checkpoints = checkpoints
        self._storage = storage

    async def load(self, run: TrainingRun, trainer: Trainer) -> LoadedModel:
        """Load the model's snapshot, or make it afresh where it has none. Raises LostModel if the snapshot is gone, and
        whatever the trainer raises."""
        if run.snapshot is not None and not self._storage.holds(run.snapshot):
            raise LostModel(f"model {run.model_id}: its snapshot was deleted; create it again from a checkpoint")
        snapshot = None if run.snapshot is None else self._storage.path(run.snapshot)
        return await trainer.create_model(run.model_id, run.trainable, run.owner, snapshot)

    async def run_again(self, trainer: Trainer, model: LoadedModel, on_replayed: OnReplayed) -> None:
        """Run the operations of the log on the model as `load` left it. Raises LostModel where that is impossible, and
        whatever the trainer raises."""
        count = 0
        async for entry in self._futures.read_log(model.model_id):
            began = time.monotonic()
            size_bytes = await self._run_entry(entry, trainer, model)
            needs_weights = entry.operation_kind == "load_weights"
            await on_replayed(Replayed(entry.position, size_bytes, time.monotonic() - began, needs_weights))
            count += 1
        log.info("restored model %s: replayed %d operations", model.model_id, count)

    async def _run_entry(self, entry: Entry, trainer: Trainer, model: LoadedModel) -> int:
        """Return the request's size in bytes."""
        if entry.failure_category is not None:
            await self._fail_again(entry, trainer, model)
            return 0
        body = await self._futures.rows.body(entry.request_id)
        try:
            match entry.operation_kind:
                case "forward_backward":
                    await trainer.forward_backward(model, EncodedBatch(body, entry.content_type), backward=True)
                case "optim_step":
                    request = OptimStepRequest.model_validate_json(body)
                    await trainer.optim_step(model, request.adam_params or AdamParams())
                case "load_weights":
                    loading = LoadWeightsRequest.model_validate_json(body)
                    await self._load_weights(loading, entry.loaded_directory, trainer, model)
                case kind:
                    raise AssertionError(f"{kind} is not logged")
        except (InvalidInput, ValidationError) as error:
            raise LostModel(
                f"model {model.model_id} cannot be restored: its {entry.operation_kind} {entry.seq_id} fails now, and"
                f" did not when it was first run ({error}); create it again from a checkpoint"
            ) from error
        return len(body)

    async def _fail_again(self, entry: Entry, trainer: Trainer, model: LoadedModel) -> None:
        """Leave the gradient as the failure left it: incomplete after a forward_backward, cleared after an optim_step
        that failed by its user's fault, and not to be applied after any other failed optim_step."""
        await trainer.mark_incomplete(model)
        if entry.operation_kind == "optim_step" and entry.failure_category == "user":
            try:
                await trainer.optim_step(model, AdamParams())
            except InvalidInput:
                return
            raise AssertionError("a step was taken on an incomplete gradient")

    async def _load_weights(
        self, request: LoadWeightsRequest, read_first: str | None, trainer: Trainer, model: LoadedModel
    ) -> None:
        checkpoint = await self._checkpoints.find(parse_path(request.path))
        if checkpoint is None:
            raise InvalidInput(f"{request.path} was deleted")
        if checkpoint.directory != read_first:  # a model of other weights would go on as if nothing were
            raise InvalidInput(f"{request.path} was saved anew, or read before directories were recorded")
        directory = self._storage.path(loadable_directory(checkpoint, self._storage))
        await trainer.load_state(model, directory, with_optimizer=request.optimizer)


def log_changed_numerics(run: TrainingRun, numerics: Mapping[str, str]) -> None:
    """Warn where settings and versions of libraries have changed since the run was made."""
    before = run.computed_with or numerics
    changed = [
        f"{name} was {before.get(name)}, is {numerics.get(name)}"
        for name in {**before, **numerics}
        if before.get(name) != numerics.get(name)
    ]
    if changed:
        log.warning("model %s: results may differ in the last bits from before: %s", run.model_id, "; ".join(changed))
