"""Datums to microbatches: packed rows of whole samples, one token budget, as many tokens on every rank.

A packed row holds several samples one after the other. Position ids restart at each, which is how the
model keeps them from attending to one another.

T tokens of the packed row, K alternatives of a target
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from api_schemas.inputs import Datum
from backends.families.family import Family, RenderedImage
from backends.inputs.rendering import Rendered
from backends.kernels.pinned_copy import to_device
from backends.trainer.step.losses import Loss, LossInputs

_BISECTIONS = 8
"""Of the size of rows: 1/256 of the budget is even enough."""


def plan_steps(lengths: Sequence[int], world_size: int, max_tokens: int) -> list[list[list[int]]]:
    """Which datums each rank computes together: plan[step][rank] is a list of datum indices, the longest rows first.

    As few steps as rows of `max_tokens` need, and rows then as even as they can be, so that no rank waits for
    another; a row with nothing to do is empty. A datum of more than `max_tokens` has a row of its own. Depends on
    nothing but its arguments, so that all ranks make the same plan without asking each other.
    """
    rows = _rows(lengths, max_tokens)
    num_rows = world_size * math.ceil(len(rows) / world_size)
    too_small = max(max(lengths), math.ceil(sum(lengths) / num_rows)) - 1
    small_enough = max_tokens
    for _ in range(_BISECTIONS if too_small < max_tokens else 0):
        if (size := (too_small + small_enough + 1) // 2) == small_enough:
            break
        if len(smaller := _rows(lengths, size)) <= num_rows:
            rows, small_enough = smaller, size
        else:
            too_small = size
    rows = sorted((sorted(row) for row in rows), key=lambda row: -sum(lengths[index] for index in row))
    rows += [[] for _ in range(-len(rows) % world_size)]
    return [rows[start : start + world_size] for start in range(0, len(rows), world_size)]


def _rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit, the longest first."""
    rows: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row, total in enumerate(used):
            if total + lengths[index] <= max_tokens:
                rows[row].append(index)
                used[row] += lengths[index]
                break
        else:
            rows.append([index])
            used.append(lengths[index])
    return rows


@dataclass(frozen=True)
class Microbatch:
    """One packed row, on the device, as the model's forward names it."""

    model_inputs: dict[str, Tensor]
    images: list[RenderedImage]
    """In the order of their placeholders."""
    cu_seqlens: Tensor
    """[samples + 1] int32: where each sample begins in the row, and where the last one ends."""
    bounds: Tensor
    """The same, on the host."""
    max_seqlen: int
    targets_TK: Tensor
    sample_lengths: list[int]
    """Of the samples that were given; what follows in the row is nobody's."""
    tower_scales: Sequence[Tensor | None] = ()
    """Of each image, its model's scales [R] where that trains the vision tower, else None; empty: none does."""
    experts_LTK: Tensor | None = None
    """What `Replay.row` gives of it; None: routers choose."""


def pack(
    samples: Sequence[tuple[Rendered, np.ndarray]], family: Family, device: torch.device, multiple_of: int = 1
) -> Microbatch:
    """Pack samples of (input, targets [N] or [N, K]) into a row of a multiple of so many tokens.

    What is missing is a sample that is nobody's, at the end. There is one of two tokens too where there is no sample,
    for a rank that only keeps the others company, or none of two tokens: code compiled for any number of tokens is
    compiled again for one.
    """
    own_lengths = [len(rendered.token_ids_T) for rendered, _ in samples]
    missing = -sum(own_lengths) % multiple_of
    if max(own_lengths, default=0) < 2 and missing < 2:
        missing += max(2, multiple_of)
    if missing:
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
    bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return Microbatch(
        model_inputs,
        [image for rendered, _ in samples for image in rendered.images],
        to_device(bounds, device),
        bounds,
        max(lengths),
        to_device(torch.from_numpy(_in_columns([targets for _, targets in samples], 0)), device),
        own_lengths,
    )


def loss_inputs(
    loss: Loss, config: Mapping[str, float], datums: Sequence[Datum], device: torch.device
) -> Callable[..., LossInputs]:
    """By their log probabilities [T, K] the datums' loss inputs, side by side as their samples are packed, or those of
    a slice of their tokens; cells beyond a datum's own K are 0. All that the datums give is on the device before."""
    lengths = [len(datum.loss_fn_inputs["target_tokens"]) for datum in datums]
    tensors = {}
    for name in (*loss.required, *loss.optional):
        parts = [_input(loss, config, datum, name) for datum in datums]
        values = _in_columns(parts, 0.0).astype(np.float32)
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


def _in_columns(arrays: Sequence[np.ndarray], fill: float) -> np.ndarray:
    """[T, K] of arrays of shape [N] or [N, K'], K the largest K'."""
    columns = [array.reshape(len(array), -1) for array in arrays]
    width = max(column.shape[1] for column in columns)
    return np.concatenate(
        [np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=fill) for column in columns]
    )
