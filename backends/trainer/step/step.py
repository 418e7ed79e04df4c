"""The training step: render, pack, forward, loss, backward, collect.

A step computes a packed microbatch on each rank, all ranks side by side. Before forward the ranks agree that every
rank has its inputs: if the base is sharded, or ranks compute slices of one microbatch, an error of one rank past that
point would leave the others waiting.

T tokens of a microbatch, K targets of a token, P requests of a microbatch, R summed LoRA ranks of their models
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinker_server.api_schemas.training import ELEMENTWISE_LOSS, LOGPROBS
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.base_model import BaseModel
from tinker_server.backends.trainer.distributed import World, agreed, largest, microbatch_s, to_broadcast
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model.packing import Microbatch, loss_inputs, pack
from tinker_server.backends.trainer.model.recompute import Memory
from tinker_server.backends.trainer.model.router_replay import RouterReplay, num_known
from tinker_server.backends.trainer.model.routing import find_experts
from tinker_server.backends.trainer.model.shared_prefixes import Trie, join, keep_whole
from tinker_server.backends.trainer.optimizer import all_finite
from tinker_server.backends.trainer.step.batch_request import BatchRequest, Members, targets
from tinker_server.backends.trainer.step.images import prefetch, render
from tinker_server.backends.trainer.step.losses import MicrobatchLoss

Failures = dict[BatchRequest, Exception]


@dataclass(frozen=True)
class Part:
    """The datums of a request in this rank's microbatch."""

    request: BatchRequest
    indices: list[int]
    rendered: list[Rendered]

    trie: Trie | None
    """What is computed for them; None: all of them."""

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each datum."""
        return [self.request.lengths[index] for index in self.indices]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the datums, those that they share counted for each."""
        return sum(self.request.lengths[index] for index in self.indices)

    @property
    def num_images(self) -> int:
        """Return the number of images of which tokens are computed."""
        if self.trie is None:
            return sum(len(datum.images) for datum in self.rendered)
        return sum(
            segment.begin <= span.offset < segment.end
            for segment in self.trie.segments
            for span in self.rendered[segment.datum].spans
        )

    def share(self, name: str, values_TK: Tensor) -> None:
        """Give the request's share an output of the datums; a datum has as many columns as its targets."""
        for index, values in zip(self.indices, values_TK.split(self.lengths), strict=True):
            target = targets(self.request.data[index])
            width = target.shape[1] if target.ndim == 2 else 1
            outputs = self.request.share.outputs.setdefault(index, {})
            outputs[name] = values[:, :width].reshape(target.shape).numpy()


@dataclass(frozen=True)
class Packed:
    """Inputs of a microbatch on the device: forward and backward run without waiting for the host."""

    batch: Microbatch
    scales_TR: Tensor
    loss: MicrobatchLoss


class TrainingStep:
    """Computes packed microbatches on a rank."""

    def __init__(self, base: BaseModel, world: World, keep_waiting: Callable[[float], None]) -> None:
        """`keep_waiting` is called before every microbatch with the seconds that it may take."""
        self._base = base
        self._world = world
        self._keep_waiting = keep_waiting

    def compute(self, chosen: Sequence[Members]) -> Failures:
        """Compute each rank's microbatch of `chosen`, all with a gradient or all without. Log probabilities go to the
        requests' shares, gradients to their models.

        Return the requests that failed; their batch-mates are then not computed either. If it is unknown which request
        of a shared microbatch is at fault, none fails, and each is retried alone.
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
        if self._base.memory is not None and backward:
            self._base.memory.prepare(self._num_recomputed_layers(self._base.memory, chosen))
        parts = [
            Part(request, indices, rendered[request.number], request.trie(indices))
            for request, indices in members.items()
        ]
        models = [request.model for request in members]
        try:
            with torch.set_grad_enabled(backward):
                observed_P9 = self._run(parts, models, shares=len(requests) > 1)
        except Exception as error:  # the failure of a microbatch must not stop the others
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

    def _run(self, parts: Sequence[Part], models: Sequence[LoraModel], *, shares: bool) -> Tensor:
        """Pack, forward, loss, backward. Return [P, 9]: what `losses.observe` gives for each request. `shares`: ranks
        compute datums of several requests."""
        packed = agreed(lambda: self._pack(parts, models), self._world)
        if self._base.is_coupled:
            observed_P9 = self._forward_backward(parts, packed)
        else:
            observed_P9 = agreed(lambda: self._retry_with_least_memory(parts, packed), self._world)
        agreed(lambda: self._require_finite(parts, shares=shares), self._world)
        return observed_P9

    def _pack(self, parts: Sequence[Part], models: Sequence[LoraModel]) -> Packed:
        """Pack the datums on the device, and load the models."""
        weights, device = self._base.weights, self._world.device
        samples = [
            (rendered, targets(part.request.data[index]))
            for part in parts
            for index, rendered in zip(part.indices, part.rendered, strict=True)
        ]
        trie = None
        if any(part.trie is not None for part in parts):
            trie = join(
                [part.trie or keep_whole([len(datum.token_ids_T) for datum in part.rendered]) for part in parts]
            )
        batch = pack(samples, self._base.renderer.family, device, trie)
        scales_PR = weights.load(models)
        if any(part.request.model.config.train_vision for part in parts):
            scales = [
                scales_R if part.request.model.config.train_vision else None
                for part, scales_R in zip(parts, scales_PR, strict=True)
                for _ in range(part.num_images)
            ]
            batch = replace(batch, tower_scales=scales)
        if self._base.router_replay is not None:
            experts_LTK = _find_experts(parts, self._base.router_replay, len(batch.targets_TK))
            batch = replace(batch, experts_LTK=experts_LTK)
        losses = []
        for part in parts:
            request, datums = part.request, [part.request.data[index] for index in part.indices]
            losses.append((request.loss, loss_inputs(request.loss, request.config, datums, device), part.num_tokens))
        return Packed(batch, _token_scales(parts, scales_PR, len(batch.targets_TK)), MicrobatchLoss(losses))

    def _forward_backward(self, parts: Sequence[Part], packed: Packed) -> Tensor:
        """Return [P, 9] of `_run`. A rank without datums computes padding, and a gradient of 0, to take part in the
        collectives of the others."""
        is_known = packed.loss.by_token and packed.batch.places_NK is None  # else tokens have several losses
        token_gradient = packed.loss.token_gradient if is_known else None
        logprobs_TK = self._base.score(packed.batch, packed.scales_TR, token_gradient)
        loss, observed_P9, losses = packed.loss(logprobs_TK)
        if loss.requires_grad:
            loss.backward()
        _share_outputs(parts, logprobs_TK.detach(), losses)
        return observed_P9

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

    def _retry_with_least_memory(self, parts: Sequence[Part], packed: Packed) -> Tensor:
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


def _isolate(requests: Sequence[BatchRequest], error: Exception) -> Failures:
    """Return the only request as failed. Of several, the culprit is unknown: mark each to run alone."""
    if len(requests) == 1:
        return {requests[0]: error}
    for request in requests:
        request.exclusive = True
    return {}


def _token_scales(parts: Sequence[Part], scales_PR: Tensor, num_tokens: int) -> Tensor:
    """Return [T, R]: each token has the scales of its model, padding those of none."""
    counts = torch.tensor([part.trie.num_tokens if part.trie else part.num_tokens for part in parts], dtype=torch.int64)
    scales_TR = scales_PR.repeat_interleave(counts.to(scales_PR.device), 0, output_size=int(counts.sum()))
    return torch.cat([scales_TR, scales_TR.new_zeros(num_tokens - len(scales_TR), scales_TR.shape[1])])


def _find_experts(parts: Sequence[Part], replay: RouterReplay, num_tokens: int) -> Tensor:
    """Return [L, T, K], as `Microbatch.experts_LTK`; the requests' shares get the number of tokens with known
    routing."""
    found = []
    for part in parts:
        request, of_datums = part.request, []
        for index, datum in zip(part.indices, part.rendered, strict=True):
            names = request.owner, request.model_id
            experts = find_experts(replay, names, index, request.data[index], datum)
            request.share.replayed[index] = 0 if experts is None else num_known(experts)
            of_datums.append(experts)
        for segment in (part.trie or keep_whole(part.lengths)).segments:
            experts = of_datums[segment.datum]
            own = None if experts is None else experts[segment.begin : segment.end]
            found.append((segment.end - segment.begin, own))
    return replay.batch(found, num_tokens)


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
