"""Router replay: a mixture's routers choose the experts that the sampler chose, if known (`formats/expert_routing.py`).

A token's weights for its experts are still the trainer's own, so that gradients pass through the router as always.

T tokens of a microbatch, L layers of the decoder, K experts of a token, E experts
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.formats.expert_routing import read_routing, routing_name
from backends.inputs.rendering import Rendered
from backends.kernels.pinned_copy import to_device
from backends.protocol import BackendFailed

UNKNOWN = -1
"""Instead of an expert's number: the router chooses."""


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

    def find(self, owner: str, model_id: str, rendered: Rendered) -> np.ndarray | None:
        """Return [T, L, K] int16, the experts of an input of a user's model; None if it was not sampled here, or its
        file is evicted. Raises BackendFailed for routing that cannot be of this model."""
        found = read_routing(self._directory, routing_name(owner, model_id, rendered))
        if found is None:
            return None
        shape = (len(rendered.token_ids_T), len(self._layers), self._top_k)
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
