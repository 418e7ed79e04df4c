"""The losses of the protocol (docs/protocol.md, Training), the table that names them, and their metrics.

Each is a pure function, which returns the loss of every position. A loss is their sum, never a mean: requests,
microbatches and ranks then add up.

T positions of a microbatch, K targets of a position, B datums
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinker_server.api_schemas.losses import CLIP_HIGH, CLIP_LOW, LOSS_CONFIG
from tinker_server.api_schemas.training import MORE_OUTPUTS

LARGEST_LOG_RATIO = 80.0
"""nats. A larger log ratio counts as this, in value and gradient: e^80 is 5.5e34, and float32 ends at 3.4e38."""


def cross_entropy(logprobs_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return [T, K] -weight * logprob. Weights may be negative or large: they may be any gradient.

    logprobs_TK  [T, K] float32, nats: of the targets, carries the gradient
    weights_TK   [T, K] float32
    """
    return -(weights_TK * logprobs_TK)


def importance_sampling(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return [T] -ratio * advantage, ratio = exp(logprob - old logprob): REINFORCE corrected for the sampling policy.

    logprobs_T      [T] float32, nats: current policy, carries the gradient
    old_logprobs_T  [T] float32, nats: the policy that sampled the tokens
    advantages_T    [T] float32: 0 where a token must not train
    """
    return -(_ratio(logprobs_T, old_logprobs_T, advantages_T) * advantages_T)


def ppo(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, low_T: Tensor, high_T: Tensor) -> Tensor:
    """Return [T], the clipped surrogate loss (Schulman et al. 2017, eq. 7, arXiv:1707.06347).

    low_T, high_T  [T] float32: bounds of the probability ratio itself, e.g. 0.8 and 1.2
    """
    ratio_T = _ratio(logprobs_T, old_logprobs_T, advantages_T)
    clipped_T = ratio_T.clamp(low_T, high_T)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)


def _ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return [T] exp(logprob - old logprob), with its gradient; 1 where the advantage is 0, so that no old log
    probability of a token that must not train can make inf * 0."""
    log_ratio_T = torch.where(advantages_T == 0, 0.0, logprobs_T - old_logprobs_T)
    # Not a clamp alone, whose gradient would be 0: the token would silently not train.
    excess_T = (log_ratio_T - log_ratio_T.clamp(max=LARGEST_LOG_RATIO)).detach()
    return (log_ratio_T - excess_T).exp()


def cispo(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, low_T: Tensor, high_T: Tensor) -> Tensor:
    """Return [T], the loss whose clipped importance weights are constants (MiniMax-M1, eq. 4, arXiv:2506.13585)."""
    weight_T = _ratio(logprobs_T.detach(), old_logprobs_T, advantages_T).clamp(low_T, high_T)
    return -(weight_T * logprobs_T * advantages_T)


def dro(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, beta: float) -> Tensor:
    """Return [T], direct reward optimisation per token (Richemond et al. 2024, arXiv:2405.19107): a quadratic penalty
    beta/2 * (logprob - old logprob)^2 in place of a ratio."""
    return -(logprobs_T * advantages_T - 0.5 * beta * (logprobs_T - old_logprobs_T) ** 2)


def gspo(  # noqa: PLR0913
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    low_T: Tensor,
    high_T: Tensor,
    *,
    datum_T: Tensor,
    num_datums: int,
) -> Tensor:
    """Return [T], group sequence policy optimisation in its token form (Zheng et al. 2025, eq. 13, arXiv:2507.18071).

    The ratio of a datum is the geometric mean over its positions with mask != 0; each token carries its
    gradient through its own log probability. A datum without such a position has no ratio, and contributes 0.

    mask_T   [T] float32: sequence_ratio_mask
    datum_T  [T] int64: which datum a position belongs to, 0 .. num_datums - 1
    """
    sequence_T = _sequence_ratio(logprobs_T.detach(), old_logprobs_T, mask_T, datum_T, num_datums)
    ratio_T = sequence_T * (logprobs_T - logprobs_T.detach()).exp()
    clipped_T = ratio_T.clamp(low_T, high_T)
    value_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    return -torch.where(_num_inside(mask_T, datum_T, num_datums) > 0, value_T, 0.0)


def _num_inside(mask_T: Tensor, datum_T: Tensor, num_datums: int) -> Tensor:
    """Return [T] how many positions with mask != 0 the datum of each position has."""
    return mask_T.new_zeros(num_datums).index_add(0, datum_T, (mask_T != 0).float())[datum_T]


def _sequence_ratio(
    logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor, datum_T: Tensor, num_datums: int
) -> Tensor:
    """Return the ratio of each position's datum [T]."""
    log_ratio_T = torch.where(mask_T != 0, logprobs_T - old_logprobs_T, 0.0)
    total_B = logprobs_T.new_zeros(num_datums).index_add(0, datum_T, log_ratio_T)
    mean_T = total_B[datum_T] / _num_inside(mask_T, datum_T, num_datums).clamp(min=1)
    return mean_T.clamp(max=LARGEST_LOG_RATIO).exp()


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss for a microbatch."""

    logprobs_TK: Tensor
    tensors: Mapping[str, Tensor]
    """By input name, [T, K] for cross_entropy, else [T]."""
    config: Mapping[str, float]
    datum_T: Tensor
    num_datums: int


@dataclass(frozen=True)
class Loss:
    """A loss, and its inputs besides target_tokens."""

    by_position: Callable[[LossInputs], Tensor]
    """Returns the loss of every position, of cross_entropy of every target; the loss is their sum."""
    required: tuple[str, ...] = ()
    optional: Mapping[str, str | float] = field(default_factory=dict)
    """Inputs that may be absent, and the value that every position then has: a number, or a config key's value."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Config keys and their defaults."""
    more_outputs: tuple[str, ...] = ()
    """The tensors that an answer has of each datum besides its log probabilities."""
    soft_targets: bool = False
    """Takes target_tokens of shape [N, K]."""
    by_token: bool = True
    """True if the gradient of a token depends on no other token's log probability."""
    ratio: Callable[[LossInputs], Tensor] | None = None
    """[T] ratio of the current policy's probability to the sampling policy's, as the loss clips it."""
    trains: Callable[[LossInputs], Tensor] = lambda x: x.tensors["advantages"] != 0
    """[T] or [T, K] bool: what the loss trains, apart from a penalty."""


_RL = ("logprobs", "advantages")
_CLIP = {CLIP_LOW: CLIP_LOW, CLIP_HIGH: CLIP_HIGH}


def _rl(x: LossInputs, *more: str) -> list[Tensor]:
    return [x.logprobs_TK[:, 0], *(x.tensors[name] for name in (*_RL, *more))]


def _token_ratio(x: LossInputs) -> Tensor:
    return _ratio(*_rl(x))


def _trains_a_sequence(x: LossInputs) -> Tensor:
    num_inside_T = _num_inside(x.tensors["sequence_ratio_mask"], x.datum_T, x.num_datums)
    return (x.tensors["advantages"] != 0) & (num_inside_T > 0)


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        lambda x: cross_entropy(x.logprobs_TK, x.tensors["weights"]),
        optional={"weights": 1.0},
        more_outputs=MORE_OUTPUTS["cross_entropy"],
        soft_targets=True,
        trains=lambda x: x.tensors["weights"] != 0,
    ),
    "importance_sampling": Loss(lambda x: importance_sampling(*_rl(x)), _RL, ratio=_token_ratio),
    "ppo": Loss(lambda x: ppo(*_rl(x, *_CLIP)), _RL, _CLIP, LOSS_CONFIG["ppo"], ratio=_token_ratio),
    "cispo": Loss(lambda x: cispo(*_rl(x, *_CLIP)), _RL, _CLIP, LOSS_CONFIG["cispo"], ratio=_token_ratio),
    "dro": Loss(lambda x: dro(*_rl(x), beta=x.config["beta"]), _RL, config=LOSS_CONFIG["dro"], ratio=_token_ratio),
    "gspo": Loss(
        lambda x: gspo(*_rl(x, "sequence_ratio_mask", *_CLIP), datum_T=x.datum_T, num_datums=x.num_datums),
        (*_RL, "sequence_ratio_mask"),
        _CLIP,
        LOSS_CONFIG["gspo"],
        by_token=False,
        ratio=lambda x: _sequence_ratio(
            x.logprobs_TK[:, 0], x.tensors["logprobs"], x.tensors["sequence_ratio_mask"], x.datum_T, x.num_datums
        ),
        trains=_trains_a_sequence,
    ),
}


_SUMS = ("loss", "tokens", "sampler_gap", "kl_k1", "kl_k3", "ratio", "clip_fraction", "advantage")
_NUM_VALUES = len(_SUMS) + 1


def observe(loss: Loss, x: LossInputs, value: Tensor) -> Tensor:
    """Return [9] float32: sums over the positions that train, and the largest gap; `metrics` combines microbatches."""
    trains_T = loss.trains(x)
    observed = torch.zeros(_NUM_VALUES, device=value.device)
    observed[0], observed[1] = value.detach(), trains_T.sum()
    if loss.ratio is None:
        return observed
    logprobs_T = x.logprobs_TK.detach()[:, 0]
    gap_T = torch.where(trains_T, logprobs_T - x.tensors["logprobs"], 0.0)
    # k1 and k3 estimate KL(sampling policy, current policy): J. Schulman, "Approximating KL divergence", 2020.
    k3_T = gap_T.exp() - 1 - gap_T
    ratio_T = loss.ratio(x).detach() * trains_T
    advantages_T = x.tensors["advantages"] * trains_T
    clipped_T = torch.zeros_like(trains_T)
    if CLIP_LOW in x.tensors:
        clipped_T = trains_T & ((ratio_T < x.tensors[CLIP_LOW]) | (ratio_T > x.tensors[CLIP_HIGH]))
    for index, values_T in enumerate((gap_T.abs(), -gap_T, k3_T, ratio_T, clipped_T, advantages_T), start=2):
        observed[index] = values_T.sum()
    observed[-1] = gap_T.abs().max()
    return observed


class MicrobatchLoss:
    """The loss of a packed microbatch: the sum of its requests' losses, each of the request's own tokens."""

    def __init__(self, parts: Sequence[tuple[Loss, Callable[..., LossInputs], int]]) -> None:
        """`parts` has each request's loss, its inputs as `packing.loss_inputs` gives them, and its number of tokens, in
        the order of the tokens; empty: there is padding alone."""
        self._parts = parts
        self._num_tokens = [num_tokens for _, _, num_tokens in parts]
        self.by_token = bool(parts) and all(loss.by_token for loss, _, _ in parts)
        """True if the gradient of a token depends on no other token's log probability."""

    def __call__(self, logprobs_TK: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the loss [], [P, 9] what `observe` gives for each of P requests, and without a gradient each request's
        loss by position; tokens behind theirs are padding."""
        if not self._parts:
            return logprobs_TK.sum() * 0, logprobs_TK.new_zeros(0, _NUM_VALUES), []
        values, observed, by_position = [], [], []
        by_request = logprobs_TK[: sum(self._num_tokens)].split(self._num_tokens)
        for (loss, inputs, _), part_TK in zip(self._parts, by_request, strict=True):
            given = inputs(part_TK)
            losses = loss.by_position(given)
            by_position.append(losses.detach())
            values.append(losses.sum())
            observed.append(observe(loss, given, values[-1]))
        return torch.stack(values).sum(), torch.stack(observed), by_position

    def token_gradient(self, logprobs_TK: Tensor, begin: int) -> Tensor:
        """Return the gradient [T, K] of the loss by these log probabilities, which are those of the microbatch's tokens
        from `begin` on. Only if the loss is `by_token`."""
        leaf_TK, values, first = logprobs_TK.detach().requires_grad_(), [], 0
        with torch.enable_grad():
            for loss, inputs, num_tokens in self._parts:
                own = slice(max(first, begin), min(first + num_tokens, begin + len(logprobs_TK)))
                if own.start < own.stop:
                    part_TK = leaf_TK[own.start - begin : own.stop - begin]
                    given = inputs(part_TK, slice(own.start - first, own.stop - first))
                    values.append(loss.by_position(given).sum())
                first += num_tokens
            if not values:  # padding alone
                return torch.zeros_like(logprobs_TK)
            return torch.autograd.grad(torch.stack(values).sum(), leaf_TK)[0]


def metrics(observations: Iterable[Sequence[float]], loss: Loss) -> dict[str, float]:
    """Return metrics by name and reduction, which is how the SDK combines several requests' (protocol section 6.4).
    Means are over positions that train; without any, or if any is not finite, they are left out."""
    observations = list(observations)
    sums = {name: math.fsum(observation[index] for observation in observations) for index, name in enumerate(_SUMS)}
    named = {"loss:sum": sums["loss"], "tokens:sum": sums["tokens"]}
    if loss.ratio is not None and sums["tokens"]:
        named |= {f"{name}:mean": sums[name] / sums["tokens"] for name in _SUMS[2:]}
        named["sampler_gap:max"] = max(observation[-1] for observation in observations)
    return {name: value for name, value in named.items() if name == "loss:sum" or math.isfinite(value)}
