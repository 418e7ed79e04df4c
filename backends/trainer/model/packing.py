"""Pack datums into microbatches: whole samples, one token budget, about as many tokens on every rank.

A packed microbatch holds several samples one after the other. Position ids restart at each; so the model keeps them
from attending to one another.

T tokens of the microbatch, K targets of a token, I images, F features of an image
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from api_schemas.inputs import Datum
from backends.families.family import Family, RenderedImage
from backends.inputs.rendering import Rendered
from backends.kernels.pinned_copy import to_device
from backends.trainer.step.losses import Loss, LossInputs

_BISECTIONS = 8
"""Bisections of a microbatch's size: 1/256 of the budget is even enough."""


def plan_steps(lengths: Sequence[int], side_by_side: int, max_tokens: int) -> list[list[list[int]]]:
    """Plan the microbatches of every rank: plan[step][rank] is a list of datum indices, the longest microbatches first.
    Ranks that compute slices of one microbatch count as one.

    There are as few steps as microbatches of `max_tokens` need, and the microbatches are then as even as possible, so
    that no rank waits for another; one with nothing to do is empty. A datum of more than `max_tokens` is alone. Depends
    on its arguments only, so that all ranks make the same plan without asking each other.
    """
    parts = _first_fit(lengths, max_tokens)
    num_parts = side_by_side * math.ceil(len(parts) / side_by_side)
    too_small = max(max(lengths), math.ceil(sum(lengths) / num_parts)) - 1
    small_enough = max_tokens
    for _ in range(_BISECTIONS if too_small < max_tokens and num_parts > 1 else 0):
        if (size := (too_small + small_enough + 1) // 2) == small_enough:
            break
        if len(smaller := _first_fit(lengths, size)) <= num_parts:
            parts, small_enough = smaller, size
        else:
            too_small = size
    parts = sorted((sorted(part) for part in parts), key=lambda part: -sum(lengths[index] for index in part))
    parts += [[] for _ in range(-len(parts) % side_by_side)]
    return [parts[start : start + side_by_side] for start in range(0, len(parts), side_by_side)]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign the longest first, each to the first part that has room."""
    parts: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for part, total in enumerate(used):
            if total + lengths[index] <= max_tokens:
                parts[part].append(index)
                used[part] += lengths[index]
                break
        else:
            parts.append([index])
            used.append(lengths[index])
    return parts


@dataclass(frozen=True)
class Microbatch:
    """A packed microbatch on the device."""

    model_inputs: dict[str, Tensor]
    """Token and position ids, named as in the model's forward."""
    images: list[RenderedImage]
    """Images in the order of their placeholders."""
    cu_seqlens: Tensor
    """[samples + 1] int32: first token of each sample, and end of the last."""
    cu_seqlens_host: Tensor
    """The same, on the host."""
    max_seqlen: int
    targets_TK: Tensor
    tower_scales: Sequence[Tensor | None] = ()
    """By image, its model's scales [R] if that trains the vision tower, else None; empty: none does."""
    feature_tokens: Callable[[], list[np.ndarray]] = list
    """Finds by image the indices of the whole microbatch's tokens whose embeddings its features replace."""
    whole_images_IF: Tensor | None = None
    """By image, indices of the whole microbatch's tokens that see each other; None: no image's do."""
    feature_parts: Sequence[slice] | None = None
    """By image, those of its features that a slice of a microbatch has; None: all."""
    experts_LTK: Tensor | None = None
    """Experts as `RouterReplay.batch` gives them; None: routers choose."""


def num_padding(lengths: Sequence[int]) -> int:
    """Return the padding in tokens: two for a microbatch without samples, of a rank that only takes part in
    collectives, or without a sample of two tokens. Code compiled for any number of tokens is recompiled for one."""
    return 0 if max(lengths, default=0) >= 2 else 2


def pack(samples: Sequence[tuple[Rendered, np.ndarray]], family: Family, device: torch.device) -> Microbatch:
    """Pack samples of (input, targets [N] or [N, K]), with the padding of `num_padding`: a sample of no request, at the
    end."""
    if missing := num_padding([len(rendered.token_ids_T) for rendered, _ in samples]):
        samples = [*samples, (Rendered(np.zeros(missing, np.int64), [], []), np.zeros(missing, np.int64))]
    lengths = [len(rendered.token_ids_T) for rendered, _ in samples]
    position_ids = np.concatenate(
        [family.position_ids(length, one.spans) for length, (one, _) in zip(lengths, samples, strict=True)], axis=-1
    )
    token_ids = np.concatenate([rendered.token_ids_T for rendered, _ in samples])[None]
    model_inputs = {
        "input_ids": to_device(torch.from_numpy(token_ids), device),
        "position_ids": to_device(torch.from_numpy(position_ids), device),
    }
    ends = np.concatenate([[0], np.cumsum(lengths)])
    cu_seqlens = torch.from_numpy(ends.astype(np.int32))
    feature_tokens = partial(_feature_tokens, [rendered for rendered, _ in samples], ends[:-1], family)
    sees_images = family.sees_whole_images and any(rendered.spans for rendered, _ in samples)
    return Microbatch(
        model_inputs,
        [image for rendered, _ in samples for image in rendered.images],
        to_device(cu_seqlens, device),
        cu_seqlens,
        max(lengths),
        to_device(torch.from_numpy(_side_by_side([targets for _, targets in samples], 0)), device),
        feature_tokens=feature_tokens,
        whole_images_IF=to_device(torch.from_numpy(np.stack(feature_tokens())), device) if sees_images else None,
    )


def _feature_tokens(samples: Sequence[Rendered], begins: np.ndarray, family: Family) -> list[np.ndarray]:
    """Implement `Microbatch.feature_tokens`."""
    return [
        begin + feature
        for begin, rendered in zip(begins, samples, strict=True)
        for feature in _features(rendered, family)
    ]


def _features(rendered: Rendered, family: Family) -> Iterator[np.ndarray]:
    """Yield for each image the tokens whose embeddings its features replace."""
    if family.vision is None:
        return
    for span in rendered.spans:
        own = rendered.token_ids_T[span.offset : span.offset + span.num_tokens]
        yield span.offset + np.flatnonzero(own == family.vision.feature_id)


def loss_inputs(
    loss: Loss, config: Mapping[str, float], datums: Sequence[Datum], device: torch.device
) -> Callable[..., LossInputs]:
    """Return a function of log probabilities [T, K] that gives the datums' loss inputs, in the order of their samples,
    or those of a slice of their tokens. Values beyond a datum's own K are 0. The datums' tensors are on the device
    before."""
    lengths = [len(datum.loss_fn_inputs["target_tokens"]) for datum in datums]
    tensors = {}
    for name in (*loss.required, *loss.optional):
        parts = [_input(loss, config, datum, name) for datum in datums]
        values = _side_by_side(parts, 0.0).astype(np.float32)
        on_device = to_device(torch.from_numpy(values), device)
        tensors[name] = on_device if loss.soft_targets else on_device[:, 0]
    datum_T = to_device(torch.repeat_interleave(torch.arange(len(datums)), torch.tensor(lengths)), device)

    def of_tokens(logprobs_TK: Tensor, tokens: slice = slice(None)) -> LossInputs:
        given = {name: tensor[tokens] for name, tensor in tensors.items()}
        return LossInputs(logprobs_TK, given, config, datum_T[tokens], len(datums))

    return of_tokens


def _input(loss: Loss, config: Mapping[str, float], datum: Datum, name: str) -> np.ndarray:
    given = datum.loss_fn_inputs.get(name)
    if given is not None:
        return given
    fill = loss.optional[name]
    value = config[fill] if isinstance(fill, str) else fill
    return np.full(datum.loss_fn_inputs["target_tokens"].shape, value, np.float32)


def _side_by_side(arrays: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """Concatenate arrays of shape [N] or [N, K'] to [T, K], K the largest K'."""
    parts = [array.reshape(len(array), -1) for array in arrays]
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill) for part in parts])
