"""The training step: render, pack, forward, loss, backward, collect.

A step computes a packed microbatch on each rank, all ranks side by side. Before forward the ranks agree that every
rank has its inputs: if the base is sharded, or ranks compute slices of one microbatch, an error of one rank past that
point would leave the others waiting.

T tokens of a microbatch, K targets of a token, P requests of a microbatch, R summed LoRA ranks of their models
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinker_server.api_schemas.training import ELEMENTWISE_LOSS, LOGPROBS
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.base_model import BaseModel
from tinker_server.backends.trainer.distributed import World, agreed, largest, microbatch_s, to_broadcast
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model.packing import Microbatch, loss_inputs
from tinker_server.backends.trainer.model.recompute import Memory
from tinker_server.backends.trainer.optimizer import all_finite
from tinker_server.backends.trainer.step.batch_request import BatchRequest, Members
from tinker_server.backends.trainer.step.images import prefetch, render
from tinker_server.backends.trainer.step.losses import MicrobatchLoss
from tinker_server.backends.trainer.step.parts import Part, pack_parts
from tinker_server.backends.trainer.step.whole_check import SharingDiffers, WholeCheck

Failures = dict[BatchRequest, Exception]


@dataclass(frozen=True)
class Packed:
    """Inputs of a microbatch on the device: forward and backward run without waiting for the host."""

    batch: Microbatch
    scales_PR: Tensor
    scales_TR: Tensor
    loss: MicrobatchLoss


@dataclass(frozen=True)
class Computed:
    """What forward and backward give."""

    logprobs_NK: Tensor
    """With its gradient, if datums share beginnings."""
    observed_P9: Tensor
    """What `losses.observe` gives for each request."""


class TrainingStep:
    """Computes packed microbatches on a rank."""

    def __init__(self, base: BaseModel, world: World, keep_waiting: Callable[[float], None]) -> None:
        """`keep_waiting` is called before every microbatch with the seconds that it may take."""
        self._base = base
        self._world = world
        self._keep_waiting = keep_waiting
        self._whole_check = WholeCheck(base, world, keep_waiting)

    def compute(self, chosen: Sequence[Members]) -> Failures:
        """Compute each rank's microbatch of `chosen`, all with a gradient or all without. Log probabilities go to the
        requests' shares, gradients to their models.

        Return the requests that failed; their batch-mates are then not computed either. If it is unknown which request
        of a shared microbatch is at fault, none fails, and each is retried alone. If sharing of beginnings is found to
        give other numbers, it ends, and nothing is computed.
        """
        requests = list(dict.fromkeys(request for members in chosen for request in members))
        members, backward = chosen[self._world.microbatch], requests[0].backward
        self._keep_waiting(max(map(self._limit_s, chosen)))
        rendered, errors = render(self._base, self._world, members)
        if errors:
            return {request: errors[request.number] for request in requests if request.number in errors}
        if self._base.vision is not None:  # the next images are decoded while the device computes
            rank = self._world.microbatch
            prefetch(self._base, self._world, {one: one.next_on(rank, members.get(one, ())) for one in requests})
        parts = [
            Part(request, indices, rendered[request.number], request.trie(indices))
            for request, indices in members.items()
        ]
        models = [request.model for request in members]
        try:
            with torch.set_grad_enabled(backward):
                observed_P9 = self._run(parts, models, chosen)
        except SharingDiffers:
            self._base.whole_below = None
            _forget(parts)
            return {}
        except Exception as error:  # the failure of a microbatch must not stop the others
            _forget(parts)
            if self._base.is_coupled and not isinstance(error, (InvalidInput, BackendFailed)):
                raise  # other ranks wait in a collective
            return _isolate(requests, to_broadcast(error))
        finally:
            if self._base.vision is not None:
                self._base.vision.trim()
        try:
            agreed(lambda: self._collect(parts, models if backward else [], observed_P9), self._world)
        except BackendFailed as error:  # some models may have their gradient: no request can be computed again
            return dict.fromkeys(requests, error)
        for request, indices in (pair for each in chosen for pair in each.items()):
            request.mark_computed(indices)
        return {}

    def _run(self, parts: Sequence[Part], models: Sequence[LoraModel], chosen: Sequence[Members]) -> Tensor:
        """Pack, forward, loss, backward. Return [P, 9]: what `losses.observe` gives for each request. Raises
        SharingDiffers."""
        packed = agreed(lambda: self._pack(parts, models), self._world)
        if self._base.memory is not None and torch.is_grad_enabled():  # once the buffers of a new summed rank are there
            self._base.memory.prepare(self._num_recomputed_layers(self._base.memory, chosen))
        if self._base.is_coupled:
            computed = self._forward_backward(parts, packed)
        else:
            computed = agreed(lambda: self._retry_with_least_memory(parts, packed), self._world)
        if self._base.whole_below is not None and self._whole_check.is_due(chosen):
            experts_LTK = packed.batch.experts_LTK
            self._whole_check.require_same(chosen, parts, packed.scales_PR, computed.logprobs_NK, experts_LTK)
        shares = len({request for members in chosen for request in members}) > 1
        agreed(lambda: self._require_finite(parts, shares=shares), self._world)
        return computed.observed_P9

    def _pack(self, parts: Sequence[Part], models: Sequence[LoraModel]) -> Packed:
        """Pack the datums on the device, and load the models."""
        device = self._world.device
        scales_PR = self._base.weights.load(models)
        batch, scales_TR = pack_parts(self._base, parts, scales_PR, device)
        losses = []
        for part in parts:
            request, datums = part.request, [part.request.data[index] for index in part.indices]
            losses.append((request.loss, loss_inputs(request.loss, request.config, datums, device), part.num_tokens))
        return Packed(batch, scales_PR, scales_TR, MicrobatchLoss(losses))

    def _forward_backward(self, parts: Sequence[Part], packed: Packed) -> Computed:
        """Return what is computed. A rank without datums computes padding, and a gradient of 0, to take part in the
        collectives of the others."""
        is_known = packed.loss.by_token and packed.batch.places_NK is None  # else tokens have several losses
        token_gradient = packed.loss.token_gradient if is_known else None
        logprobs_TK = self._base.score(packed.batch, packed.scales_TR, token_gradient)
        loss, observed_P9, losses = packed.loss(logprobs_TK)
        if loss.requires_grad:
            if packed.batch.places_NK is not None:
                logprobs_TK.retain_grad()
            loss.backward()
        _share_outputs(parts, logprobs_TK.detach(), losses)
        return Computed(logprobs_TK, observed_P9)

    def _require_finite(self, parts: Sequence[Part], *, shares: bool) -> None:
        """Raise InvalidInput if a log probability is not finite, or in a shared microbatch the gradient: 0 * NaN is
        NaN, so that a model's may be in what was accumulated for the others."""
        for part in parts:
            part.request.require_finite(part.indices)
        if shares and torch.is_grad_enabled() and not all_finite(self._base.weights.accumulated):
            raise InvalidInput("the gradient is not finite")

    def _collect(self, parts: Sequence[Part], models: Sequence[LoraModel], observed_P9: Tensor) -> None:
        """Add the gradients to the models' own, and what was observed to the requests' shares."""
        if models:
            self._base.weights.collect(models)
        for part, observed in zip(parts, observed_P9.tolist(), strict=True):
            part.request.share.observed.append(observed)
            part.request.share.shared += 0 if part.trie is None else part.trie.saved

    def _retry_with_least_memory(self, parts: Sequence[Part], packed: Packed) -> Computed:
        """Run `_forward_backward`; if it runs out of a GPU's memory, again with all layers recomputed."""
        try:
            return self._forward_backward(parts, packed)
        except torch.OutOfMemoryError:
            if self._base.memory is None:
                raise
        # Outside of the handler, whose traceback holds the failed attempt's tensors.
        self._base.weights.discard()
        self._base.memory.prepare_least()
        return self._forward_backward(parts, packed)

    def _num_recomputed_layers(self, memory: Memory, chosen: Sequence[Members]) -> int:
        """Return the number of layers to recompute: the same on all ranks that wait for each other, because recomputed
        layers are all-gathered or exchanged again."""
        most = max(map(_num_tokens, chosen))
        layers = memory.layers_for(-(-most // self._world.num_slices))
        return largest(layers, self._world) if self._base.is_coupled else layers

    def _limit_s(self, members: Members) -> float:
        """Return the largest number of seconds that a microbatch takes."""
        num_images = sum(request.num_images(indices) for request, indices in members.items())
        return microbatch_s(_num_tokens(members), num_images, self._base.num_parameters, self._world.device)


def _forget(parts: Sequence[Part]) -> None:
    for part in parts:
        part.forget()


def _isolate(requests: Sequence[BatchRequest], error: Exception) -> Failures:
    """Return the only request as failed. Of several, the culprit is unknown: mark each to run alone."""
    if len(requests) == 1:
        return {requests[0]: error}
    for request in requests:
        request.exclusive = True
    return {}


def _share_outputs(parts: Sequence[Part], logprobs_TK: Tensor, losses: Sequence[Tensor]) -> None:
    """Give the requests' shares the log probabilities of their datums, and what else their answers have of `losses`,
    each request's loss by position."""
    lengths = [part.num_tokens for part in parts]
    by_part = logprobs_TK.cpu()[: sum(lengths)].split(lengths)
    for part, own_TK, losses_TK in zip(parts, by_part, losses, strict=True):
        part.share(LOGPROBS, own_TK)
        if ELEMENTWISE_LOSS in part.request.loss.more_outputs:
            part.share(ELEMENTWISE_LOSS, losses_TK.cpu())


def _num_tokens(members: Members) -> int:
    return sum(request.num_tokens(indices) for request, indices in members.items())
