"""Forward and backward of a packed microbatch, which may hold datums of several models.

Ranks compute their microbatches side by side. Before each forward they agree that its inputs are there: if the base is
sharded, or ranks have slices of one microbatch, one rank's error past that point would leave the others waiting.

T tokens of a microbatch, K targets of a token, P requests of a microbatch, R summed ranks of their models
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from backends.inputs.rendering import Rendered, images_of
from backends.protocol import BackendFailed, InvalidInput
from backends.trainer.base_model import BaseModel
from backends.trainer.distributed import World, agreed, agreed_each, largest, microbatch_s, to_broadcast
from backends.trainer.model.context import slice_of
from backends.trainer.model.packing import Microbatch, loss_inputs, num_padding, pack
from backends.trainer.model.recompute import Memory
from backends.trainer.model.router_replay import RouterReplay
from backends.trainer.model.token_logprobs import TokenGradient
from backends.trainer.optimizer import all_finite
from backends.trainer.step.batch_request import BatchRequest, Members, targets
from backends.trainer.step.losses import LossInputs, observe
from backends.trainer.trained_weights import TrainedModel

Failures = dict[BatchRequest, Exception]


@dataclass(frozen=True)
class _Packed:
    """A microbatch on the device with all that it needs: forward and backward then run without waiting for the host."""

    batch: Microbatch
    scales_TR: Tensor
    losses: Sequence[Callable[..., LossInputs]]
    """By request, as `loss_inputs` gives them."""


class MicrobatchRunner:
    """Computes microbatches on one rank."""

    def __init__(self, base: BaseModel, world: World, keep_waiting: Callable[[float], None]) -> None:
        """`keep_waiting` is called before every microbatch with the seconds that it may take."""
        self._base = base
        self._world = world
        self._keep_waiting = keep_waiting

    def compute(self, chosen: Sequence[Members]) -> Failures:
        """Compute each rank's microbatch of `chosen`, all with a gradient or all without. Log probabilities go to the
        requests' shares, gradients to their models.

        Returns the requests that failed; nothing is then computed of their batch-mates. If the culprit is unknown,
        nothing is computed either, and every request of the microbatch is retried alone.
        """
        requests = list(dict.fromkeys(one for members in chosen for one in members))
        self._keep_waiting(max(self._limit_s(members) for members in chosen))
        own = chosen[self._world.microbatch]
        rendered, errors = self._rendered(own)
        failures: Failures = {one: errors[one.number] for one in requests if one.number in errors}
        if failures:
            return failures
        # Decoded while the device computes.
        following = {one: one.next_on(self._world.microbatch, besides=own.get(one, ())) for one in requests}
        self._prefetch(following, self._elsewhere(following))
        if self._base.memory is not None and requests[0].backward:
            self._base.memory.prepare(self._recomputed_layers(self._base.memory, chosen))
        try:
            with torch.set_grad_enabled(requests[0].backward):
                failures = self._computed(own, rendered, requests)
        except _CulpritUnknown:
            for one in requests:
                one.exclusive = True
        else:
            for one, indices in (pair for of_rank in chosen for pair in of_rank.items()):
                one.computed(indices)
        finally:
            if self._base.vision is not None:
                self._base.vision.trim()
        return failures

    def _recomputed_layers(self, memory: Memory, chosen: Sequence[Members]) -> int:
        """Return the number of layers to recompute: the same on all ranks that wait for each other, for what is
        recomputed is all-gathered or exchanged again."""
        most = max(_num_tokens(members) for members in chosen)
        layers = memory.layers_for(-(-most // self._world.num_slices))
        return largest(layers, self._world) if self._base.is_coupled else layers

    def _limit_s(self, members: Members) -> float:
        """Return the largest number of seconds that a microbatch takes."""
        num_images = sum(one.num_images(indices) for one, indices in members.items())
        return microbatch_s(_num_tokens(members), num_images, self._base.num_parameters, self._world.device)

    def _rendered(self, members: Members) -> tuple[dict[int, list[Rendered]], dict[int, InvalidInput | BackendFailed]]:
        """Return each request's rendered datums by its number, or its InvalidInput for images that do not decode."""
        vision, renderer, device = self._base.vision, self._base.renderer, self._world.device
        # In a sharded base the tower is all-gathered with the rest, when the microbatch is computed.
        begins = device.type == "cuda" and not self._base.is_sharded
        elsewhere = self._elsewhere(members)
        self._prefetch(members, elsewhere)

        def render(one: BatchRequest, indices: list[int]) -> list[Rendered]:
            rendered, known = [], self._known(one, elsewhere)
            for i in indices:
                rendered.append(renderer.render(one.data[i].model_input, f"datum {i}", known, one.layouts[i]))
                if vision is not None and begins and not one.model.config.train_vision:
                    with renderer.prefetch_paused():
                        vision.begin([image for image in rendered[-1].images if image.hash not in elsewhere], device)
            return rendered

        return agreed_each({one.number: partial(render, one, indices) for one, indices in members.items()}, self._world)

    def _elsewhere(self, members: Members) -> set[str]:
        """Return the hashes of images of which this rank's slice of the microbatch has no token."""
        if self._world.num_slices == 1:
            return set()
        lengths = [one.lengths[index] for one, index in _datums(members)]
        tokens = slice_of(sum(lengths) + num_padding(lengths, self._base.weights.token_multiple), self._world.context)
        here, all_images, begin = set[str](), set[str](), 0
        for one, index in _datums(members):
            for name, _, span in images_of(one.data[index].model_input, one.layouts[index]):
                first = begin + span.offset
                all_images.add(name)
                if first < tokens.stop and tokens.start < first + span.num_tokens:
                    here.add(name)
            begin += one.lengths[index]
        return all_images - here

    def _prefetch(self, members: Members, elsewhere: Container[str]) -> None:
        for one, indices in members.items():
            self._base.renderer.prefetch(one.inputs(indices), self._known(one, elsewhere))

    def _known(self, one: BatchRequest, elsewhere: Container[str]) -> Container[str]:
        """Return the hashes of images whose pixels are not needed: of those `elsewhere`, and of those that the tower
        has seen."""
        if one.model.config.train_vision or self._base.vision is None:
            return elsewhere
        return _Either(elsewhere, self._base.vision)

    def _computed(
        self, members: Members, rendered: dict[int, list[Rendered]], requests: Sequence[BatchRequest]
    ) -> Failures:
        """Raises _CulpritUnknown if several requests may have harmed one another."""
        try:
            models = self._models(members, requests)
            packed = agreed(lambda: self._packed(members, rendered, models), self._world)
            if self._base.is_coupled:
                observed = self._forward_backward(members, packed)
            else:
                observed = agreed(lambda: self._in_memory(members, packed), self._world)
        except Exception as error:  # one microbatch's failure must not stop the others
            if self._base.is_coupled and not isinstance(error, (InvalidInput, BackendFailed)):
                raise  # the others wait in a collective
            return _culprit(requests, to_broadcast(error))
        return self._collected(members, observed, requests)

    def _models(self, members: Members, requests: Sequence[BatchRequest]) -> list[TrainedModel]:
        """Models to load on this rank. Of a base that is itself in training every rank has a part, which the others
        gather: a rank without a datum loads the model too, and gets its part of the gradient."""
        return [one.model for one in (members if self._base.weights.base_is_frozen else requests[:1])]

    def _packed(self, members: Members, rendered: dict[int, list[Rendered]], models: Sequence[TrainedModel]) -> _Packed:
        """Bring the datums to the device, packed, and load the models."""
        samples = [
            (one, targets(of.data[index]))
            for of, indices in members.items()
            for index, one in zip(indices, rendered[of.number], strict=True)
        ]
        weights = self._base.weights
        batch = pack(samples, self._base.renderer.family, self._world.device, weights.token_multiple)
        scales_PR = weights.load(models)[: len(members)]
        counts = torch.tensor([one.num_tokens(indices) for one, indices in members.items()], dtype=torch.int64)
        if any(one.model.config.train_vision for one in members):
            batch = replace(batch, tower_scales=_tower_scales(members, rendered, scales_PR))
        if self._base.router_replay is not None:
            experts = _experts(members, rendered, self._base.router_replay, len(batch.targets_TK))
            batch = replace(batch, experts_LTK=experts)
        scales_TR = scales_PR.repeat_interleave(counts.to(scales_PR.device), 0, output_size=int(counts.sum()))
        missing = len(batch.targets_TK) - len(scales_TR)  # the padding
        scales_TR = torch.cat([scales_TR, scales_TR.new_zeros(missing, scales_TR.shape[1])])
        losses = [
            loss_inputs(one.loss, one.config, [one.data[index] for index in indices], self._world.device)
            for one, indices in members.items()
        ]
        return _Packed(batch, scales_TR, losses)

    def _in_memory(self, members: Members, packed: _Packed) -> Tensor:
        """Run `_forward_backward`, retried with the least memory if it runs out of it."""
        try:
            return self._forward_backward(members, packed)
        except torch.OutOfMemoryError:
            if self._base.memory is None:
                raise
        # Outside of the handler, whose traceback holds the failed attempt's tensors.
        self._base.weights.discard()
        self._base.memory.prepare_least()
        return self._forward_backward(members, packed)

    def _forward_backward(self, members: Members, packed: _Packed) -> Tensor:
        """Return [P, 9]: what `observe` gives for each request."""
        logprobs_TK = self._base.score(packed.batch, packed.scales_TR, _token_gradient(members, packed.losses))
        if not members:  # the others have one more microbatch: take part in their collectives, with no gradient
            if logprobs_TK.requires_grad:
                (logprobs_TK.sum() * 0).backward()
            return torch.zeros(0, 0)
        logprobs_TK = logprobs_TK[: sum(packed.batch.sample_lengths)]
        values, observed = [], []
        parts = logprobs_TK.split([one.num_tokens(indices) for one, indices in members.items()])
        for one, of_part, part_TK in zip(members, packed.losses, parts, strict=True):
            inputs = of_part(part_TK)
            values.append(one.loss.compute(inputs))
            observed.append(observe(one.loss, inputs, values[-1]))
        if logprobs_TK.requires_grad:
            torch.stack(values).sum().backward()
        self._share_logprobs(members, logprobs_TK.detach().cpu(), packed.batch.sample_lengths)
        return torch.stack(observed)

    def _share_logprobs(self, members: Members, logprobs_TK: Tensor, sample_lengths: Sequence[int]) -> None:
        for (one, index), part in zip(_datums(members), logprobs_TK.split(list(sample_lengths)), strict=True):
            target = targets(one.data[index])
            width = target.shape[1] if target.ndim == 2 else 1
            one.share.logprobs[index] = part[:, :width].reshape(target.shape).numpy()

    def _collected(self, members: Members, observed: Tensor, requests: Sequence[BatchRequest]) -> Failures:
        """Add the gradients to the models' own, once no rank has found a value that is not finite."""

        def require_finite() -> None:
            for one, indices in members.items():
                one.require_finite(indices)
            if len(requests) > 1 and requests[0].backward and not all_finite(self._base.weights.accumulated):
                raise InvalidInput("the gradient is not finite")

        def collect() -> list[list[float]]:
            if requests[0].backward:
                self._base.weights.collect(self._models(members, requests))
            return observed.tolist()

        try:
            agreed(require_finite, self._world)
        except InvalidInput as error:
            # 0 * NaN is NaN: one model's may be in what was accumulated for the others.
            return _culprit(requests, error)
        try:
            values = agreed(collect, self._world)
        except BackendFailed as error:  # some may have their gradient, so that none can be recomputed
            return dict.fromkeys(requests, error)
        for one, of_request in zip(members, values, strict=True):
            one.share.observed.append(of_request)
        return {}


def _token_gradient(members: Members, losses: Sequence[Callable[..., LossInputs]]) -> TokenGradient | None:
    """Return the gradient of the requests' losses together; None if a loss has none by token."""
    if not members or not all(one.loss.by_token for one in members):
        return None
    ends = list(accumulate(one.num_tokens(indices) for one, indices in members.items()))

    def gradient(logprobs_TK: Tensor, begin: int) -> Tensor:
        leaf_TK, values = logprobs_TK.detach().requires_grad_(), []
        with torch.enable_grad():
            for one, of_tokens, first, end in zip(members, losses, [0, *ends], ends, strict=False):
                own = slice(max(first, begin), min(end, begin + len(logprobs_TK)))
                if own.start < own.stop:
                    part_TK = leaf_TK[own.start - begin : own.stop - begin]
                    values.append(one.loss.compute(of_tokens(part_TK, slice(own.start - first, own.stop - first))))
            if not values:  # padding alone
                return torch.zeros_like(logprobs_TK)
            return torch.autograd.grad(torch.stack(values).sum(), leaf_TK)[0]

    return gradient


def _tower_scales(members: Members, rendered: dict[int, list[Rendered]], scales_PR: Tensor) -> list[Tensor | None]:
    """Return each image's scales, as `Microbatch.tower_scales`."""
    found: list[Tensor | None] = []
    for one, scales_R in zip(members, scales_PR, strict=True):
        own = scales_R if one.model.config.train_vision else None
        found += [own for datum in rendered[one.number] for _ in datum.images]
    return found


def _experts(members: Members, rendered: dict[int, list[Rendered]], replay: RouterReplay, num_tokens: int) -> Tensor:
    """Return [L, T, K], as `Microbatch.experts_LTK`; the requests' shares get the number of tokens with known
    routing."""
    parts = []
    for one, indices in members.items():
        for index, datum in zip(indices, rendered[one.number], strict=True):
            length, found = len(datum.token_ids_T), replay.find(one.owner, one.model_id, datum)
            one.share.replayed[index] = 0 if found is None else length
            parts.append((length, found))
    return replay.batch(parts, num_tokens)


class _CulpritUnknown(Exception):
    """A microbatch of several requests failed: which one is at fault shows when each runs alone."""


def _culprit(requests: Sequence[BatchRequest], error: Exception) -> Failures:
    if len(requests) > 1:
        raise _CulpritUnknown
    return {requests[0]: error}


@dataclass(frozen=True)
class _Either:
    """What one of two containers has."""

    first: Container[str]
    second: Container[str]

    def __contains__(self, name: object) -> bool:
        return name in self.first or name in self.second


def _datums(members: Members) -> list[tuple[BatchRequest, int]]:
    """Return the datums of a microbatch in the order of its tokens."""
    return [(one, index) for one, indices in members.items() for index in indices]


def _num_tokens(members: Members) -> int:
    return sum(one.num_tokens(indices) for one, indices in members.items())
