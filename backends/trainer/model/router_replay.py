"""Router replay: a mixture's routers choose the experts that the sampler chose, if known (`formats/expert_routing.py`).

A token's weights for its experts are still the trainer's own, so that gradients pass through the router as always.

T tokens of a microbatch, L layers of the decoder, K experts of a token, E experts
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tinker_server.api_schemas.inputs import TokenRun
from tinker_server.backends.formats.expert_routing import (
    identities,
    read_routing,
    read_sequence,
    routing_name,
    sequence_name,
)
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.protocol import BackendFailed, InvalidInput

UNKNOWN = -1
"""Instead of an expert's number: the router chooses."""


def num_known(experts_TLK: np.ndarray) -> int:
    """Count the tokens whose experts are known."""
    return int((experts_TLK[:, 0, 0] != UNKNOWN).sum())


class TopKRouter(Protocol):
    """One of transformers' routers."""

    weight: Tensor
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    """Not all have it: without it, all normalise."""
    routed_scaling_factor: float
    """By which a router multiplies the weights whose scores are sigmoids, not a softmax; others have none."""

    def __call__(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], and weights and experts [T, K]."""


class ReplayingRouter(nn.Module):
    """Replaces a layer's router."""

    experts_TK: Tensor
    """Experts of the current microbatch, or `UNKNOWN`."""

    def __init__(self, base: TopKRouter) -> None:
        super().__init__()
        self.base = base
        self._normalises = getattr(base, "norm_topk_prob", True)
        self._factor: float | None = getattr(base, "routed_scaling_factor", None)

    def forward(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], and experts and their weights [T, K], as `base` gives them."""
        logits_TE, own_weights_TK, own_TK = self.base(hidden_TH)
        replayed_TK = self.experts_TK.to(own_TK.dtype)
        experts_TK = torch.where(replayed_TK == UNKNOWN, own_TK, replayed_TK)
        is_softmax = self._factor is None
        scores_TE = F.softmax(logits_TE, dtype=torch.float32, dim=-1) if is_softmax else logits_TE.float().sigmoid()
        weights_TK = scores_TE.gather(-1, experts_TK)
        if self._normalises:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if self._factor is not None:
            weights_TK = weights_TK * self._factor
        return logits_TE, weights_TK.to(own_weights_TK.dtype), experts_TK


class RouterReplay:
    """All routers of a decoder."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        """Replace the routers in place. `directory` is where the sampler of this model writes its routing. Raises
        BackendFailed for routers that are not known here."""
        self._directory = directory
        self._layers = model.get_decoder().layers
        self._routers: dict[int, ReplayingRouter] = {}
        for index, layer in enumerate(self._layers):
            for name, module in [*layer.named_modules()]:
                if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
                    self._routers[index] = ReplayingRouter(module)
                    layer.set_submodule(name, self._routers[index])
        if not self._routers:
            raise BackendFailed(
                f"{type(model).__name__}: it has no routers whose choices could be replayed; leave the setting"
                " backend.replay_routing off"
            )
        (self._num_experts,) = {router.base.num_experts for router in self._routers.values()}
        (self._top_k,) = {router.base.top_k for router in self._routers.values()}
        self._device = next(iter(self._routers.values())).base.weight.device

    def find(self, owner: str, model_id: str, rendered: Rendered, runs: Sequence[TokenRun] = ()) -> np.ndarray | None:
        """Return [T, L, K] int16, the experts of an input of a user's model, or `UNKNOWN` for some of its tokens; None
        if it was not sampled here, or its files are evicted. `runs`: the sampled sequences that it comes from.

        Raises BackendFailed for routing that cannot be of this model, InvalidInput for other tokens than a run's.
        """
        if (of_runs := self._of_runs(owner, rendered, runs)) is not None:
            return of_runs
        found = read_routing(self._directory, routing_name(owner, model_id, rendered))
        return None if found is None else self._checked(found, len(rendered.token_ids_T))

    def _of_runs(self, owner: str, rendered: Rendered, runs: Sequence[TokenRun]) -> np.ndarray | None:
        """Implement `find` by the sequences that runs name; None if none of them is known."""
        names = {run.sequence_id: sequence_name(owner, run.sequence_id) for run in runs}
        read = {key: read_sequence(self._directory, name) for key, name in names.items()}
        if not any(read.values()):
            return None
        tokens_T = identities(rendered)
        experts_TLK = np.full((len(tokens_T), len(self._layers), self._top_k), UNKNOWN, np.int16)
        begin = 0
        for run in runs:
            if (found := read[run.sequence_id]) is not None:
                of_sequence_TLK, sequence = found
                parts = {"prompt": (0, sequence.num_prompt), "sampled": (sequence.num_prompt, len(sequence.tokens_S))}
                first, end = parts[run.part]
                place = slice(first + run.offset, min(first + run.offset + run.length, end))
                if not np.array_equal(sequence.tokens_S[place], tokens_T[begin : begin + run.length]):
                    raise InvalidInput(
                        f"model_input_spans: the {run.length} tokens from {begin} on are not the {run.part} tokens of"
                        f" the sequence {run.sequence_id} from {run.offset} on"
                    )
                rows = self._checked(of_sequence_TLK, len(sequence.tokens_S) - 1)[place]
                experts_TLK[begin : begin + len(rows)] = rows
            begin += run.length
        return experts_TLK

    def _checked(self, found: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return experts of this many tokens as int16. Raises BackendFailed if they cannot be of this model."""
        shape = (num_tokens, len(self._layers), self._top_k)
        if found.shape != shape or found.max(initial=0) >= self._num_experts:
            raise BackendFailed(
                f"the sampler wrote routing of shape {found.shape}, to experts up to {found.max(initial=0)}, but"
                f" {shape} and fewer than {self._num_experts} were due"
            )
        return found.astype(np.int16)

    def batch(self, parts: list[tuple[int, np.ndarray | None]], num_tokens: int) -> Tensor:
        """Return [L, T, K] int16 on the device; `parts` are each sample's tokens and what `find` gave."""
        experts_TLK = np.full((num_tokens, len(self._layers), self._top_k), UNKNOWN, np.int16)
        begin = 0
        for length, found in parts:
            if found is not None:
                experts_TLK[begin : begin + length] = found
            begin += length
        return to_device(torch.from_numpy(np.ascontiguousarray(experts_TLK.transpose(1, 0, 2))), self._device)

    def blank(self, num_tokens: int) -> Tensor:
        """Return [L, T, K] of a microbatch without known routing."""
        shape = (len(self._layers), num_tokens, self._top_k)
        return torch.full(shape, UNKNOWN, dtype=torch.int16, device=self._device)

    def use(self, experts_LTK: Tensor) -> None:
        """Set the routing of the next forward."""
        for index, router in self._routers.items():
            # .data: code compiled for a tensor is recompiled for a view of another.
            router.experts_TK = experts_LTK[index].data
