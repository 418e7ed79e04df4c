"""The chunks of a packed microbatch, of which none holds two samples: for layers that carry a state.

Where samples are packed as tries of segments, these are segments', and a segment's first chunk follows the last one of
the segment before it.

T tokens of the microbatch, C tokens of a chunk, R chunks, S samples
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tinker_server.backends.kernels.pinned_copy import to_device

CHUNK = 64
"""Length of the fastest chunks."""
_CHUNKS = (CHUNK, 32, 16, 8, 4, 2, 1)
"""Lengths of chunks; the result is the same up to rounding."""
_MOST_PADDING = 1.25
"""Tokens with padding over tokens, above which chunks are shorter: a thousand samples of two tokens would fill the
memory of 64,000."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of a packed microbatch, those without another before them first."""

    token_RC: Tensor
    """Index of each token; T for padding."""
    place_T: Tensor
    """Index of each token in the R * C of the chunks."""
    steps: list[int]
    """Chunks of each step of the scan: one of every sample that is as long, of the longest first; or of every segment
    that has as many chunks before it and in it."""
    previous: list[Tensor] | None = None
    """By step but the first, for each of its chunks the place of that before it among those of the step before; None:
    samples that end are the last ones."""

    def states(self, after: Tensor, step: int) -> Tensor:
        """Return the states before the chunks of a step, from those after the step before."""
        if self.previous is None:
            return after[: self.steps[step]]
        return after.index_select(0, self.previous[step - 1])


_KNOWN = WeakIdKeyDictionary()
"""Chunks by the lengths of samples that they were made for, which all layers of a forward and backward have."""


def chunks_of(cu_seqlens_host: Tensor, device: torch.device, parents_host: Tensor | None = None) -> Chunks:
    """Return the chunks of the samples between `cu_seqlens_host` [S + 1], or of segments: `parents_host` [S] are then
    the segments before them, -1 for none."""
    known: Chunks | None = _KNOWN.get(cu_seqlens_host)
    if known is None or known.token_RC.device != device:
        parents = None if parents_host is None else parents_host.tolist()
        known = _KNOWN[cu_seqlens_host] = make_chunks(cu_seqlens_host.numpy(), device, parents)
    return known


def make_chunks(cu_seqlens: np.ndarray, device: torch.device, parents: Sequence[int] | None = None) -> Chunks:
    """Lay the samples between `cu_seqlens` [S + 1] out in chunks, or segments with these before them."""
    begins, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    num_tokens = int(cu_seqlens[-1])
    size = next(size for size in _CHUNKS if (-(-lengths // size) * size).sum() <= _MOST_PADDING * num_tokens)
    if parents is None:
        order = np.argsort(-lengths, kind="stable")
        begins, lengths = begins[order], lengths[order]
        counts = -(-lengths // size)
        steps = [int((counts > step).sum()) for step in range(counts[0])]
        sample_R = np.concatenate([np.arange(num_samples) for num_samples in steps])
        number_R, previous = np.repeat(np.arange(len(steps)), steps), None
    else:
        by_step = _steps_of_segments(-(-lengths // size), parents)
        sample_R, number_R = np.array([chunk[:2] for step in by_step for chunk in step]).T
        steps = list(map(len, by_step))
        previous = [_placed(np.array([chunk[2] for chunk in step]), device) for step in by_step[1:]]
    offset_RC = number_R[:, None] * size + np.arange(size)
    token_RC = begins[sample_R][:, None] + offset_RC
    is_token_RC = offset_RC < lengths[sample_R][:, None]
    place_T = np.empty(num_tokens, np.int64)
    place_T[token_RC[is_token_RC]] = np.flatnonzero(is_token_RC)
    token_RC[~is_token_RC] = num_tokens
    return Chunks(_placed(token_RC, device), _placed(place_T, device), steps, previous)


def _steps_of_segments(counts: np.ndarray, parents: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Return by step its chunks: segment, number in the segment, and place of the chunk before among those of the step
    before."""
    steps: list[list[tuple[int, int, int]]] = []
    last: list[tuple[int, int]] = []
    """Step and place of the last chunk of each segment."""
    for segment, (count, parent) in enumerate(zip(counts.tolist(), parents, strict=True)):
        step, place = last[parent] if parent >= 0 else (-1, 0)
        for number in range(count):
            step += 1
            steps += [[] for _ in range(step + 1 - len(steps))]
            steps[step].append((segment, number, place))
            place = len(steps[step]) - 1
        last.append((step, place))
    return steps


def _placed(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
