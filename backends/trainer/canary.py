"""How a model scores the text that travels with its weights (`backends/formats/load_check.py`)."""

from dataclasses import replace

import numpy as np
import torch

from backends.formats.load_check import Canary, canary_image, canary_tokens, image_and_text
from backends.inputs.rendering import Rendered
from backends.trainer.base_model import FrozenBase
from backends.trainer.model.packing import pack
from backends.trainer.trained_weights import TrainedModel


def score_canary(
    base: FrozenBase, device: torch.device, adapter: TrainedModel, model_id: str, max_context_length: int
) -> Canary:
    """On all ranks, which compute the same; what is not finite is left in.

    A model that trains its vision tower scores an image too, where the context has room for it.
    """
    token_ids = canary_tokens(base.renderer.vocab_size, base.renderer.family.placeholders)
    text = Rendered(token_ids, [], [])
    canary = Canary(token_ids.tolist(), _scored(base, device, adapter, text)[:-1], model_id)
    if not adapter.config.train_vision:
        return canary
    image = canary_image()
    seen = base.renderer.render(image_and_text(image, canary.token_ids), "the image of a test")
    if len(seen.token_ids_T) >= max_context_length:  # an engine draws a token behind it
        return canary
    behind_image = _scored(base, device, adapter, seen)[-len(token_ids) - 1 : -1]
    return replace(canary, image=image, logprobs_behind_image=behind_image)


def _scored(base: FrozenBase, device: torch.device, adapter: TrainedModel, rendered: Rendered) -> list[float]:
    """Of each token the log probability of the next, in nats; of the last one that of the first."""
    num_tokens = len(rendered.token_ids_T)
    batch = pack([(rendered, np.roll(rendered.token_ids_T, -1))], base.renderer.family, device)
    (scales_R,) = base.adapters.load([adapter])
    if rendered.images:
        batch = replace(batch, tower_scales=[scales_R] * len(rendered.images))
    if base.memory is not None:
        base.memory.prepare(num_tokens)
    with torch.no_grad():
        logprobs_T1 = base.score(batch, scales_R.repeat(num_tokens, 1))
    scored: list[float] = logprobs_T1[:num_tokens, 0].tolist()
    return scored
