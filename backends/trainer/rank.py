"""The trainer: LoRA models on one frozen base, or one model that trains all of it; one object of this class per rank,
sync torch only.

All ranks run the same commands with the same arguments. Whatever one of them finds wrong they agree on
(`parallel.agreed`), so that no rank waits for another that has given up, and none goes on alone.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from api_schemas.training import AdamParams, ForwardBackwardInput, OptimStepResponse, Trainable
from backends.model_spec import ModelSpec
from backends.processes.progress import Progress
from backends.protocol import BackendFailed, EncodedBatch, InvalidInput, ModelLost
from backends.trainer.base_model import FrozenBase
from backends.trainer.canary import score_canary
from backends.trainer.commands import ComputedMicrobatch, FinishedRequest, NewRequest
from backends.trainer.distributed import World, agreed, agreed_each, gather_objects
from backends.trainer.full.files import FullFiles
from backends.trainer.full.tenant import FullTenant
from backends.trainer.lora.files import WeightFiles
from backends.trainer.lora.tenant import Tenant
from backends.trainer.step.batch_pass import BatchPass, choose_rows, plan_pass
from backends.trainer.step.packed_microbatch import RowComputer
from backends.trainer.step.validation import check_forward_backward, decode_batch, published
from backends.trainer.time_limits import decoding_s, files_s
from backends.trainer.trained_weights import AnyFiles, AnyTenant

_MAX_ROW = sys.maxsize
"""Tokens, where nothing is known of memory."""
_STATE_PARTS = 4
"""Adapter, two moments and a gradient: what a tenant's files hold at most, in adapters."""


class TrainerRank:
    """Loads the base and does what `protocol.Trainer` says, on one rank of `world`."""

    def __init__(
        self,
        config: ModelSpec,
        world: World,
        keep_waiting: Callable[[float], None] = lambda seconds: None,
        progress: Progress | None = None,
    ) -> None:
        """`keep_waiting` is told how many seconds the next piece of work may take, `progress` how far loading is."""
        self._config = config
        self._world = world
        self._keep_waiting = keep_waiting
        self.base = FrozenBase(config, world, progress or Progress())
        self._files = self._make_files()
        self._rows = RowComputer(self.base, world, keep_waiting)
        self._max_tokens = config.max_tokens_per_microbatch if self.base.packs else 1
        self._longest_row = _MAX_ROW
        """Tokens of a row with a gradient that fits into every rank's memory, as far as was known last."""
        self.tenants: dict[str, AnyTenant] = {}
        self._passes: dict[int, BatchPass] = {}
        """By number, the forward_backwards that are under way."""

    # ---- models

    def create_model(self, model_id: str, lora: Trainable) -> None:
        """Where it raises, nothing of the model is left on any rank."""
        self.delete_model(model_id)

        def make() -> AnyTenant:
            fused = self._world.device.type == "cuda"
            if self.base.full is None:
                return Tenant(self.base.adapters.create(lora), fused=fused)
            assert not self.tenants, "the server lets in one model at a time"
            return FullTenant(self.base.full.create(lora), fused=fused)

        self.tenants[model_id] = agreed(make, self._world)

    def _make_files(self) -> AnyFiles:
        if self.base.full is None:
            return WeightFiles(self._config.name, getattr(torch, self._config.dtype), self._world)
        return FullFiles(self._config.directory, self.base.full, self._world)

    def delete_model(self, model_id: str) -> None:
        """Nothing happens where it is not held."""
        tenant = self.tenants.pop(model_id, None)
        self._passes = {number: one for number, one in self._passes.items() if one.tenant is not tenant}

    def _tenant(self, model_id: str) -> AnyTenant:
        if model_id not in self.tenants:
            raise ModelLost(f"{model_id} is not loaded")
        return self.tenants[model_id]

    # ---- training

    def compute_rows(self, new: Sequence[NewRequest], order: Sequence[int]) -> ComputedMicrobatch:
        """Take up `new` forward_backwards, then compute one row: of the first in `order`, and where there is room of
        the others with it. The gradient of those that fail is then incomplete.
        """
        failures = self._take_up(new)
        for number in order:
            if number not in self._passes and number not in failures:
                failures[number] = BackendFailed("this forward_backward is not under way")
        passes = [self._passes[number] for number in order if number in self._passes]
        members: tuple[int, ...] = ()
        if passes:
            rows = choose_rows(passes, self._world.size, min(self._max_tokens, self._longest_row))
            members = tuple({one.number for row in rows for one in row})
            failures |= {one.number: error for one, error in self._rows.compute(rows).items()}
        self.drop_passes(list(failures))
        finished: list[FinishedRequest] = list(failures.items())
        done = [one for one in passes if one.is_done and one.number not in failures]
        everyones = gather_objects([one.share for one in done], self._world) if done else []
        for one, *shares in zip(done, *everyones, strict=True):
            del self._passes[one.number]
            if one.backward and one.tenant.gradient == "none":
                one.tenant.gradient = "whole"
            if self._world.rank == 0:
                finished.append((one.number, one.output(shares)))
        if not self._passes:
            self._rows.forget_expected()
        return ComputedMicrobatch(finished, members)

    def _take_up(self, new: Sequence[NewRequest]) -> dict[int, Exception]:
        """Those that fail."""
        failures: dict[int, Exception] = {
            one.number: ModelLost(f"{one.model_id} is not loaded") for one in new if one.model_id not in self.tenants
        }
        known = [one for one in new if one.number not in failures]
        self._keep_waiting(sum(decoding_s(len(one.batch.body)) for one in known))
        inputs, errors = agreed_each({one.number: partial(self._checked, one.batch) for one in known}, self._world)
        if self.base.memory is not None:
            if self.base.full is not None:
                self.base.memory.set_aside_bytes = sum(one.missing_bytes for one in self.tenants.values())
            self._longest_row = min(gather_objects(self.base.memory.longest_row, self._world))
        for one in known:
            tenant = self.tenants[one.model_id]
            try:
                if one.number in errors:
                    raise errors[one.number]
                longest = self._longest_row if one.backward else _MAX_ROW
                asked, loss_input = inputs[one.number]
                plan = plan_pass(loss_input, self._world.size, self._max_tokens, longest)
                self._passes[one.number] = BatchPass(one, tenant, loss_input, plan)
                if asked != loss_input.loss_fn:
                    self._passes[one.number].note = f"{asked}_as_{loss_input.loss_fn}:max"
            except (InvalidInput, BackendFailed) as error:
                failures[one.number] = error
                if one.backward:
                    tenant.gradient = "incomplete"
        return failures

    def drop_passes(self, numbers: Sequence[int]) -> None:
        """Of these nothing more is computed; their gradients are incomplete."""
        for number in numbers:
            one = self._passes.pop(number, None)
            if one is not None and one.backward:
                one.tenant.gradient = "incomplete"

    def _checked(self, batch: EncodedBatch) -> tuple[str, ForwardBackwardInput]:
        """The loss that was asked for, and what to compute."""
        sent = decode_batch(batch)
        loss_input = published(sent, self._config.stable_reinforce)
        check_forward_backward(self.base.renderer, loss_input, self._config.max_context_length)
        return sent.loss_fn, loss_input

    def mark_incomplete(self, model_id: str) -> None:
        """A forward_backward of this model will never run."""
        self._tenant(model_id).gradient = "incomplete"

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """One step of torch.optim.AdamW on the summed gradient, which is cleared whatever happens. Where it
        fails, weights and optimizer are as they were."""
        tenant = self._tenant(model_id)
        if tenant.gradient == "none":
            raise InvalidInput("there is no gradient: no forward_backward since the last optim_step")
        try:
            if tenant.gradient == "incomplete":
                raise InvalidInput(
                    "a forward_backward since the last optim_step failed, so the gradient is incomplete;"
                    " it was cleared and the weights are unchanged"
                )
            return self._step(tenant, adam)
        finally:
            tenant.clear_gradient()

    def _step(self, tenant: AnyTenant, adam: AdamParams) -> OptimStepResponse:
        norm = tenant.sum_gradient(self._world)
        if not norm.isfinite():
            raise InvalidInput("the gradient is not finite; it was cleared and the weights are unchanged")
        before = agreed(lambda: tenant.before_step(adam, norm), self._world)
        try:
            agreed(lambda: tenant.step(adam, norm), self._world)
        except BaseException:
            tenant.restore(before)
            raise
        return OptimStepResponse(metrics={"grad_norm": norm.item()})

    # ---- weights

    def save_state(self, model_id: str, directory: Path) -> None:
        """Weights and optimizer."""
        self._files.save_state(self._about_to_move(model_id), directory)

    def save_sampler_weights(self, model_id: str, directory: Path, for_elsewhere: bool) -> None:
        """The adapter alone, or the whole model."""
        tenant = self._about_to_move(model_id)
        context = self._config.max_context_length
        canary = score_canary(self.base, self._world.device, tenant.adapter, model_id, context)
        self._files.save_adapter(tenant, directory, canary, for_elsewhere=for_elsewhere)

    def load_state(self, model_id: str, directory: Path, with_optimizer: bool) -> None:
        """Where it raises, the model is as it was."""
        self._files.load_state(self._about_to_move(model_id), directory, with_optimizer=with_optimizer)

    def snapshot(self, model_id: str, directory: Path) -> None:
        """Copy everything; a thread of rank 0 writes it, which `snapshot_written` tells of."""
        self._files.begin_snapshot(self._about_to_move(model_id), directory)

    def snapshot_written(self, directory: Path) -> Future[None]:
        """Of a snapshot that was begun on this rank."""
        return self._files.written(directory)

    def resume(self, model_id: str, lora: Trainable, directory: Path) -> None:
        """What a snapshot is of; where it raises, nothing of the model is left."""
        self.create_model(model_id, lora)
        try:
            self._files.load_all(self._about_to_move(model_id), directory)
        except BaseException:
            self.delete_model(model_id)
            raise

    def _about_to_move(self, model_id: str) -> AnyTenant:
        """A model whose files are about to be read or written."""
        tenant = self._tenant(model_id)
        size_bytes = sum(p.nbytes for p in tenant.adapter.parameters)
        if self.base.full is not None:  # of which each rank has a part
            size_bytes *= self._world.size
        self._keep_waiting(_STATE_PARTS * files_s(size_bytes))
        return tenant
