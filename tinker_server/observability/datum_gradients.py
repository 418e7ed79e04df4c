"""What a loss does to each token of a datum, in numpy: its value, and how it moves the token's log probability.

The trainer's own losses are `backends/trainer/step/losses.py`; a test compares these with their gradients.

T positions of a datum
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tinker_server.api_schemas.losses import CLIP_HIGH, CLIP_LOW

LARGEST_LOG_RATIO = 80.0
_LossAndPush = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class TokenLosses:
    """The losses of a datum's tokens."""

    logprobs_T: np.ndarray
    """Nats, as the trainer computed them."""
    loss_T: np.ndarray
    push_T: np.ndarray
    """Negative gradient of the loss by each log probability: positive where a step makes the token likelier."""


@dataclass(frozen=True)
class _Inputs:
    logprobs_T: np.ndarray
    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, float]

    @property
    def weights_T(self) -> np.ndarray:
        return np.broadcast_to(self.tensors.get("weights", np.float64(1)), self.logprobs_T.shape)

    @property
    def advantages_T(self) -> np.ndarray:
        return self.tensors["advantages"]

    @property
    def distance_T(self) -> np.ndarray:
        """Log ratio to the sampling policy, nats."""
        return np.asarray(self.logprobs_T - self.tensors["logprobs"])

    @property
    def ratio_T(self) -> np.ndarray:
        """Ratio to the sampling policy; 1 where the advantage is 0."""
        return np.asarray(np.exp(np.where(self.advantages_T == 0, 0.0, np.minimum(self.distance_T, LARGEST_LOG_RATIO))))

    def clip(self, ratio_T: np.ndarray) -> np.ndarray:
        """Return the ratio within the loss's bounds, which are float32 at the trainer."""
        low, high = (np.float32(self.tensors.get(name, self.config[name])) for name in (CLIP_LOW, CLIP_HIGH))
        return np.asarray(np.clip(ratio_T, low, high))


def _surrogate(x: _Inputs, ratio_T: np.ndarray) -> _LossAndPush:
    """Return PPO's loss. A token that is clipped has no gradient."""
    plain_T, clipped_T = ratio_T * x.advantages_T, x.clip(ratio_T) * x.advantages_T
    return -np.minimum(plain_T, clipped_T), np.where(plain_T <= clipped_T, plain_T, 0.0)


def _gspo(x: _Inputs) -> _LossAndPush:
    """Return the surrogate with a single ratio, the geometric mean inside the mask; 0 if nothing is inside."""
    inside_T = x.tensors["sequence_ratio_mask"] != 0
    if not inside_T.any():
        return np.zeros_like(x.logprobs_T), np.zeros_like(x.logprobs_T)
    ratio = np.exp(min(x.distance_T[inside_T].mean(), LARGEST_LOG_RATIO))
    return _surrogate(x, np.full_like(x.logprobs_T, ratio))


TOKEN_LOSSES: Mapping[str, Callable[[_Inputs], _LossAndPush]] = {
    "cross_entropy": lambda x: (-x.weights_T * x.logprobs_T, x.weights_T),
    "importance_sampling": lambda x: (-x.ratio_T * x.advantages_T, x.ratio_T * x.advantages_T),
    "ppo": lambda x: _surrogate(x, x.ratio_T),
    "cispo": lambda x: (
        -x.clip(x.ratio_T) * x.advantages_T * x.logprobs_T,
        x.clip(x.ratio_T) * x.advantages_T,
    ),
    "dro": lambda x: (
        0.5 * x.config["beta"] * x.distance_T**2 - x.logprobs_T * x.advantages_T,
        x.advantages_T - x.config["beta"] * x.distance_T,
    ),
    "gspo": _gspo,
}


def token_losses(
    loss_fn: str, config: Mapping[str, float], tensors: Mapping[str, np.ndarray], logprobs_T: np.ndarray
) -> TokenLosses:
    """Return the losses of a datum's tokens.

    config      the loss's, with its defaults
    tensors     loss_fn_inputs of the datum, [T] each
    logprobs_T  [T] float32, nats: as the trainer computed them
    """
    floats = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    loss_T, push_T = TOKEN_LOSSES[loss_fn](_Inputs(logprobs_T.astype(np.float64), floats, config))
    return TokenLosses(logprobs_T, loss_T, push_T)
