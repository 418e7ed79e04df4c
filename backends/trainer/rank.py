"""The trainer: LoRA models on one frozen base, one object of this class per rank, sync torch only.

All ranks run the same calls with the same arguments. What each computes is a function of those alone
(`plan_microbatches`), and they agree that their data are sound before the first collective: past that
point one rank's error would leave the others waiting.
"""

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from api_schemas.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    OptimStepResponse,
    Trainable,
)
from backends.families.family import Family
from backends.protocol import BackendFailed, InvalidInput, ModelLost
from backends.rendering import Rendered, Renderer
from backends.trainer import attention, checkpoint
from backends.trainer.batching import loss_inputs, pack, plan_microbatches
from backends.trainer.checks import loss_config
from backends.trainer.commands import TrainerConfig
from backends.trainer.lora import Adapter, Adapters, copy_tensors
from backends.trainer.losses import LOSSES, Loss
from backends.trainer.parallel import World, barrier, gather_objects, shard, sum_gradients
from backends.trainer.scoring import Scorer, score
from backends.trainer.self_test import packing_is_exact
from backends.trainer.vision import FrozenVision

log = logging.getLogger(__name__)


@dataclass
class Model:
    """One tenant: its adapter, its optimizer, and how whole its gradient is."""

    adapter: Adapter
    optimizer: torch.optim.AdamW
    gradient: checkpoint.GradientState = "none"

    def clear_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.gradient = "none"


class TrainerRank:
    """Loads the base and serves the calls of `protocol.Trainer`, on one rank of `world`."""

    def __init__(self, config: TrainerConfig, world: World) -> None:
        self._config = config
        self._world = world
        # Pixels are not kept: what the vision tower makes of them is.
        self._renderer = Renderer(config.source, image_cache_bytes=0, max_image_pixels=config.max_image_pixels)
        family = self._renderer.family
        model = load_base(config, family, world)
        vision = family.vision
        self._vision = FrozenVision(vision, model.base_model, config.image_cache_bytes) if vision is not None else None
        self._scorer = Scorer(model, self._vision).eval()
        self._packs = packing_is_exact(self._scorer, self._renderer, world.device)
        if not self._packs:
            log.warning("%s: this architecture mixes packed samples; each will run alone", config.name)
        if world.size > 1:
            shard(self._scorer, model.get_decoder().layers, world)
        self._adapters = Adapters(model, family.lora_modules(model), config.max_lora_rank)
        self._models: dict[str, Model] = {}
        self._adapter_numbers = itertools.count()

    # ---- models

    def create_model(self, model_id: str, lora: Trainable) -> None:
        self.delete_model(model_id)
        adapter = self._adapters.create(f"adapter{next(self._adapter_numbers)}", lora)
        # The learning rate and all else come with every optim_step.
        optimizer = torch.optim.AdamW(adapter.parameters, fused=self._world.device.type == "cuda")
        self._models[model_id] = Model(adapter, optimizer)

    def delete_model(self, model_id: str) -> None:
        model = self._models.pop(model_id, None)
        if model is not None:
            self._adapters.drop(model.adapter)

    def _model(self, model_id: str) -> Model:
        if model_id not in self._models:
            raise ModelLost(f"{model_id} is not loaded")
        return self._models[model_id]

    # ---- training

    def forward_backward(
        self, model_id: str, work: ForwardBackwardInput, backward: bool
    ) -> ForwardBackwardOutput | None:
        """The output, on rank 0; None on the others. `work` has passed `check_forward_backward`."""
        model = self._model(model_id)
        try:
            output = self._forward_backward(model, work, backward)
        except Exception as error:
            if backward:
                model.gradient = "incomplete"
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
                raise BackendFailed(f"out of GPU memory; send shorter or fewer datums at once ({error})") from None
            raise
        finally:
            if self._vision is not None:
                self._vision.trim()
        if backward and model.gradient == "none":
            model.gradient = "whole"
        return output

    def mark_incomplete(self, model_id: str) -> None:
        """A forward_backward of this model failed before it came here."""
        self._model(model_id).gradient = "incomplete"

    def _forward_backward(
        self, model: Model, work: ForwardBackwardInput, backward: bool
    ) -> ForwardBackwardOutput | None:
        loss = LOSSES[work.loss_fn]
        config = loss_config(loss, work)
        # An input is as long as its targets: `check_forward_backward` has seen to that.
        lengths = [len(datum.loss_fn_inputs["target_tokens"]) for datum in work.data]
        budget = self._config.max_tokens_per_microbatch if self._packs else 1
        steps = plan_microbatches(lengths, self._world.size, budget)[self._world.rank]
        rendered = self._render_share(work, steps)
        self._adapters.select(model.adapter.name)
        logprobs: dict[int, np.ndarray] = {}
        total = 0.0
        with torch.set_grad_enabled(backward):
            for indices in steps:
                total += self._microbatch(work, loss, config, indices, rendered, logprobs, backward)
        shares = gather_objects((logprobs, total), self._world)
        if self._world.rank != 0:
            return None
        everything = {index: values for share, _ in shares for index, values in share.items()}
        return ForwardBackwardOutput(
            loss_fn_outputs=[{"logprobs": everything[index]} for index in range(len(work.data))],
            metrics={"loss:sum": math.fsum(part for _, part in shares)},
        )

    def _render_share(self, work: ForwardBackwardInput, steps: list[list[int]]) -> dict[int, Rendered]:
        """This rank's datums, with pixels. Every rank raises where an image of any rank does not decode."""
        rendered: dict[int, Rendered] = {}
        error: str | None = None
        try:
            for index in itertools.chain.from_iterable(steps):
                model_input = work.data[index].model_input
                rendered[index] = self._renderer.render(model_input, f"datum {index}", self._vision or ())
        except InvalidInput as invalid:
            error = str(invalid)
        for message in gather_objects(error, self._world):
            if message is not None:
                raise InvalidInput(message)
        return rendered

    def _microbatch(
        self,
        work: ForwardBackwardInput,
        loss: Loss,
        config: dict[str, float],
        indices: list[int],
        rendered: dict[int, Rendered],
        logprobs: dict[int, np.ndarray],
        backward: bool,
    ) -> float:
        """Forward, loss and backward of one packed row; returns the loss."""
        datums = [work.data[index] for index in indices]
        targets = [datum.loss_fn_inputs["target_tokens"] for datum in datums]
        batch = pack(
            [(rendered[index], target) for index, target in zip(indices, targets, strict=True)],
            self._renderer.family,
            self._world.device,
        )
        logprobs_TK = score(self._scorer, batch)
        if not datums:  # the others have one more microbatch: run along, add nothing
            if backward:
                (logprobs_TK.sum() * 0).backward()
            return 0.0
        value = loss.compute(loss_inputs(loss, config, datums, logprobs_TK))
        if backward:
            value.backward()
        parts = logprobs_TK.detach().cpu().split(batch.sample_lengths)
        for index, target, part in zip(indices, targets, parts, strict=True):
            width = target.shape[1] if target.ndim == 2 else 1
            logprobs[index] = part[:, :width].reshape(target.shape).numpy()
        return value.item()

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """One step of torch.optim.AdamW on the summed gradient."""
        model = self._model(model_id)
        if model.gradient == "none":
            raise InvalidInput("there is no gradient: no forward_backward since the last optim_step")
        if model.gradient == "incomplete":
            model.clear_gradient()
            raise InvalidInput(
                "a forward_backward since the last optim_step failed, so the gradient is incomplete;"
                " it was cleared and the weights are unchanged"
            )
        parameters = model.adapter.parameters
        sum_gradients(parameters, self._world)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not torch.isfinite(norm):
            model.clear_gradient()
            raise InvalidInput("the gradient is not finite; it was cleared and the weights are unchanged")
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, adam.grad_clip_norm, norm)
        for group in model.optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        model.optimizer.step()
        model.clear_gradient()
        return OptimStepResponse(metrics={"grad_norm": norm.item()})

    # ---- weights

    def save_state(self, model_id: str, directory: Path) -> None:
        model = self._model(model_id)

        self._write(directory, lambda aside: self._write_state(model, aside))

    def save_sampler_weights(self, model_id: str, directory: Path) -> None:
        model = self._model(model_id)
        self._write(directory, lambda aside: self._write_adapter(model, aside))

    def suspend(self, model_id: str, directory: Path) -> None:
        model = self._model(model_id)
        if model.gradient == "whole":
            sum_gradients(model.adapter.parameters, self._world)
            if self._world.rank != 0:  # or it would be counted again, should the writing fail
                model.optimizer.zero_grad(set_to_none=True)
        tensors = model.adapter.tensors
        gradient = {name: p.grad for name, p in tensors.items() if p.grad is not None}

        def write(aside: Path) -> None:
            self._write_state(model, aside)
            checkpoint.write_gradient(aside, gradient, model.gradient)

        self._write(directory, write)
        self.delete_model(model_id)

    def resume(self, model_id: str, lora: Trainable, directory: Path) -> None:
        gradient, state = checkpoint.read_gradient(directory)
        self.create_model(model_id, lora)
        try:
            self.load_state(model_id, directory, with_optimizer=True)
        except BaseException:
            self.delete_model(model_id)
            raise
        model = self._model(model_id)
        model.gradient = state
        if self._world.rank == 0:  # it is the sum over ranks
            for name, tensor in gradient.items():
                parameter = model.adapter.tensors[name]
                parameter.grad = tensor.to(parameter.device)

    def _write_state(self, model: Model, directory: Path) -> None:
        self._write_adapter(model, directory)
        checkpoint.write_optimizer(directory, optimizer_state(model))

    def _write_adapter(self, model: Model, directory: Path) -> None:
        checkpoint.write_adapter(directory, model.adapter.tensors, model.adapter.config, self._config.name)

    def _write(self, directory: Path, write: Callable[[Path], None]) -> None:
        if self._world.rank == 0:
            checkpoint.write_directory(directory, write)
        barrier(self._world)

    def load_state(self, model_id: str, directory: Path, with_optimizer: bool) -> None:
        model = self._model(model_id)
        tensors = checkpoint.read_adapter(directory)
        state = checkpoint.read_optimizer(directory) if with_optimizer else {}
        copy_tensors(tensors, model.adapter, "load_weights")
        model.clear_gradient()
        restore_optimizer(model, state)


def load_base(config: TrainerConfig, family: Family, world: World) -> PreTrainedModel:
    """The frozen base, on this rank's device (FSDP moves it there itself when there are several ranks)."""
    dtype = getattr(torch, config.dtype)
    decoder = attention.implementation(world.device, dtype)
    model: PreTrainedModel = family.model_class.from_pretrained(
        config.source, dtype=dtype, attn_implementation=family.attention(decoder)
    )
    model.requires_grad_(False)
    return model.to(world.device)


def optimizer_state(model: Model) -> dict[str, Tensor]:
    """Adam's state by tensor name, flat; empty before the first step."""
    state = model.optimizer.state
    return {
        f"{name}:{key}": value
        for name, parameter in model.adapter.tensors.items()
        for key, value in state.get(parameter, {}).items()
    }


def restore_optimizer(model: Model, state: dict[str, Tensor]) -> None:
    """Replace the optimizer's state by `optimizer_state`'s; an empty one starts it afresh."""
    model.optimizer.state.clear()
    for name, parameter in model.adapter.tensors.items():
        own = {key: state[f"{name}:{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}:{key}" in state}
        if own:
            # torch keeps the step count of an unfused Adam on the CPU, of a fused one on the device.
            fused = model.optimizer.defaults["fused"]
            model.optimizer.state[parameter] = {
                key: value.to(parameter.device if fused or key != "step" else "cpu") for key, value in own.items()
            }
