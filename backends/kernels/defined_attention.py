"""Compares a kernel with attention as it is defined, on samples beside each other: at its first use, as a part of the
operator, so that autograd is off.

T tokens, H query heads, G key heads, D values of a head, I images, F tokens of an image
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tinker_server.backends.protocol import BackendFailed

CLOSE = 0.02
"""Largest relative distance of a kernel to another: 0.004 on an H100."""
_NOTHING = 0.1
"""Norm of the rounding of gradients that are 0: of query and key where a token sees itself alone."""
TESTED_WINDOWS, _LENGTHS = (1, 100), (129, 300)
"""Windows by which a kernel is tested, and the tokens of two samples beside each other."""
TESTED_IMAGE = slice(41, 105)
"""Tokens of each of the two samples that see each other in the test of images."""


@dataclass(frozen=True)
class Samples:
    """Random inputs of attention, and a random gradient of its output."""

    qkv: list[Tensor]
    grad_THD: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    scale: float


def random_samples(device: torch.device, dtype: torch.dtype, heads: torch.Size, num_key_heads: int) -> Samples:
    """Make the samples by which a kernel is tested; `heads` are H and D."""
    generator = torch.Generator(device).manual_seed(0)
    *qkv, grad_THD = (
        torch.randn(sum(_LENGTHS), number, heads[1], dtype=dtype, device=device, generator=generator)
        for number in (heads[0], num_key_heads, num_key_heads, heads[0])
    )
    cu_seqlens = torch.tensor([0, *accumulate(_LENGTHS)], dtype=torch.int32, device=device)
    return Samples(qkv, grad_THD, cu_seqlens, _LENGTHS, heads[1] ** -0.5)


def require_as_defined(
    attend: Callable[[Samples, int | None, Tensor | None], list[Tensor]],
    given: Samples,
    window: int | None,
    image: slice | None,
) -> None:
    """Raise BackendFailed if `attend` gives another output, or other gradients of query, key and value, than the
    definition: for a window, and for tokens of each sample that see each other."""
    cu_seqlens = given.cu_seqlens
    images_IF = None
    if image is not None:
        images_IF = cu_seqlens[:-1, None] + torch.arange(image.start, image.stop, device=cu_seqlens.device)
    found = attend(given, window, images_IF)
    samples = zip(*(tensor.split(given.lengths) for tensor in (*given.qkv, given.grad_THD)), strict=True)
    expected = [_compute_reference([*tensors], grad, given.scale, window, image) for *tensors, grad in samples]
    for result, parts in zip(found, zip(*expected, strict=True), strict=True):
        wanted = torch.cat(parts)
        error, size = (result - wanted).norm().item(), wanted.norm().item()
        if not error < CLOSE * size + _NOTHING:
            described = "" if window is None else f" with a window of {window} tokens"
            described += "" if image is None else " and tokens of images that see each other"
            raise BackendFailed(
                f"FlashAttention{described} is {error:.3g} of {size:.3g} away from its definition on this GPU: numbers"
                " would be wrong"
            )


def _compute_reference(
    qkv: list[Tensor], grad_THD: Tensor, scale: float, window: int | None, image: slice | None = None
) -> list[Tensor]:
    """Return the output [T, H, D] of a sample whose tokens see `window` tokens each, and those of `image` each other,
    and the gradients of query, key and value, for the output's gradient. Without autograd, which is off inside an
    operator."""
    query_HTD, key_GTD, value_GTD, grad_HTD = (tensor.float().transpose(0, 1) for tensor in (*qkv, grad_THD))
    group = len(query_HTD) // len(key_GTD)
    key_HTD, value_HTD = (tensor.repeat_interleave(group, 0) for tensor in (key_GTD, value_GTD))
    position_T = torch.arange(query_HTD.shape[1], device=query_HTD.device)
    behind_TT = position_T[:, None] - position_T
    is_hidden_TT = behind_TT < 0 if window is None else (behind_TT < 0) | (behind_TT >= window)
    if image is not None:
        is_hidden_TT[image, image] = False
    weights_HTT = (scale * query_HTD @ key_HTD.mT).masked_fill(is_hidden_TT, -torch.inf).softmax(-1)
    out_HTD = weights_HTT @ value_HTD
    grad_weights_HTT = grad_HTD @ value_HTD.mT - (grad_HTD * out_HTD).sum(-1, keepdim=True)
    grad_scores_HTT = scale * weights_HTT * grad_weights_HTT
    of_keys = (grad_scores_HTT.mT @ query_HTD, weights_HTT.mT @ grad_HTD)
    grad_key_GTD, grad_value_GTD = (of_key.unflatten(0, (-1, group)).sum(1) for of_key in of_keys)
    return [tensor.transpose(0, 1) for tensor in (out_HTD, grad_scores_HTT @ key_HTD, grad_key_GTD, grad_value_GTD)]
