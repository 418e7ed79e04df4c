"""Forward and backward of a packed row, which may hold datums of several models.

Ranks compute their rows side by side. Before each forward they agree that what it needs is there: where the base is
sharded, one rank's error past that point would leave the others waiting.

T positions of a row, K alternatives of a position, P passes of a row, R rank columns of their models
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from backends.inputs.rendering import Rendered
from backends.protocol import BackendFailed, InvalidInput
from backends.trainer.base_model import FrozenBase
from backends.trainer.distributed import World, agreed, agreed_each, told
from backends.trainer.lora.linear import SUMMED_TOKENS
from backends.trainer.lora.tenant import all_finite
from backends.trainer.model.packing import Microbatch, loss_inputs, pack
from backends.trainer.model.router_replay import Replay
from backends.trainer.model.token_logprobs import TokenGradient
from backends.trainer.step.batch_pass import BatchPass, Row, targets
from backends.trainer.step.loss_metrics import observe
from backends.trainer.step.losses import LossInputs
from backends.trainer.time_limits import microbatch_s

Failures = dict[BatchPass, Exception]


@dataclass(frozen=True)
class _Packed:
    """A row on the device, with all that it needs: what follows goes from forward to backward without waiting."""

    batch: Microbatch
    scales_TR: Tensor
    losses: Sequence[Callable[..., LossInputs]]
    """Of each pass, as `loss_inputs` gives them."""


class RowComputer:
    """Computes rows on one rank."""

    def __init__(self, base: FrozenBase, world: World, keep_waiting: Callable[[float], None]) -> None:
        """`keep_waiting` is told before every row how many seconds it may take."""
        self._base = base
        self._world = world
        self._keep_waiting = keep_waiting

    def compute(self, rows: Sequence[Row]) -> Failures:
        """Each rank's row of `rows`, all with a gradient or all without; log probabilities go to the passes' shares,
        and gradients to their models.

        Returns the passes that failed; of the others in their company nothing is then computed, and the same where
        the company itself must be feared: each of them then has its next rows to itself.
        """
        passes = list(dict.fromkeys(one for row in rows for one in row))
        self._keep_waiting(max(self._row_s(row) for row in rows))
        row = rows[self._world.rank]
        rendered, errors = self._rendered(row)
        failures: Failures = {one: errors[one.number] for one in passes if one.number in errors}
        if failures:
            return failures
        # Decoded while the device computes.
        self._expect({one: one.next_on(self._world.rank, besides=row.get(one, ())) for one in passes})
        if self._base.memory is not None and passes[0].backward:
            # The same on all ranks: what is computed again is gathered again.
            self._base.memory.prepare(max(_num_tokens(row) for row in rows))
        try:
            with torch.set_grad_enabled(passes[0].backward):
                failures = self._computed(row, rendered, passes)
        except _Feared:
            for one in passes:
                one.apart = True
        else:
            for one, indices in (pair for of_rank in rows for pair in of_rank.items()):
                one.computed(indices)
        finally:
            if self._base.vision is not None:
                self._base.vision.trim()
        return failures

    def _row_s(self, row: Row) -> float:
        """Seconds that a row takes at most."""
        num_images = sum(one.num_images(indices) for one, indices in row.items())
        return microbatch_s(_num_tokens(row), num_images, self._base.num_parameters, self._world.device)

    def _rendered(self, row: Row) -> tuple[dict[int, list[Rendered]], dict[int, InvalidInput | BackendFailed]]:
        """By a pass's number, its datums; InvalidInput for images that do not decode."""
        vision, renderer, device = self._base.vision, self._base.renderer, self._world.device
        # In a sharded base the tower is gathered with the rest, when the row is computed.
        begins = device.type == "cuda" and not self._base.is_sharded
        self._expect(row)

        def render(one: BatchPass, indices: list[int]) -> list[Rendered]:
            rendered, known = [], self._known(one)
            for i in indices:
                rendered.append(renderer.render(one.data[i].model_input, f"datum {i}", known))
                if vision is not None and begins and not one.tenant.adapter.config.train_vision:
                    with renderer.decoding_paused():
                        vision.begin(rendered[-1].images, device)
            return rendered

        return agreed_each({one.number: partial(render, one, indices) for one, indices in row.items()}, self._world)

    def _expect(self, row: Row) -> None:
        for one, indices in row.items():
            self._base.renderer.expect([one.data[index].model_input for index in indices], self._known(one))

    def _known(self, one: BatchPass) -> Container[str]:
        """Hashes of images whose pixels are not needed."""
        trained = one.tenant.adapter.config.train_vision
        return () if trained or self._base.vision is None else self._base.vision

    def forget_expected(self) -> None:
        """Nothing is under way any more: what a failed pass did not come to needs no memory."""
        self._base.renderer.forget_expected()

    def _computed(self, row: Row, rendered: dict[int, list[Rendered]], passes: Sequence[BatchPass]) -> Failures:
        """Raises _Feared where several passes may have harmed one another."""
        try:
            packed = agreed(lambda: self._packed(row, rendered), self._world)
            if self._base.is_sharded:
                observed = self._forward_backward(row, packed)
            else:
                observed = agreed(lambda: self._in_memory(row, packed), self._world)
        except Exception as error:  # one row's failure must not stop the others
            if self._base.is_sharded and not isinstance(error, (InvalidInput, BackendFailed)):
                raise  # the others wait in a collective
            return _blame(passes, told(error))
        return self._collected(row, observed, passes)

    def _packed(self, row: Row, rendered: dict[int, list[Rendered]]) -> _Packed:
        """The datums' row on the device, with their models' adapters loaded."""
        samples = [
            (one, targets(of.data[index]))
            for of, indices in row.items()
            for index, one in zip(indices, rendered[of.number], strict=True)
        ]
        # The gradients of whole weights are torch's own products over the row's tokens (`lora_linear.SUMMED_TOKENS`).
        multiple_of = SUMMED_TOKENS if self._base.full is not None and self._world.device.type == "cuda" else 1
        batch = pack(samples, self._base.renderer.family, self._world.device, multiple_of)
        scales_PR = self._base.adapters.load([one.tenant.adapter for one in row])
        counts = torch.tensor([one.num_tokens(indices) for one, indices in row.items()], dtype=torch.int64)
        if any(one.tenant.adapter.config.train_vision for one in row):
            batch = replace(batch, tower_scales=_tower_scales(row, rendered, scales_PR))
        if self._base.replay is not None:
            batch = replace(batch, experts_LTK=_experts(row, rendered, self._base.replay, len(batch.targets_TK)))
        scales_TR = scales_PR.repeat_interleave(counts.to(scales_PR.device), 0, output_size=int(counts.sum()))
        missing = len(batch.targets_TK) - len(scales_TR)  # the sample that is nobody's
        scales_TR = torch.cat([scales_TR, scales_TR.new_zeros(missing, scales_TR.shape[1])])
        losses = [
            loss_inputs(one.loss, one.config, [one.data[index] for index in indices], self._world.device)
            for one, indices in row.items()
        ]
        return _Packed(batch, scales_TR, losses)

    def _in_memory(self, row: Row, packed: _Packed) -> Tensor:
        """`_forward_backward`, once more with the least memory where it ran out of it."""
        try:
            return self._forward_backward(row, packed)
        except torch.OutOfMemoryError:
            if self._base.memory is None:
                raise
        # Outside of the handler, whose traceback holds the failed pass's tensors.
        self._base.adapters.discard()
        self._base.memory.prepare_least()
        return self._forward_backward(row, packed)

    def _forward_backward(self, row: Row, packed: _Packed) -> Tensor:
        """[P, 8]: what `observe` gives for each pass."""
        logprobs_TK = self._base.score(packed.batch, packed.scales_TR, _token_gradient(row, packed.losses))
        if not row:  # the others have one more row: take part in what collectives they have, with no gradient
            if logprobs_TK.requires_grad:
                (logprobs_TK.sum() * 0).backward()
            return torch.zeros(0, 0)
        logprobs_TK = logprobs_TK[: sum(packed.batch.sample_lengths)]
        values, observed = [], []
        parts = logprobs_TK.split([one.num_tokens(indices) for one, indices in row.items()])
        for one, of_part, part_TK in zip(row, packed.losses, parts, strict=True):
            inputs = of_part(part_TK)
            values.append(one.loss.compute(inputs))
            observed.append(observe(one.loss, inputs, values[-1]))
        if logprobs_TK.requires_grad:
            torch.stack(values).sum().backward()
        self._keep(row, logprobs_TK.detach().cpu(), packed.batch.sample_lengths)
        return torch.stack(observed)

    def _keep(self, row: Row, logprobs_TK: Tensor, sample_lengths: Sequence[int]) -> None:
        datums = [(one, index) for one, indices in row.items() for index in indices]
        for (one, index), part in zip(datums, logprobs_TK.split(list(sample_lengths)), strict=True):
            target = targets(one.data[index])
            width = target.shape[1] if target.ndim == 2 else 1
            one.share.logprobs[index] = part[:, :width].reshape(target.shape).numpy()

    def _collected(self, row: Row, observed: Tensor, passes: Sequence[BatchPass]) -> Failures:
        """Give every model its gradient, once no rank has found anything that is not finite."""

        def require_finite() -> None:
            for one, indices in row.items():
                one.require_finite(indices)
            if len(passes) > 1 and passes[0].backward and not all_finite(self._base.adapters.gathered):
                raise InvalidInput("the gradient is not finite")

        def collect() -> list[list[float]]:
            if passes[0].backward:
                self._base.adapters.collect([one.tenant.adapter for one in row])
            return observed.tolist()

        try:
            agreed(require_finite, self._world)
        except InvalidInput as error:
            # 0 * NaN is NaN: one model's may be in what was gathered for the others.
            return _blame(passes, error)
        try:
            values = agreed(collect, self._world)
        except BackendFailed as error:  # some may have their gradient, so that none can be computed again
            return dict.fromkeys(passes, error)
        for one, of_pass in zip(row, values, strict=True):
            one.share.observed.append(of_pass)
        return {}


def _token_gradient(row: Row, losses: Sequence[Callable[..., LossInputs]]) -> TokenGradient | None:
    """Of the passes' losses together; None where one of them has no such."""
    if not row or not all(one.loss.by_token for one in row):
        return None
    ends = list(accumulate(one.num_tokens(indices) for one, indices in row.items()))

    def gradient(logprobs_TK: Tensor, begin: int) -> Tensor:
        leaf_TK, values = logprobs_TK.detach().requires_grad_(), []
        with torch.enable_grad():
            for one, of_tokens, first, end in zip(row, losses, [0, *ends], ends, strict=False):
                own = slice(max(first, begin), min(end, begin + len(logprobs_TK)))
                if own.start < own.stop:
                    part_TK = leaf_TK[own.start - begin : own.stop - begin]
                    values.append(one.loss.compute(of_tokens(part_TK, slice(own.start - first, own.stop - first))))
            if not values:  # of the sample that is nobody's
                return torch.zeros_like(logprobs_TK)
            return torch.autograd.grad(torch.stack(values).sum(), leaf_TK)[0]

    return gradient


def _tower_scales(row: Row, rendered: dict[int, list[Rendered]], scales_PR: Tensor) -> list[Tensor | None]:
    """Of each of the row's images, as `Microbatch.tower_scales` has them."""
    found: list[Tensor | None] = []
    for one, scales_R in zip(row, scales_PR, strict=True):
        own = scales_R if one.tenant.adapter.config.train_vision else None
        found += [own for datum in rendered[one.number] for _ in datum.images]
    return found


def _experts(row: Row, rendered: dict[int, list[Rendered]], replay: Replay, num_tokens: int) -> Tensor:
    """[L, T, K], as `Microbatch.experts_LTK` has them; how many are known is told to the passes' shares."""
    parts = []
    for one, indices in row.items():
        for index, datum in zip(indices, rendered[one.number], strict=True):
            length, found = len(datum.token_ids_T), replay.find(one.owner, one.model_id, datum)
            one.share.replayed[index] = 0 if found is None else length
            parts.append((length, found))
    return replay.row(parts, num_tokens)


class _Feared(Exception):
    """Several passes share a row that failed: whose fault it is shows when each is alone."""


def _blame(passes: Sequence[BatchPass], error: Exception) -> Failures:
    if len(passes) > 1:
        raise _Feared
    return {passes[0]: error}


def _num_tokens(row: Row) -> int:
    return sum(one.num_tokens(indices) for one, indices in row.items())
