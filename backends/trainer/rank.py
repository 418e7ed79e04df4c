"""The trainer on a rank: models on a base. An object of this class per rank, synchronous torch only.

All ranks run the same commands with the same arguments. They agree on every error that any of them finds
(`distributed.agreed`), so that no rank waits for another that has given up, and no rank goes on alone.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from tinker_server.api_schemas.training import AdamParams, OptimStepResponse, Trainable
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.heap import free_main_bytes
from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.protocol import BackendFailed, InvalidInput, ModelLost
from tinker_server.backends.trainer.base_model import BaseModel
from tinker_server.backends.trainer.commands import ComputedMicrobatch, FinishedRequest, Made, NewRequest
from tinker_server.backends.trainer.distributed import (
    World,
    agreed,
    agreed_each,
    decoding_s,
    files_s,
    gather_objects,
    network_s,
)
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model.recompute import GIB
from tinker_server.backends.trainer.model.shared_prefixes import Prefixes
from tinker_server.backends.trainer.step.batch_request import (
    BatchRequest,
    CheckedBatch,
    agree_on_prefixes,
    choose_microbatches,
    find_prefixes,
    plan_batch,
)
from tinker_server.backends.trainer.step.decoding import decode_batch
from tinker_server.backends.trainer.step.step import TrainingStep
from tinker_server.backends.trainer.step.validation import check_forward_backward, replace_stable_reinforce

log = logging.getLogger(__name__)
_UNLIMITED = sys.maxsize
"""Tokens of a microbatch, if nothing is known of memory."""
_STATE_PARTS = 4
"""Weights, two moments and a gradient: a model's files hold at most this many times its weights."""


class TrainerRank:
    """Loads the base and does what `protocol.Trainer` says, on a rank of `world`."""

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
        self._training_step = TrainingStep(self.base, world, keep_waiting)
        self._max_tokens = world.num_slices * config.max_tokens_per_microbatch if self.base.packs else 1
        self._fitting_tokens = _UNLIMITED
        """Tokens of a microbatch with a gradient that fits into every rank's memory, as last measured."""
        self.models: dict[str, LoraModel] = {}
        self._by_use: dict[LoraModel, None] = {}
        """All of them, the least recently used first."""
        self._offloaded: set[LoraModel] = set()
        """Models offloaded to host memory."""
        self._requests: dict[int, BatchRequest] = {}
        """The forward_backwards in flight, by number."""

    # ---- models

    def create_model(self, model_id: str, lora: Trainable, snapshot: Path | None = None) -> Made:
        """Create a model, afresh or from its snapshot, and return its layout and the bytes of this rank's device that
        it takes while it trains. If it raises, nothing of the model is left on any rank."""
        self.delete_model(model_id)
        if snapshot is not None:
            lora = self.base.files.with_layout_in(lora, snapshot)  # of weights that were loaded into it
        model = self._new_planned(lora)
        self.models[model_id] = model
        self._note_use(model)
        if snapshot is not None:
            try:
                self.base.files.load_snapshot(self._about_to_move(model_id), snapshot)
            except BaseException:
                self.delete_model(model_id)
                raise
        return Made(model.training_bytes, model.config.layout)

    def _new_planned(self, lora: Trainable) -> LoraModel:
        """Create a model. Raises BackendFailed if it is of a layout that memory is not planned for, and could not be
        trained, not even alone. All ranks fail, or none."""
        model = agreed(lambda: self._new_model(lora), self._world)
        planned = self._config.lora_layout
        if lora.layout != planned and self._reserve_and_count(model, alone=True) == 0:
            raise BackendFailed(
                f"a model of rank {lora.rank} and of the LoRA layout {lora.layout} takes"
                f" {model.training_bytes / GIB:.1f} GiB in training, for which the GPU has no room beside the base:"
                f" memory is planned for the layout {planned}"
                f" (setting backend.lora_layout); take that layout or a smaller rank, or set it to {lora.layout}"
            )
        return model

    def _new_model(self, lora: Trainable) -> LoraModel:
        """Create a model, if need be in the memory of graphs and of other models. Raises OutOfMemoryError."""
        ways = self._ways_to_room()
        while True:
            made: LoraModel | Exception
            try:
                made = self.base.weights.create(lora, self._keep_waiting)
            except Exception as error:  # noqa: BLE001 - the others wait for what became of it
                made = error.with_traceback(None)  # which holds what was made of it
            lacks_room = isinstance(made, torch.OutOfMemoryError)
            if any(gather_objects(lacks_room, self._world)) and ways:
                del made
                ways.pop(0)()
            elif isinstance(made, Exception):
                raise made
            else:
                return made

    def delete_model(self, model_id: str) -> None:
        """Delete a model if it is held, with its requests."""
        model = self.models.pop(model_id, None)
        self._requests = {number: request for number, request in self._requests.items() if request.model is not model}
        if model is not None:
            self._offloaded.discard(model)
            self._by_use.pop(model, None)

    def _model(self, model_id: str) -> LoraModel:
        if model_id not in self.models:
            raise ModelLost(f"{model_id} is not loaded")
        return self.models[model_id]

    def _model_on_device(self, model_id: str) -> LoraModel:
        """Return a model that is about to be used, from the main memory if it was offloaded."""
        model = self._model(model_id)
        self._note_use(model)
        if model in self._offloaded:
            self._bring_back(model, 1)
        return model

    def _note_use(self, model: LoraModel) -> None:
        self._by_use.pop(model, None)
        self._by_use[model] = None

    # ---- memory

    def _ways_to_room(self, besides: LoraModel | None = None) -> list[Callable[[], None]]:
        """Return what frees memory of the device, in the order in which it is to be done: graphs are released, then
        models offloaded, those without requests first, of these the least recently used."""
        busy = {request.model for request in self._requests.values()}
        others = sorted(self._others_on_device(besides), key=busy.__contains__)
        return [self.base.release_graphs, *(partial(self._offload, other) for other in others)]

    def _others_on_device(self, besides: LoraModel | None) -> list[LoraModel]:
        """Return the other models that are not offloaded, the least recently used first."""
        return [model for model in self._by_use if model is not besides and model not in self._offloaded]

    def _offload(self, model: LoraModel) -> None:
        """Move a model to the main memory, if there is room for it on all machines."""
        needed = 2 * self._world.machine.size * model.training_bytes
        if not all(gather_objects(free_main_bytes() > needed, self._world)):
            return
        self._keep_waiting(files_s(model.size_bytes))
        log.info("offloading a model of %.1f GiB to host memory", model.training_bytes / GIB)
        self._offloaded.add(model)  # first: if a part of it cannot move, it comes back as a whole
        model.move(torch.device("cpu"))

    def _bring_back(self, model: LoraModel, num_tokens: int) -> int:
        """Have a model on the device, if possible with room for its microbatch of so many tokens. Return the tokens of
        the largest that fits. All ranks fail, or none. Raises BackendFailed if none fits."""
        ways = self._ways_to_room(model)
        while (fitting := self._reserve_and_count(model)) < num_tokens and ways:
            ways.pop(0)()
        if fitting == 0:
            raise BackendFailed("the GPU's memory is full, and the main memory has no room for the models that wait")
        if model in self._offloaded:
            self._keep_waiting(files_s(model.size_bytes))
            agreed(lambda: model.move(self._world.device), self._world)
            self._offloaded.remove(model)
        return fitting

    def _reserve_and_count(self, model: LoraModel, *, alone: bool = False) -> int:
        """Reserve memory for what models will still take, and return the tokens of the largest microbatch of a model
        with a gradient that then fits into every rank's memory: as it is now, or with `alone` if all other models are
        offloaded and graphs released."""
        memory = self.base.memory
        if memory is None:
            return _UNLIMITED
        busy = {request.model for request in self._requests.values() if request.backward}
        others = self._others_on_device(model)
        growing = sum(other.missing_bytes for other in others if other in busy or other.gradient != "none")
        memory.models_bytes = growing + (model.training_bytes if model in self._offloaded else model.missing_bytes)
        held = sum(other.training_bytes - other.missing_bytes for other in others)
        found = memory.fitting_tokens(memory.graphs_bytes + growing + held if alone else 0)
        return self._world.num_slices * min(gather_objects(found, self._world))

    # ---- training

    def compute_microbatch(self, new: Sequence[NewRequest], order: Sequence[int]) -> ComputedMicrobatch:
        """Admit `new` forward_backwards, then compute a microbatch: of the first in `order`, filled up with the
        others as far as there is room. The gradient of those that fail is then incomplete.
        """
        failures = self._admit(new)
        for number in order:
            if number not in self._requests and number not in failures:
                failures[number] = BackendFailed("this forward_backward is not under way")
        requests = [self._requests[number] for number in order if number in self._requests]
        computed: tuple[int, ...] = ()
        if requests and requests[0].backward:
            failures |= self._have_room(requests[0])
        # Models that were offloaded have their turn when their request is the first.
        fitting = [request for request in requests if not (request.backward and request.model in self._offloaded)]
        if fitting and requests[0].number not in failures:
            most = min(self._max_tokens, self._fitting_tokens)
            chosen = choose_microbatches(fitting, most, self._config.summed_lora_rank)
            computed = tuple({member.number for members in chosen for member in members})
            failures |= {request.number: error for request, error in self._training_step.compute(chosen).items()}
            if self.base.whole_below is None:
                for request in self._requests.values():
                    request.compute_whole(self._world.num_microbatches, most)
        self.cancel_requests(list(failures))
        finished: list[FinishedRequest] = list(failures.items())
        done = [request for request in requests if not request.left and request.number not in failures]
        # Ranks that compute the same microbatch have the same results.
        everyones = (
            gather_objects([request.share for request in done], self._world)[:: self._world.num_slices] if done else []
        )
        for request, *shares in zip(done, *everyones, strict=True):
            del self._requests[request.number]
            if request.backward and request.model.gradient == "none":
                request.model.gradient = "whole"
            if self._world.rank == 0:
                finished.append((request.number, request.output(shares)))
        if not self._requests:
            self.base.renderer.prefetcher.cancel()
        return ComputedMicrobatch(finished, computed)

    def _admit(self, new: Sequence[NewRequest]) -> dict[int, Exception]:
        """Decode and check new requests; return those that fail."""
        failures: dict[int, Exception] = {
            request.number: ModelLost(f"{request.model_id} is not loaded")
            for request in new
            if request.model_id not in self.models
        }
        known = [request for request in new if request.number not in failures]
        self._keep_waiting(sum(decoding_s(len(request.batch.body)) for request in known))
        batches, errors = agreed_each({request.number: partial(self._check, request) for request in known}, self._world)
        if self.base.router_replay is not None:
            batches = agree_on_prefixes(batches, self._world)
        for request in known:
            model = self.models[request.model_id]
            self._note_use(model)
            try:
                if request.number in errors:
                    raise errors[request.number]
                batch = batches[request.number]
                fitting = self._reserve_and_count(model) if request.backward else _UNLIMITED
                if fitting < max(batch.lengths):
                    fitting = self._reserve_and_count(model, alone=True)
                plan = plan_batch(batch, self._world.num_microbatches, self._max_tokens, fitting)
                self._requests[request.number] = BatchRequest(request, model, batch, plan)
            except (InvalidInput, BackendFailed) as error:
                failures[request.number] = error.with_traceback(None)  # which holds this frame
                if request.backward:
                    model.gradient = "incomplete"
        return failures

    def _have_room(self, request: BatchRequest) -> dict[int, Exception]:
        """Make room for a request's next microbatch. Return its failure, by its number."""
        most = max(map(request.num_tokens, request.next_parts), default=1)
        try:
            self._fitting_tokens = self._bring_back(request.model, most)
        except BackendFailed as error:
            return {request.number: error}
        return {}

    def cancel_requests(self, numbers: Sequence[int]) -> None:
        """Compute nothing more of these requests; their gradients are incomplete."""
        for number in numbers:
            request = self._requests.pop(number, None)
            if request is not None and request.backward:
                request.model.gradient = "incomplete"

    def _check(self, new: NewRequest) -> CheckedBatch:
        """Decode and check a batch. Raises InvalidInput."""
        sent = decode_batch(new.batch)
        loss_input = replace_stable_reinforce(sent, self._config.stable_reinforce)
        layouts = check_forward_backward(self.base.renderer, loss_input, self._config.max_context_length)
        prefixes, whole_below = None, self.base.whole_below
        if whole_below is not None and len(layouts) > 1:
            base = self.base
            make = partial(
                Prefixes,
                whole_below=whole_below,
                saved_per_segment=base.saved_per_segment,
                tokens_per_state=base.tokens_per_state,
            )
            tell_apart = self.base.tell_apart((new.owner, new.model_id), loss_input.data, layouts)
            prefixes = find_prefixes(loss_input.data, layouts, make, tell_apart)
        replaced = sent.loss_fn != loss_input.loss_fn
        return CheckedBatch(
            loss_input, layouts, prefixes, f"{sent.loss_fn}_as_{loss_input.loss_fn}:max" if replaced else None
        )

    def mark_incomplete(self, model_id: str) -> None:
        """Mark the gradient as incomplete: a forward_backward of this model will never run."""
        self._model(model_id).gradient = "incomplete"

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """Take a step of torch.optim.AdamW on the summed gradient, which is cleared whatever happens. If it fails,
        weights and optimizer are as they were."""
        model = self._model(model_id)
        if model.gradient == "none":
            raise InvalidInput("there is no gradient: no forward_backward since the last optim_step")
        try:
            self._model_on_device(model_id)
            if self._world.num_machines > 1:
                self._keep_waiting(network_s(model.size_bytes))
            if model.gradient == "incomplete":
                raise InvalidInput(
                    "a forward_backward since the last optim_step failed, so the gradient is incomplete;"
                    " it was cleared and the weights are unchanged"
                )
            return self._step(model, adam)
        finally:
            model.clear_gradient()

    def _step(self, model: LoraModel, adam: AdamParams) -> OptimStepResponse:
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
        """Save the adapter alone."""
        model = self._about_to_move(model_id)
        load_check = self.base.score_load_check(model, model_id)
        self.base.files.save_sampler_weights(model, directory, load_check, for_elsewhere=for_elsewhere)

    def load_state(self, model_id: str, directory: Path, with_optimizer: bool) -> Made:
        """Load a saved state, and return what `create_model` does. If it raises, the model is as it was.

        A state of another layout makes another model of it.
        """
        model = self._model_on_device(model_id)
        config = self.base.files.with_layout_in(model.config, directory)
        loaded = model if config == model.config else self._new_planned(config)
        self._keep_waiting(_STATE_PARTS * files_s(loaded.size_bytes))
        self.base.files.load_state(loaded, directory, with_optimizer=with_optimizer)
        if loaded is not model:
            self.delete_model(model_id)
            self.models[model_id] = loaded
            self._note_use(loaded)
        return Made(loaded.training_bytes, loaded.config.layout)

    def snapshot(self, model_id: str, directory: Path) -> None:
        """Copy everything; a thread of rank 0 writes the copy, until `SnapshotWriter.written` is done."""
        self.base.files.begin_snapshot(self._about_to_move(model_id), directory)

    def _about_to_move(self, model_id: str) -> LoraModel:
        """Return a model whose files are about to be read or written."""
        model = self._model_on_device(model_id)
        self._keep_waiting(_STATE_PARTS * files_s(model.size_bytes))
        return model
