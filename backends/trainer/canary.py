"""How a model scores the text that travels with its weights (`backends/formats/load_check.py`)."""

import numpy as np
import torch

from backends.formats.load_check import Canary, canary_tokens
from backends.inputs.rendering import Rendered
from backends.trainer.base_model import FrozenBase
from backends.trainer.model.packing import pack
from backends.trainer.trained_weights import TrainedModel


def score_canary(base: FrozenBase, device: torch.device, adapter: TrainedModel, model_id: str) -> Canary:
    """On all ranks, which compute the same; what is not finite is left in."""
    token_ids = canary_tokens(base.renderer.vocab_size, base.renderer.family.placeholders)
    batch = pack([(Rendered(token_ids, [], []), np.roll(token_ids, -1))], base.renderer.family, device)
    (scales_R,) = base.adapters.load([adapter])
    if base.memory is not None:
        base.memory.prepare(len(token_ids))
    with torch.no_grad():
        logprobs_T1 = base.score(batch, scales_R.repeat(len(token_ids), 1))
    return Canary(token_ids.tolist(), logprobs_T1[:-1, 0].tolist(), model_id)
