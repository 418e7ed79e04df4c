"""A check in service: the first microbatch of each kind in which datums share beginnings is computed whole too.

The check at start (`model/sharing.py`) has short texts, of the base alone. This has what users send, with their models,
and gradients. Both ways get the same gradient of log probabilities, so that a loss that is cut off amplifies nothing.
What is accumulated is as before, to the bit: a step that is repeated after a restart gives the same numbers.

N tokens of all datums, K targets of a token, P requests of a microbatch, R summed LoRA ranks of their models
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.kernels.varlen_attention import LONG
from tinker_server.backends.trainer.base_model import BaseModel
from tinker_server.backends.trainer.distributed import World, agreed, gather_objects, largest, microbatch_s
from tinker_server.backends.trainer.model.shared_prefixes import NO_PARENT, Trie
from tinker_server.backends.trainer.step.batch_request import Members
from tinker_server.backends.trainer.step.parts import Part, join_tries, pack_parts

log = logging.getLogger(__name__)
_OF_NORM = {torch.bfloat16: 0.2}
"""Bound of the difference of gradients, as a part of their norm. In bfloat16, those of a model of 4 billion parameters
differed by 0.001 to 0.005 on an H200; a mixture's, whose routers choose anew, differ by more."""
_OF_NORM_ELSE = 0.01
_MOST_ATTEMPTS = 3
"""Microbatches of a kind that could not be compared, after which no more are tried: each may cost as much again."""
_USUAL_NATS = 5.0
"""Mean of log probabilities up to which their rounding does not grow with them."""


class SharingDiffers(Exception):
    """Datums that share beginnings have other numbers than whole. Raised on all ranks."""


class Kind(NamedTuple):
    """What decides which code computes a microbatch in which datums share beginnings."""

    is_deep: bool
    """True if beginnings have beginnings."""
    has_images: bool
    is_long: bool
    """True if attention takes its kernel for long samples."""
    has_models: bool
    """True if several models' datums are in it."""
    backward: bool

    def __str__(self) -> str:
        names = ["several levels" if self.is_deep else "a level", "images" if self.has_images else "text"]
        others = {"long": self.is_long, "several models": self.has_models, "gradients": self.backward}
        return ", ".join([*names, *(name for name, holds in others.items() if holds)])


class _Outcome(NamedTuple):
    """What a rank has found of a microbatch."""

    reason: str | None = None
    """What differs by more than rounding; None if nothing does, or this rank's datums share nothing."""
    is_compared: bool = True
    """False if they share something and could not be compared."""


class WholeCheck:
    """Knows which kinds were compared since the start: the same on all ranks."""

    def __init__(self, base: BaseModel, world: World, keep_waiting: Callable[[float], None]) -> None:
        """`keep_waiting` is called with the seconds that whole datums may take."""
        self._base = base
        self._world = world
        self._keep_waiting = keep_waiting
        self._compared: set[Kind] = set()
        self._attempts: Counter[Kind] = Counter()

    def is_due(self, chosen: Sequence[Members]) -> bool:
        """Return whether any rank's microbatch is of a kind that was not compared yet."""
        return not _kinds_of(chosen) <= self._compared

    def require_same(
        self,
        chosen: Sequence[Members],
        parts: Sequence[Part],
        scales_PR: Tensor,
        logprobs_NK: Tensor,
        experts_LTK: Tensor | None,
    ) -> None:
        """Compute this rank's microbatch whole, and compare; `logprobs_NK` has its gradient, if there is one, and what
        is accumulated is the microbatch's. `experts_LTK` are those that it had: their files may be gone. Raises
        SharingDiffers."""
        base, world = self._base, self._world
        # Where a rank's datums share nothing, none is kept, and torch warns of reading it.
        gradient_NK = logprobs_NK.grad if logprobs_NK.retains_grad else None
        has_gradient = gradient_NK is not None and bool(gradient_NK.any())
        # A model that has diverged gives nothing to compare.
        says = gather_objects((bool(logprobs_NK.isfinite().all()), has_gradient), world)
        kinds = _kinds_of([members for members, (finite, _) in zip(chosen, says, strict=True) if finite])
        # Where there is no gradient, as with advantages of 0, gradients are still to compare.
        if not any(with_gradient for _, with_gradient in says):
            kinds = {kind._replace(backward=False) for kind in kinds}
            if kinds and kinds <= self._compared:
                return
        self._keep_waiting(max(map(self._limit_s, chosen)))
        trie = join_tries(parts)
        if base.is_coupled:
            outcome = self._compare(trie, parts, scales_PR, logprobs_NK, experts_LTK)
        else:
            outcome = agreed(lambda: self._compare(trie, parts, scales_PR, logprobs_NK, experts_LTK), world)
        outcomes = gather_objects(outcome, world)
        if reasons := [outcome.reason for outcome in outcomes if outcome.reason]:
            named = "; ".join(map(str, sorted(_kinds_of(chosen) - self._compared)))
            log.error("datums that begin alike are computed whole from now on (%s): %s", named, "; ".join(reasons))
            raise SharingDiffers
        if not all(outcome.is_compared for outcome in outcomes):
            self._attempts.update(kinds)
            kinds = {kind for kind in kinds if self._attempts[kind] >= _MOST_ATTEMPTS}
            if kinds:
                log.warning("datums that begin alike are not compared with whole ones: %s", "; ".join(map(str, kinds)))
        self._compared |= kinds

    def _compare(
        self,
        trie: Trie | None,
        parts: Sequence[Part],
        scales_PR: Tensor,
        logprobs_NK: Tensor,
        experts_LTK: Tensor | None,
    ) -> _Outcome:
        accumulated = self._base.weights.accumulated
        shares = trie is not None and trie.saved > 0
        if not shares and not self._base.is_coupled:
            return _Outcome()
        kept: list[Tensor] = []
        if torch.is_grad_enabled():  # in main memory: the device is as full as it was for the microbatch
            kept = [tensor.to("cpu", copy=True) for tensor in accumulated]
            self._base.weights.discard()
            if self._base.memory is not None:
                self._base.memory.prepare_least()
        try:
            whole_NK = self._compute_whole(parts if shares else (), scales_PR, logprobs_NK, experts_LTK)
            if trie is None or not shares:
                return _Outcome()
            reason = self._logprobs_apart(trie, logprobs_NK.detach(), whole_NK)
            return _Outcome(reason) if reason else self._gradients_apart(kept)
        except torch.OutOfMemoryError:
            if self._base.is_coupled:
                raise
            return _Outcome(is_compared=False)
        finally:
            for own, tensor in zip(kept, accumulated, strict=False):
                tensor.copy_(own)

    def _compute_whole(
        self, parts: Sequence[Part], scales_PR: Tensor, logprobs_NK: Tensor, experts_LTK: Tensor | None
    ) -> Tensor:
        """Return the log probabilities [N, K] of whole datums, computed some at a time, and accumulate their gradient;
        NaN where a datum has fewer targets."""
        trie = join_tries(parts) if parts else None
        chunks = list(_chunks(parts, 0 if trie is None else trie.num_tokens))
        # Ranks that wait for each other within a microbatch compute as many.
        num_chunks = largest(len(chunks), self._world) if self._base.is_coupled else len(chunks)
        chunks += [([], [])] * (num_chunks - len(chunks))
        width, found, begin = logprobs_NK.shape[1], [logprobs_NK.detach()[:0]], 0
        device = self._world.device
        of_datums = [] if trie is None else [trie.tokens_of(datum) for datum in range(len(trie.lengths))]
        token_N = to_device(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *of_datums])), device)
        for own, rows in chunks:
            end = begin + sum(part.num_tokens for part in own)
            known_LTK = None if experts_LTK is None else experts_LTK[:, token_N[begin:end]]
            logprobs_TK = self._base.scorer(*pack_parts(self._base, own, scales_PR[rows], device, known_LTK))
            if logprobs_TK.requires_grad:
                known_TK = logprobs_TK[: end - begin]
                gradient_NK = logprobs_NK.grad if own else torch.zeros_like(logprobs_NK)
                assert gradient_NK is not None, "it is kept where datums share beginnings"
                (known_TK * gradient_NK[begin:end, : known_TK.shape[1]]).sum().backward()
            own_TK = logprobs_TK.detach()[: end - begin]
            found.append(F.pad(own_TK, (0, width - own_TK.shape[1]), value=math.nan))
            begin = end
        return torch.cat(found)

    def _logprobs_apart(self, trie: Trie, logprobs_NK: Tensor, whole_NK: Tensor) -> str | None:
        """Compare beginnings, and what follows them: each by its mean, of which a few values may be further off."""
        usual, most = self._base.allowed_nats
        follows_N = torch.cat([_follows(trie, datum) for datum in range(len(trie.lengths))]).to(whole_NK.device)
        known_NK = whole_NK.isfinite()  # others: fewer targets, or the model itself has diverged
        for rows_N, what in ((~follows_N, "beginnings"), (follows_N, "what follows beginnings")):
            of_rows_NK = known_NK & rows_N[:, None]
            whole_M = whole_NK[of_rows_NK]
            if not len(whole_M):
                continue
            nats = (logprobs_NK[of_rows_NK] - whole_M).abs().mean().item()
            allowed = usual + (most - usual) / math.sqrt(len(whole_M))
            allowed *= max(1.0, whole_M.abs().mean().item() / _USUAL_NATS)
            if not nats <= allowed:
                return (
                    f"log probabilities of {what} differ by {nats:.3g} nats on average, and {allowed:.3g} are allowed"
                )
        return None

    def _gradients_apart(self, shared: Sequence[Tensor]) -> _Outcome:
        """Compare the gradient of datums that share beginnings with what is accumulated, that of whole ones."""
        distance, norm = 0.0, 0.0
        for own, tensor in zip(shared, self._base.weights.accumulated, strict=False):
            distance = math.hypot(distance, (own.to(tensor.device) - tensor).norm().item())
            norm = math.hypot(norm, tensor.norm().item())
        allowed = _OF_NORM.get(self._base.scorer.model.dtype, _OF_NORM_ELSE)
        if not math.isfinite(norm) or distance <= allowed * norm:
            return _Outcome(is_compared=math.isfinite(norm))
        apart = distance / norm if norm else math.inf
        return _Outcome(f"gradients differ by {apart:.3g} of their norm, and {allowed:g} is allowed")

    def _limit_s(self, members: Members) -> float:
        """Return the largest number of seconds that a microbatch's datums take whole, with all layers recomputed."""
        num_tokens = sum(request.lengths[index] for request, indices in members.items() for index in indices)
        num_images = sum(request.num_images(indices) for request, indices in members.items())
        return 2 * microbatch_s(num_tokens, num_images, self._base.num_parameters, self._world.device)


def _kinds_of(chosen: Sequence[Members]) -> set[Kind]:
    """Return the kinds of the ranks' microbatches; none of those in which nothing is shared."""
    found = set()
    for members in chosen:
        tries = [(request, indices, request.trie(indices)) for request, indices in members.items()]
        shared = [(request, indices, trie) for request, indices, trie in tries if trie is not None and trie.saved]
        if shared:
            found.add(
                Kind(
                    any(level > 0 for *_, trie in shared for level, *_ in trie.spans()),
                    any(request.num_images(indices) for request, indices, _ in shared),
                    any(segment.end - segment.begin >= LONG for *_, trie in shared for segment in trie.segments),
                    len({request.model_id for request in members}) > 1,
                    shared[0][0].backward,
                )
            )
    return found


def _chunks(parts: Sequence[Part], most: int) -> Iterator[tuple[list[Part], list[int]]]:
    """Divide whole datums into microbatches of at most `most` tokens, which none has more of: as parts of a datum each,
    with the number of the part that has it."""
    chunk: list[Part] = []
    rows: list[int] = []
    used = 0
    for row, part in enumerate(parts):
        for index, rendered in zip(part.indices, part.rendered, strict=True):
            length = part.request.lengths[index]
            if chunk and used + length > most:
                yield chunk, rows
                chunk, rows, used = [], [], 0
            chunk.append(Part(part.request, [index], [rendered], None))
            rows.append(row)
            used += length
    if chunk:
        yield chunk, rows


def _follows(trie: Trie, datum: int) -> Tensor:
    """Return [N] which of a datum's tokens follow the first segment, which others may have too."""
    segment = trie.segments[trie.last[datum]]
    while segment.parent != NO_PARENT:
        segment = trie.segments[segment.parent]
    return torch.arange(trie.lengths[datum]) >= segment.end
