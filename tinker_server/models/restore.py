"""A model made again: its snapshot, or a fresh model, and on it the log of what was done since, in order.

Results were given the first time, so nothing is stored or counted here. What failed the first time is not tried again:
it leaves in the gradient what it left there then. Operations that change nothing, such as saves, are passed over.
"""

import logging
import time
from collections.abc import Mapping

from api_schemas.training import AdamParams, OptimStepRequest
from api_schemas.weights import LoadWeightsRequest
from backends.protocol import EncodedBatch, InvalidInput, Trainer
from tinker_server.errors import LostModel
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.directories import Storage
from tinker_server.store.futures.replay_log import Entry
from tinker_server.store.futures.store import FutureStore
from tinker_server.store.records import TrainingRun

log = logging.getLogger(__name__)


class Recovery:
    """Reads snapshots and logs; changes neither."""

    def __init__(self, futures: FutureStore, checkpoints: CheckpointStore, storage: Storage) -> None:
        self._futures = futures
        self._checkpoints = checkpoints
        self._storage = storage

    async def restore(self, run: TrainingRun, trainer: Trainer, numerics: Mapping[str, str]) -> float:
        """Make the model as it was after its last operation; the seconds that its log took.

        Raises LostModel where that cannot be, and what the trainer raises where it fails.
        """
        _say_what_changed(run, numerics)
        if run.snapshot is None:
            await trainer.create_model(run.model_id, run.trainable, run.owner)
        elif self._storage.holds(run.snapshot):
            await trainer.resume(run.model_id, run.trainable, run.owner, self._storage.path(run.snapshot))
        else:
            raise LostModel(f"model {run.model_id}: its snapshot was deleted; create it again from a checkpoint")
        began, count = time.monotonic(), 0
        async for entry in self._futures.logged(run.model_id):
            await self._run_again(entry, run.model_id, trainer)
            count += 1
        log.info("model %s is restored; %d operations were run again", run.model_id, count)
        return time.monotonic() - began

    async def _run_again(self, entry: Entry, model_id: str, trainer: Trainer) -> None:
        if entry.failure_category is not None:
            await self._fail_again(entry, model_id, trainer)
            return
        body = await self._futures.rows.body(entry.request_id)
        try:
            match entry.operation_kind:
                case "forward_backward":
                    await trainer.forward_backward(model_id, EncodedBatch(body, entry.content_type), backward=True)
                case "optim_step":
                    request = OptimStepRequest.model_validate_json(body)
                    await trainer.optim_step(model_id, request.adam_params or AdamParams())
                case "load_weights":
                    await self._load(LoadWeightsRequest.model_validate_json(body), model_id, trainer)
                case kind:
                    raise AssertionError(f"{kind} is not logged")
        except InvalidInput as error:
            raise LostModel(
                f"model {model_id} cannot be restored: its {entry.operation_kind} {entry.seq_id} fails now, and did not"
                f" when it was first run ({error}); create it again from a checkpoint"
            ) from error

    async def _fail_again(self, entry: Entry, model_id: str, trainer: Trainer) -> None:
        """A forward_backward left a part of the gradient missing. A step that its user is to blame for cleared the
        gradient, and any other left one that must not be applied."""
        await trainer.mark_incomplete(model_id)
        if entry.operation_kind == "optim_step" and entry.failure_category == "user":
            try:
                await trainer.optim_step(model_id, AdamParams())
            except InvalidInput:
                return
            raise AssertionError("a step was taken on an incomplete gradient")

    async def _load(self, request: LoadWeightsRequest, model_id: str, trainer: Trainer) -> None:
        checkpoint = await self._checkpoints.find(parse_path(request.path))
        if checkpoint is None:
            raise InvalidInput(f"{request.path} was deleted")
        directory = self._storage.path(checkpoint.directory)
        await trainer.load_state(model_id, directory, with_optimizer=request.optimizer)


def _say_what_changed(run: TrainingRun, numerics: Mapping[str, str]) -> None:
    before = run.computed_with or numerics
    changed = [
        f"{name} was {before.get(name)}, is {value}" for name, value in numerics.items() if before.get(name) != value
    ]
    if changed:
        log.warning("model %s goes on, and may differ in the last bits: %s", run.model_id, "; ".join(changed))
