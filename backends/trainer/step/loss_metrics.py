"""What is told of a request's loss beside its value, gathered over rows and ranks.

T positions of a row
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from backends.trainer.step.losses import CLIP_HIGH, CLIP_LOW, Loss, LossInputs

_SUMS = ("loss", "tokens", "sampler_gap", "kl_k1", "kl_k3", "ratio", "clip_fraction", "advantage")
_NUM_VALUES = len(_SUMS) + 1


def observe(loss: Loss, x: LossInputs, value: Tensor) -> Tensor:
    """[9] float32: sums over the positions that train, and the largest gap; `metrics` takes the rows' together."""
    weights = x.tensors["advantages" if loss.ratio is not None else "weights"]
    trains_T = weights != 0
    observed = torch.zeros(_NUM_VALUES, device=value.device)
    observed[0], observed[1] = value.detach(), trains_T.sum()
    if loss.ratio is None:
        return observed
    logprobs_T = x.logprobs_TK.detach()[:, 0]
    gap_T = torch.where(trains_T, logprobs_T - x.tensors["logprobs"], 0.0)
    # k1 and k3 estimate KL(drawing policy, current one): J. Schulman, "Approximating KL divergence", 2020.
    k3_T = gap_T.exp() - 1 - gap_T
    ratio_T = loss.ratio(x).detach() * trains_T
    clipped_T = torch.zeros_like(trains_T)
    if CLIP_LOW in x.tensors:
        clipped_T = trains_T & ((ratio_T < x.tensors[CLIP_LOW]) | (ratio_T > x.tensors[CLIP_HIGH]))
    for place, values_T in enumerate((gap_T.abs(), -gap_T, k3_T, ratio_T, clipped_T, weights), start=2):
        observed[place] = values_T.sum()
    observed[-1] = gap_T.abs().max()
    return observed


def metrics(rows: Iterable[Sequence[float]], loss: Loss) -> dict[str, float]:
    """By name and how the SDK is to reduce several requests' (protocol section 6.4). Means are over positions that
    train; where there is none, or one is not finite, they are left out."""
    rows = list(rows)
    sums = {name: math.fsum(row[place] for row in rows) for place, name in enumerate(_SUMS)}
    named = {"loss:sum": sums["loss"], "tokens:sum": sums["tokens"]}
    if loss.ratio is not None and sums["tokens"]:
        named |= {f"{name}:mean": sums[name] / sums["tokens"] for name in _SUMS[2:]}
        named["sampler_gap:max"] = max(row[-1] for row in rows)
    return {name: value for name, value in named.items() if name == "loss:sum" or math.isfinite(value)}
