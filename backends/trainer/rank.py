"""The trainer on one rank: models on one base. One object of this class per rank, synchronous torch only.

All ranks run the same commands with the same arguments. They agree on every error that one of them finds
(`distributed.agreed`), so that no rank waits for another that has given up, and none goes on alone.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from api_schemas.training import AdamParams, ForwardBackwardInput, OptimStepResponse, Trainable
from backends.model_spec import ModelSpec
from backends.processes.progress import Progress
from backends.protocol import BackendFailed, EncodedBatch, InvalidInput, ModelLost
from backends.trainer.base_model import BaseModel
from backends.trainer.commands import ComputedMicrobatch, FinishedRequest, NewRequest
from backends.trainer.distributed import World, agreed, agreed_each, decoding_s, files_s, gather_objects, network_s
from backends.trainer.model.recompute import Memory
from backends.trainer.step.batch_request import BatchRequest, choose_microbatches, lengths, plan_batch
from backends.trainer.step.packed_microbatch import MicrobatchRunner
from backends.trainer.step.validation import check_forward_backward, decode_batch, published
from backends.trainer.trained_weights import TrainedModel

_UNLIMITED = sys.maxsize
"""Tokens of a microbatch, if nothing is known of memory."""
_STATE_PARTS = 4
"""Weights, two moments and a gradient: a model's files hold at most this many times its weights."""


class TrainerRank:
    """Loads the base and does what `protocol.Trainer` says, on one rank of `world`."""

    def __init__(
        self,
        config: ModelSpec,
        world: World,
        keep_waiting: Callable[[float], None] = lambda seconds: None,
        progress: Progress | None = None,
    ) -> None:
        """`keep_waiting` is called with the seconds that the next piece of work may take; `progress` follows
        loading."""
        assert world.num_slices == config.mesh.context, "the ranks are grouped as the mesh says"
        self._config = config
        self._world = world
        self._keep_waiting = keep_waiting
        self.base = BaseModel(config, world, progress or Progress())
        self._runner = MicrobatchRunner(self.base, world, keep_waiting)
        self._max_tokens = world.num_slices * config.max_tokens_per_microbatch if self.base.packs else 1
        self._fitting_tokens = _UNLIMITED
        """Tokens of a microbatch with a gradient that fits into every rank's memory, as last measured."""
        self.models: dict[str, TrainedModel] = {}
        self._requests: dict[int, BatchRequest] = {}
        """The forward_backwards in flight, by number."""

    # ---- models

    def create_model(self, model_id: str, lora: Trainable, snapshot: Path | None = None) -> int:
        """Create a model, afresh or from its snapshot, and return the bytes of this rank's device that it takes while
        it trains. If it raises, nothing of the model is left on any rank."""
        self.delete_model(model_id)
        self.models[model_id] = model = agreed(lambda: self._new_model(lora), self._world)
        if snapshot is not None:
            try:
                self.base.files.load_snapshot(self._about_to_move(model_id), snapshot)
            except BaseException:
                self.delete_model(model_id)
                raise
        return model.training_bytes

    def _new_model(self, lora: Trainable) -> TrainedModel:
        """Create a model, if need be in the memory of graphs."""
        with suppress(torch.OutOfMemoryError):
            return cast(TrainedModel, self.base.weights.create(lora))
        self.base.release_graphs()
        return cast(TrainedModel, self.base.weights.create(lora))

    def delete_model(self, model_id: str) -> None:
        """Delete a model if it is held, with its requests."""
        model = self.models.pop(model_id, None)
        self._requests = {number: one for number, one in self._requests.items() if one.model is not model}

    def _model(self, model_id: str) -> TrainedModel:
        if model_id not in self.models:
            raise ModelLost(f"{model_id} is not loaded")
        return self.models[model_id]

    # ---- training

    def compute_microbatch(self, new: Sequence[NewRequest], order: Sequence[int]) -> ComputedMicrobatch:
        """Admit `new` forward_backwards, then compute one microbatch: of the first in `order`, filled up with the
        others as far as there is room. The gradient of those that fail is then incomplete.
        """
        failures = self._admit(new)
        for number in order:
            if number not in self._requests and number not in failures:
                failures[number] = BackendFailed("this forward_backward is not under way")
        requests = [self._requests[number] for number in order if number in self._requests]
        computed: tuple[int, ...] = ()
        if requests:
            most = min(self._max_tokens, self._fitting_tokens)
            chosen = choose_microbatches(requests, self._world.num_microbatches, most)
            computed = tuple({one.number for members in chosen for one in members})
            failures |= {one.number: error for one, error in self._runner.compute(chosen).items()}
        self.cancel_requests(list(failures))
        finished: list[FinishedRequest] = list(failures.items())
        done = [one for one in requests if one.is_done and one.number not in failures]
        # Ranks that compute one microbatch have the same results.
        everyones = gather_objects([one.share for one in done], self._world)[:: self._world.num_slices] if done else []
        for one, *shares in zip(done, *everyones, strict=True):
            del self._requests[one.number]
            if one.backward and one.model.gradient == "none":
                one.model.gradient = "whole"
            if self._world.rank == 0:
                finished.append((one.number, one.output(shares)))
        if not self._requests:
            self.base.renderer.cancel_prefetch()
        return ComputedMicrobatch(finished, computed)

    def _admit(self, new: Sequence[NewRequest]) -> dict[int, Exception]:
        """Decode and check new requests; return those that fail."""
        failures: dict[int, Exception] = {
            one.number: ModelLost(f"{one.model_id} is not loaded") for one in new if one.model_id not in self.models
        }
        known = [one for one in new if one.number not in failures]
        self._keep_waiting(sum(decoding_s(len(one.batch.body)) for one in known))
        inputs, errors = agreed_each({one.number: partial(self._checked, one.batch) for one in known}, self._world)
        if self.base.memory is not None:
            self.base.memory.models_bytes = self._missing_bytes(known)
            self._fitting_tokens = self._count_fitting(self.base.memory)
            asked_for = (inputs[one.number][1] for one in known if one.backward and one.number in inputs)
            if max(chain.from_iterable(map(lengths, asked_for)), default=0) > self._fitting_tokens:
                self.base.release_graphs()
                self._fitting_tokens = self._count_fitting(self.base.memory)
        for one in known:
            model = self.models[one.model_id]
            try:
                if one.number in errors:
                    raise errors[one.number]
                longest = self._fitting_tokens if one.backward else _UNLIMITED
                asked, loss_input = inputs[one.number]
                plan = plan_batch(loss_input, self._world.num_microbatches, self._max_tokens, longest)
                self._requests[one.number] = BatchRequest(one, model, loss_input, plan)
                if asked != loss_input.loss_fn:
                    self._requests[one.number].note = f"{asked}_as_{loss_input.loss_fn}:max"
            except (InvalidInput, BackendFailed) as error:
                failures[one.number] = error.with_traceback(None)  # which holds this frame
                if one.backward:
                    model.gradient = "incomplete"
        return failures

    def _count_fitting(self, memory: Memory) -> int:
        """Return the tokens of the largest microbatch with a gradient that fits into every rank's memory now."""
        return self._world.num_slices * min(gather_objects(memory.fitting_tokens, self._world))

    def _missing_bytes(self, new: Sequence[NewRequest]) -> int:
        """Return the memory in bytes that the models in training will still take on this rank. Others, which may only
        score, take none."""
        training = {one.model_id for one in new if one.backward}
        training |= {one.model_id for one in self._requests.values() if one.backward}
        return sum(one.missing_bytes for name, one in self.models.items() if name in training or one.gradient != "none")

    def cancel_requests(self, numbers: Sequence[int]) -> None:
        """Compute nothing more of these requests; their gradients are incomplete."""
        for number in numbers:
            one = self._requests.pop(number, None)
            if one is not None and one.backward:
                one.model.gradient = "incomplete"

    def _checked(self, batch: EncodedBatch) -> tuple[str, ForwardBackwardInput]:
        """Return the loss that was asked for, and the input to compute."""
        sent = decode_batch(batch)
        loss_input = published(sent, self._config.stable_reinforce)
        check_forward_backward(self.base.renderer, loss_input, self._config.max_context_length)
        return sent.loss_fn, loss_input

    def mark_incomplete(self, model_id: str) -> None:
        """Mark the gradient as incomplete: a forward_backward of this model will never run."""
        self._model(model_id).gradient = "incomplete"

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """Take one step of torch.optim.AdamW on the summed gradient, which is cleared whatever happens. If it fails,
        weights and optimizer are as they were."""
        model = self._model(model_id)
        if model.gradient == "none":
            raise InvalidInput("there is no gradient: no forward_backward since the last optim_step")
        if self._world.num_machines > 1:
            self._keep_waiting(network_s(model.size_bytes))
        try:
            if model.gradient == "incomplete":
                raise InvalidInput(
                    "a forward_backward since the last optim_step failed, so the gradient is incomplete;"
                    " it was cleared and the weights are unchanged"
                )
            return self._step(model, adam)
        finally:
            model.clear_gradient()

    def _step(self, model: TrainedModel, adam: AdamParams) -> OptimStepResponse:
        norm = model.sum_gradient()
        if not norm.isfinite():
            raise InvalidInput("the gradient is not finite; it was cleared and the weights are unchanged")
        take_step = model.prepare_step(adam, norm)
        try:
            take_step()
        except Exception as error:
            # There is no copy of what it was: the process ends, and the model is restored from disk.
            raise SystemExit(f"a step that had been found possible failed: {error}") from error
        return OptimStepResponse(metrics={"grad_norm": norm.item()})

    # ---- weights

    def save_state(self, model_id: str, directory: Path) -> None:
        """Save weights and optimizer."""
        self.base.files.save_state(self._about_to_move(model_id), directory)

    def save_sampler_weights(self, model_id: str, directory: Path, for_elsewhere: bool) -> None:
        """Save the adapter alone, or the whole model."""
        model = self._about_to_move(model_id)
        load_check = self.base.score_load_check(model, model_id)
        self.base.files.save_sampler_weights(model, directory, load_check, for_elsewhere=for_elsewhere)

    def load_state(self, model_id: str, directory: Path, with_optimizer: bool) -> None:
        """Load a saved state. If it raises, the model is as it was."""
        self.base.files.load_state(self._about_to_move(model_id), directory, with_optimizer=with_optimizer)

    def snapshot(self, model_id: str, directory: Path) -> None:
        """Copy everything; a thread of rank 0 writes the copy, until `snapshot_written` is done."""
        self.base.files.begin_snapshot(self._about_to_move(model_id), directory)

    def snapshot_written(self, directory: Path) -> Future[None]:
        """Return a future that is done when a snapshot that this rank has begun is on disk."""
        return self.base.snapshots.written(directory)

    def _about_to_move(self, model_id: str) -> TrainedModel:
        """Return a model whose files are about to be read or written."""
        model = self._model(model_id)
        self._keep_waiting(_STATE_PARTS * files_s(model.size_bytes))
        return model
