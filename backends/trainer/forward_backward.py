"""Forward and backward of a batch, microbatch by microbatch.

All ranks make the same plan (`plan_microbatches`) and compute their shares side by side. Before each
forward they agree that what it needs is there: past that point one rank's error would leave the others
waiting.

T positions of a microbatch, K alternatives of a position
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from api_schemas.inputs import Datum, ImageChunk
from api_schemas.training import ForwardBackwardInput, ForwardBackwardOutput
from backends.protocol import BackendFailed, InvalidInput
from backends.trainer.base import FrozenBase
from backends.trainer.batching import Microbatch, loss_inputs, pack, plan_microbatches
from backends.trainer.checks import loss_config
from backends.trainer.lora import Adapter
from backends.trainer.losses import LOSSES, Loss
from backends.trainer.parallel import World, agreed, gather_objects
from backends.trainer.time_limits import microbatch_s


class BatchPass:
    """One batch through one adapter, on one rank."""

    def __init__(
        self,
        base: FrozenBase,
        world: World,
        adapter: Adapter,
        loss_input: ForwardBackwardInput,
        *,
        backward: bool,
    ) -> None:
        """`loss_input` has passed `check_forward_backward`."""
        self._adapter = adapter
        self._base = base
        self._world = world
        self._data = loss_input.data
        self._loss: Loss = LOSSES[loss_input.loss_fn]
        self._config = loss_config(self._loss, loss_input)
        self._backward = backward
        # An input is as long as its targets: `check_forward_backward` has seen to that.
        self._lengths = [len(_targets(datum)) for datum in self._data]
        self._logprobs: dict[int, np.ndarray] = {}
        """By datum, of this rank's share: the shape of its target_tokens, float32, nats."""

    def run(self, max_tokens: int, keep_waiting: Callable[[float], None]) -> ForwardBackwardOutput | None:
        """The whole output on rank 0, None on the others. With backward the gradients are added to the adapter's.

        `keep_waiting` is told before every step how many seconds it may take.
        """
        max_tokens = self._largest_row(max_tokens)
        plan = plan_microbatches(self._lengths, self._world.size, max_tokens if self._base.packs else 1)
        total = 0.0
        (self._scales_R,) = agreed(lambda: self._base.adapters.load([self._adapter]), self._world)
        with torch.set_grad_enabled(self._backward):
            for steps in zip(*plan, strict=True):
                keep_waiting(max(self._step_s(indices) for indices in steps))
                if self._base.memory is not None and self._backward:
                    # The same on all ranks: what is computed again is gathered again.
                    self._base.memory.prepare(max(self._num_tokens(indices) for indices in steps))
                total += self._step(steps[self._world.rank])
        shares = gather_objects((self._logprobs, total), self._world)
        everything = {index: values for share, _ in shares for index, values in share.items()}
        for index in range(len(self._data)):
            if not np.isfinite(everything[index]).all():
                raise InvalidInput(
                    f"datum {index}: the model's log probabilities are not finite: its weights have diverged; load"
                    " a checkpoint, and train with a smaller learning_rate"
                )
        if self._world.rank != 0:
            return None
        return ForwardBackwardOutput(
            loss_fn_outputs=[{"logprobs": everything[index]} for index in range(len(self._data))],
            metrics={"loss:sum": math.fsum(part for _, part in shares)},
        )

    def _largest_row(self, max_tokens: int) -> int:
        """`max_tokens`, or what fits into memory. Raises InvalidInput where a datum alone does not."""
        if self._base.memory is None or not self._backward:
            return max_tokens
        longest: int = min(gather_objects(self._base.memory.longest_row, self._world))
        for index, length in enumerate(self._lengths):
            if length > longest:
                raise InvalidInput(f"datum {index}: {length} tokens, but the GPU's memory is enough for {longest}")
        return min(max_tokens, longest)

    def _num_tokens(self, indices: Sequence[int]) -> int:
        return sum(self._lengths[index] for index in indices)

    def _step_s(self, indices: Sequence[int]) -> float:
        """Seconds that a microbatch of these datums takes at most."""
        chunks = (chunk for index in indices for chunk in self._data[index].model_input.chunks)
        num_images = sum(isinstance(chunk, ImageChunk) for chunk in chunks)
        return microbatch_s(self._num_tokens(indices), num_images, self._base.num_parameters, self._world.device)

    def _step(self, indices: Sequence[int]) -> float:
        """Forward, loss and backward of one packed row; returns the loss."""
        try:
            batch = agreed(lambda: self._packed(indices), self._world)
            value = self._compute_in_memory(batch, indices)
            if self._backward:
                agreed(lambda: self._base.adapters.collect([self._adapter]), self._world)
        except torch.OutOfMemoryError as error:
            if self._world.size > 1:  # the others wait in a collective
                raise
            torch.cuda.empty_cache()
            raise BackendFailed(f"out of GPU memory; send shorter or fewer datums at once ({error})") from None
        finally:
            if self._base.vision is not None:
                self._base.vision.trim()
        return value

    def _packed(self, indices: Sequence[int]) -> Microbatch:
        """The datums' row, its pixels too. Raises InvalidInput for an image that does not decode."""
        samples = []
        self._base.renderer.expect([self._data[index].model_input for index in indices], self._base.vision or ())
        for index in indices:
            datum = self._data[index]
            rendered = self._base.renderer.render(datum.model_input, f"datum {index}", self._base.vision or ())
            samples.append((rendered, _targets(datum)))
        return pack(samples, self._base.renderer.family, self._world.device)

    def _compute_in_memory(self, batch: Microbatch, indices: Sequence[int]) -> float:
        """`_compute`, once more with the least memory where it ran out of it."""
        try:
            return self._compute(batch, indices)
        except torch.OutOfMemoryError:
            if self._base.memory is None or self._world.size > 1:
                raise
        # Outside of the handler, whose traceback holds the failed pass's tensors.
        self._base.adapters.discard()
        self._base.memory.prepare_least()
        return self._compute(batch, indices)

    def _compute(self, batch: Microbatch, indices: Sequence[int]) -> float:
        logprobs_TK = self._base.scorer(batch, self._scales_R.repeat(len(batch.targets_TK), 1))
        if not indices:  # the others have one more microbatch: take part in their collectives, with no gradient
            if self._backward:
                (logprobs_TK.sum() * 0).backward()
            return 0.0
        datums = [self._data[index] for index in indices]
        logprobs_TK = logprobs_TK[: sum(batch.sample_lengths)]
        value = self._loss.compute(loss_inputs(self._loss, self._config, datums, logprobs_TK))
        if self._backward:
            value.backward()
        self._keep(logprobs_TK.detach().cpu(), batch.sample_lengths, indices)
        return value.item()

    def _keep(self, logprobs_TK: Tensor, lengths: list[int], indices: Sequence[int]) -> None:
        for index, part in zip(indices, logprobs_TK.split(lengths), strict=True):
            target = _targets(self._data[index])
            width = target.shape[1] if target.ndim == 2 else 1
            self._logprobs[index] = part[:, :width].reshape(target.shape).numpy()


def _targets(datum: Datum) -> np.ndarray:
    """[N] or [N, K] int64."""
    return datum.loss_fn_inputs["target_tokens"]
