"""The load check: a short text that travels with saved weights, and the scores that the saver gave its tokens.

Weights that are loaded wrongly (a module left out, another scale, another model's slot) give wrong numbers without an
error. So the loader scores the text too, and uses the weights only if the scores agree. In bfloat16 that finds large
mistakes only; `sampler/slot_check.py` checks that an engine's slot holds the file's values.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from backends.protocol import BackendFailed, InvalidInput

_KEY = "canary"
_NUM_TOKENS, _PERIOD = 15, 5
"""With the token that an engine samples after them they fit into the smallest context window. They repeat, so that the
later ones are likely and the first are not."""
_TOLERANCE = {"float32": (1e-3, 1e-4), "bfloat16": (0.05, 0.01)}
"""Bound of the mean difference: nats, and part of the scores' mean magnitude. Trainer and engine were seen to differ by
8e-6 at most in float32, in bfloat16 by 0.016 on average; wrongly loaded weights by 0.3 and more."""


@dataclass(frozen=True)
class LoadCheck:
    """Token ids, and the log probability of each after the first, in nats."""

    token_ids: list[int]
    logprobs: list[float]
    model_id: str = ""
    """The model whose weights they are."""

    def check_finite(self) -> None:
        """Raises InvalidInput if the scores are not finite: no sampler could use such weights."""
        if not np.isfinite(self.logprobs).all():
            raise InvalidInput(
                "the model's log probabilities are not finite: its weights have diverged; load a checkpoint, and"
                " train with a smaller learning_rate"
            )

    def check_same(self, logprobs: np.ndarray, dtype: str) -> None:
        """Raises BackendFailed if `logprobs`, computed in `dtype` by the loader of the weights, differ."""
        expected = np.array(self.logprobs)
        absolute, relative = _TOLERANCE[dtype]
        difference = np.abs(logprobs - expected).mean()
        if not difference <= absolute + relative * np.abs(expected).mean():
            raise BackendFailed(
                "the sampler's log probabilities of a test text are not the trainer's: with these weights they differ"
                f" by {difference:.3g} nats on average; the weights are not used"
            )

    def to_metadata(self) -> dict[str, str]:
        """Encode for the header of a safetensors file."""
        return {_KEY: json.dumps([self.token_ids, self.logprobs, self.model_id])}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None) -> "LoadCheck | None":
        """Decode; None for files that were written without one."""
        text = (metadata or {}).get(_KEY)
        return None if text is None else cls(*json.loads(text))


def load_check_tokens(vocab_size: int, placeholders: Collection[int]) -> np.ndarray:
    """[T] int64: a few ids from the first half of the vocabulary, repeated; none of an image's."""
    ids = [token for token in range(1, vocab_size // 2, max(1, vocab_size // 20)) if token not in placeholders]
    return np.resize(np.array(ids[:_PERIOD], np.int64), _NUM_TOKENS)
