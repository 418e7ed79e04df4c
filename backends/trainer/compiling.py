"""The decoder's layers compiled before the first request, once for all layers, lengths, ranks and mixes of models."""

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from backends.rendering import Rendered, Renderer
from backends.trainer.batching import Microbatch, pack
from backends.trainer.lora_experts import LoraExperts
from backends.trainer.parallel import World
from backends.trainer.scoring import Scorer

log = logging.getLogger(__name__)
_WARM_UP_LENGTHS = (41, 26)
"""Their sum should be no width of a model: a length that equals one is taken for it."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have each layer compiled when it is first called, but for those of linear attention: transformers computes that
    in a loop over a row, and what is compiled of it would be of one length."""
    layers = list(layers)
    # Norms and silu(gate) * up are then computed again in backward, not kept: a quarter less memory, 1 % more time.
    torch._functorch.config.ban_recompute_materialized_backward = False
    torch._functorch.config.ban_recompute_used_far_apart = False
    # Rotated queries and keys too, which hold a concatenation. Our own operators are never computed again; nor is what
    # a router chooses, which could be another where two experts are equal.
    has_experts = any(isinstance(module, LoraExperts) for layer in layers for module in layer.modules())
    torch._functorch.config.ban_recompute_not_in_allowlist = has_experts
    torch._functorch.config.is_non_builtin_to_include = not has_experts
    for layer in layers:
        if not hasattr(layer, "linear_attn"):
            layer.compile(dynamic=True)


def warm_up(scorer: Scorer, renderer: Renderer, world: World) -> None:
    """Compile what serving needs, with a gradient and without: then nothing is compiled while it serves."""
    began = time.monotonic()
    log.info("compiling the decoder's layers, which takes about half a minute")
    for with_gradient in (True, False):
        with torch.set_grad_enabled(with_gradient):
            run_text(scorer, renderer, world, _WARM_UP_LENGTHS)
    log.info("compiled in %.0f s", time.monotonic() - began)


def run_text(scorer: Scorer, renderer: Renderer, world: World, lengths: Sequence[int]) -> None:
    """A row of made-up texts through the base alone, and back where gradients are enabled."""
    scorer.adapters.load([])
    batch = text_row(renderer, world, lengths)
    logprobs_TK = scorer(batch, scorer.adapters.blank(sum(lengths)))
    if torch.is_grad_enabled():
        logprobs_TK.sum().backward()


def text_row(renderer: Renderer, world: World, lengths: Sequence[int]) -> Microbatch:
    """A row of made-up texts."""
    texts = [np.zeros(length, np.int64) for length in lengths]
    return pack([(Rendered(text, [], []), text) for text in texts], renderer.family, world.device)
