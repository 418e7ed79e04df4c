"""The datums of a rank's microbatch, by their requests, and the packed microbatch that is made of them.

T tokens of a microbatch, K targets of a token, P requests of a microbatch, R summed LoRA ranks of their models, L
layers of the decoder
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.trainer.base_model import BaseModel
from tinker_server.backends.trainer.model.packing import Microbatch, pack
from tinker_server.backends.trainer.model.router_replay import UNKNOWN, RouterReplay, num_known
from tinker_server.backends.trainer.model.routing import find_experts
from tinker_server.backends.trainer.model.shared_prefixes import Trie, join, keep_whole
from tinker_server.backends.trainer.step.batch_request import BatchRequest, targets


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

    def forget(self) -> None:
        """Take back what the request's share has of the datums, which are computed again, perhaps on another rank."""
        for index in self.indices:
            self.request.share.outputs.pop(index, None)
            self.request.share.replayed.pop(index, None)


def join_tries(parts: Sequence[Part]) -> Trie | None:
    """Return what is computed for the datums of all parts; None: all of them."""
    if all(part.trie is None for part in parts):
        return None
    return join([part.trie or keep_whole(part.lengths) for part in parts])


def pack_parts(
    base: BaseModel,
    parts: Sequence[Part],
    scales_PR: Tensor,
    device: torch.device,
    experts_LTK: Tensor | None = None,
) -> tuple[Microbatch, Tensor]:
    """Pack the datums of parts on the device; `scales_PR` are those of their models, which are loaded. `experts_LTK`
    are those of the tokens; None: they are looked up, if they are replayed.

    Return also [T, R]: each token has the scales of its model, padding those of none.
    """
    samples = [
        (rendered, targets(part.request.data[index]))
        for part in parts
        for index, rendered in zip(part.indices, part.rendered, strict=True)
    ]
    batch = pack(samples, base.renderer.family, device, join_tries(parts))
    if any(part.request.model.config.train_vision for part in parts):
        scales = [
            scales_R if part.request.model.config.train_vision else None
            for part, scales_R in zip(parts, scales_PR, strict=True)
            for _ in range(part.num_images)
        ]
        batch = replace(batch, tower_scales=scales)
    if base.router_replay is not None:
        num_tokens = len(batch.targets_TK)
        if experts_LTK is None:
            experts_LTK = _find_experts(parts, base.router_replay, num_tokens)
        else:
            experts_LTK = F.pad(experts_LTK, (0, 0, 0, num_tokens - experts_LTK.shape[1]), value=UNKNOWN)
        batch = replace(batch, experts_LTK=experts_LTK)
    counts = torch.tensor([part.trie.num_tokens if part.trie else part.num_tokens for part in parts], dtype=torch.int64)
    scales_TR = scales_PR.repeat_interleave(counts.to(scales_PR.device), 0, output_size=int(counts.sum()))
    padding = len(batch.targets_TK) - len(scales_TR)
    return batch, torch.cat([scales_TR, scales_TR.new_zeros(padding, scales_TR.shape[1])])


def _find_experts(parts: Sequence[Part], replay: RouterReplay, num_tokens: int) -> Tensor:
    """Return [L, T, K], as `Microbatch.experts_LTK`; the requests' shares get the number of tokens with known
    routing."""
    found: list[tuple[int, np.ndarray | None]] = []
    for part in parts:
        request, segments = part.request, (part.trie or keep_whole(part.lengths)).segments
        of_segments: list[tuple[int, np.ndarray | None]] = [(each.end - each.begin, None) for each in segments]
        for place, (index, datum) in enumerate(zip(part.indices, part.rendered, strict=True)):
            names = request.owner, request.model_id
            experts = find_experts(replay, names, index, request.data[index], datum)
            request.share.replayed[index] = 0 if experts is None else num_known(experts)
            for number, segment in enumerate(segments):
                if experts is not None and segment.datum == place:
                    # A copy: what the datum has in common with others is not kept.
                    of_segments[number] = segment.end - segment.begin, experts[segment.begin : segment.end].copy()
        found += of_segments
    return replay.batch(found, num_tokens)
