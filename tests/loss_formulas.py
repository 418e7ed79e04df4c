"""The losses as the protocol's table and the papers write them, of one datum, without the product's code.

`new` [T] are the log probabilities of the policy in training, `old` [T] those of the policy that sampled.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor


def importance_sampling(new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -((new - old).exp() * advantages).sum()


def ppo(new: Tensor, old: Tensor, advantages: Tensor, low: float = 0.8, high: float = 1.2) -> Tensor:
    return _clipped((new - old).exp(), advantages, low, high)


def cispo(new: Tensor, old: Tensor, advantages: Tensor, low: float = 0, high: float = 4) -> Tensor:
    return -((new - old).exp().clamp(low, high).detach() * new * advantages).sum()


def dro(new: Tensor, old: Tensor, advantages: Tensor, beta: float = 0.05) -> Tensor:
    return -(new * advantages - 0.5 * beta * (new - old) ** 2).sum()


def gspo(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float = 1 - 3e-4, high: float = 1 + 4e-4
) -> Tensor:
    ratio = (new.detach() - old)[mask != 0].mean().exp()
    return _clipped(ratio * (new - new.detach()).exp(), advantages, low, high)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


_OF_POLICIES: dict[str, Callable[..., Tensor]] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
_SETTINGS = {"clip_low_threshold": "low", "clip_high_threshold": "high", "beta": "beta"}


def loss_of(loss_fn: str, new: Tensor, inputs: Mapping[str, np.ndarray], config: Mapping[str, float]) -> Tensor:
    """Return a datum's loss, by the defaults of what `config` does not name; `new` is [T, K] where targets are."""
    given = {name: torch.from_numpy(values).to(new.dtype) for name, values in inputs.items()}
    if loss_fn == "cross_entropy":
        return -(given["weights"] * new).sum()
    names = ["logprobs", "advantages", *(["sequence_ratio_mask"] if loss_fn == "gspo" else [])]
    settings = {_SETTINGS[name]: value for name, value in config.items()}
    return _OF_POLICIES[loss_fn](new, *(given[name] for name in names), **settings)
