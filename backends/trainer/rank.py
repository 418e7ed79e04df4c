"""The trainer: LoRA models on one frozen base, one object of this class per rank, sync torch only.

All ranks run the same commands with the same arguments. Whatever one of them finds wrong they agree on
(`parallel.agreed`), so that no rank waits for another that has given up, and none goes on alone.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from api_schemas.training import AdamParams, ForwardBackwardInput, ForwardBackwardOutput, OptimStepResponse, Trainable
from backends.protocol import EncodedBatch, InvalidInput, ModelLost
from backends.trainer.base import FrozenBase
from backends.trainer.canary import score_canary
from backends.trainer.checks import check_forward_backward, decode_batch
from backends.trainer.commands import TrainerConfig
from backends.trainer.forward_backward import BatchPass
from backends.trainer.parallel import World, agreed, sum_gradients
from backends.trainer.tenant import Tenant
from backends.trainer.time_limits import decoding_s, files_s
from backends.trainer.weights import WeightFiles

_STATE_PARTS = 4
"""Adapter, two moments and a gradient: what a tenant's files hold at most, in adapters."""


class TrainerRank:
    """Loads the base and does what `protocol.Trainer` says, on one rank of `world`."""

    def __init__(
        self, config: TrainerConfig, world: World, keep_waiting: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`keep_waiting` is told how many seconds the next piece of work may take."""
        self._config = config
        self._world = world
        self._keep_waiting = keep_waiting
        self.base = FrozenBase(config, world)
        self._files = WeightFiles(config.name, world)
        self.tenants: dict[str, Tenant] = {}

    # ---- models

    def create_model(self, model_id: str, lora: Trainable) -> None:
        """Where it raises, nothing of the model is left on any rank."""
        self.delete_model(model_id)

        def make() -> Tenant:
            return Tenant(self.base.adapters.create(lora), fused=self._world.device.type == "cuda")

        self.tenants[model_id] = agreed(make, self._world)

    def delete_model(self, model_id: str) -> None:
        """Nothing happens where it is not held."""
        self.tenants.pop(model_id, None)

    def _tenant(self, model_id: str) -> Tenant:
        if model_id not in self.tenants:
            raise ModelLost(f"{model_id} is not loaded")
        return self.tenants[model_id]

    # ---- training

    def forward_backward(self, model_id: str, batch: EncodedBatch, backward: bool) -> ForwardBackwardOutput | None:
        """The output, on rank 0; None on the others. Whatever fails leaves the gradient incomplete."""
        tenant = self._tenant(model_id)
        try:
            self._keep_waiting(decoding_s(len(batch.body)))
            loss_input = agreed(lambda: self._checked(batch), self._world)
            batch_pass = BatchPass(self.base, self._world, tenant.adapter, loss_input, backward=backward)
            output = batch_pass.run(self._config.max_tokens_per_microbatch, self._keep_waiting)
        except Exception:
            if backward:
                tenant.gradient = "incomplete"
            raise
        if backward and tenant.gradient == "none":
            tenant.gradient = "whole"
        return output

    def _checked(self, batch: EncodedBatch) -> ForwardBackwardInput:
        loss_input = decode_batch(batch)
        check_forward_backward(self.base.renderer, loss_input, self._config.max_context_length)
        return loss_input

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

    def _step(self, tenant: Tenant, adam: AdamParams) -> OptimStepResponse:
        sum_gradients(tenant.adapter.parameters, self._world)
        norm = agreed(tenant.gradient_norm, self._world)
        if not norm.isfinite():
            raise InvalidInput("the gradient is not finite; it was cleared and the weights are unchanged")
        before = agreed(tenant.snapshot, self._world)
        try:
            agreed(lambda: tenant.step(adam, norm), self._world)
        except BaseException:
            tenant.restore(before)
            raise
        return OptimStepResponse(metrics={"grad_norm": norm.item()})

    # ---- weights

    def save_state(self, model_id: str, directory: Path) -> None:
        """Adapter and optimizer."""
        self._files.save_state(self._about_to_move(model_id), directory)

    def save_sampler_weights(self, model_id: str, directory: Path, for_elsewhere: bool) -> None:
        """The adapter alone."""
        tenant = self._about_to_move(model_id)
        canary = score_canary(self.base, self._world.device, tenant.adapter)
        dtype = torch.float32 if for_elsewhere else getattr(torch, self._config.dtype)
        self._files.save_adapter(tenant, directory, canary, dtype)

    def load_state(self, model_id: str, directory: Path, with_optimizer: bool) -> None:
        """Where it raises, the model is as it was."""
        self._files.load_state(self._about_to_move(model_id), directory, with_optimizer=with_optimizer)

    def suspend(self, model_id: str, directory: Path) -> None:
        """Write everything, then drop the model; where it raises, the model stays."""
        self._files.save_all(self._about_to_move(model_id), directory)
        self.delete_model(model_id)

    def resume(self, model_id: str, lora: Trainable, directory: Path) -> None:
        """What suspend wrote; where it raises, nothing of the model is left."""
        self.create_model(model_id, lora)
        try:
            self._files.load_all(self._about_to_move(model_id), directory)
        except BaseException:
            self.delete_model(model_id)
            raise

    def _about_to_move(self, model_id: str) -> Tenant:
        """A model whose files are about to be read or written."""
        tenant = self._tenant(model_id)
        self._keep_waiting(_STATE_PARTS * files_s(sum(p.nbytes for p in tenant.adapter.parameters)))
        return tenant
