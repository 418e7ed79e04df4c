"""Log probabilities of targets, without ever holding [tokens, vocabulary] for a whole microbatch.

T tokens, H hidden width, V vocabulary, K targets of a position
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from backends.families.family import RenderedImage
from backends.trainer import attention
from backends.trainer.batching import Microbatch
from backends.trainer.vision import FrozenVision

MAX_LOGITS = 2**26
"""Logits held at once: 256 MiB in float32."""


class Scorer(nn.Module):
    """A model whose forward gives target log probabilities; FSDP's root, so that the head is gathered too."""

    def __init__(self, model: PreTrainedModel, vision: FrozenVision | None) -> None:
        super().__init__()
        self.model = model
        self._vision = vision

    def forward(self, model_inputs: dict[str, Tensor], images: Sequence[RenderedImage], targets_TK: Tensor) -> Tensor:
        """model_inputs describe one packed row; returns [T, K] float32, nats."""
        with ExitStack() as forward:
            image_inputs: dict[str, Tensor] = {}
            if self._vision is not None:
                image_inputs = forward.enter_context(self._vision.shown(images, targets_TK.device))
            output = self.model.base_model(**model_inputs, **image_inputs, use_cache=False)
        hidden_TH = output.last_hidden_state[0]
        return target_logprobs(hidden_TH, self.model.get_output_embeddings(), targets_TK)


def score(scorer: Scorer, batch: Microbatch) -> Tensor:
    """[T, K] float32, nats: log probabilities of a packed row's targets."""
    extra = attention.bounds(batch.cu_seqlens, batch.max_seqlen)
    result: Tensor = scorer({**batch.model_inputs, **extra}, batch.images, batch.targets_TK)
    return result


def target_logprobs(hidden_TH: Tensor, head: nn.Module, targets_TK: Tensor) -> Tensor:
    """[T, K] float32. The logits of a chunk of tokens are computed, used, and computed again in backward."""
    vocab_size: int = head.weight.shape[0]  # type: ignore[assignment, index]
    chunk = max(1, MAX_LOGITS // vocab_size)
    if len(hidden_TH) <= chunk:
        return _logprobs(hidden_TH, head, targets_TK)
    pairs = zip(hidden_TH.split(chunk), targets_TK.split(chunk), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_logprobs(hidden, head, targets) for hidden, targets in pairs])
    return torch.cat([checkpoint(_logprobs, hidden, head, targets, use_reentrant=False) for hidden, targets in pairs])


def _logprobs(hidden_TH: Tensor, head: nn.Module, targets_TK: Tensor) -> Tensor:
    logits_TV: Tensor = head(hidden_TH).float()
    return logits_TV.gather(-1, targets_TK) - logits_TV.logsumexp(-1, keepdim=True)
