"""The chunks of a packed microbatch, of which none holds two samples: for layers that carry a state.

T tokens of the microbatch, C tokens of a chunk, R chunks, S samples
"""

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
    """The chunks of a packed microbatch, the first ones of all samples first, of the longest sample first."""

    token_RC: Tensor
    """Index of each token; T for padding."""
    place_T: Tensor
    """Index of each token in the R * C of the chunks."""
    steps: list[int]
    """Chunks of each step of the scan: one of every sample that is as long. Samples that end are the last ones."""


_KNOWN = WeakIdKeyDictionary()
"""Chunks by the lengths of samples that they were made for, which all layers of a forward and backward have."""


def chunks_of(cu_seqlens_host: Tensor, device: torch.device) -> Chunks:
    """Return the chunks of the samples between `cu_seqlens_host` [S + 1]."""
    known: Chunks | None = _KNOWN.get(cu_seqlens_host)
    if known is None or known.token_RC.device != device:
        known = _KNOWN[cu_seqlens_host] = make_chunks(cu_seqlens_host.numpy(), device)
    return known


def make_chunks(cu_seqlens: np.ndarray, device: torch.device) -> Chunks:
    """Lay the samples between `cu_seqlens` [S + 1] out in chunks."""
    begins, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    num_tokens = int(cu_seqlens[-1])
    size = next(size for size in _CHUNKS if (-(-lengths // size) * size).sum() <= _MOST_PADDING * num_tokens)
    order = np.argsort(-lengths, kind="stable")
    begins, lengths = begins[order], lengths[order]
    counts = -(-lengths // size)
    steps = [int((counts > step).sum()) for step in range(counts[0])]
    sample_R = np.concatenate([np.arange(num_samples) for num_samples in steps])
    step_R = np.repeat(np.arange(len(steps)), steps)
    offset_RC = step_R[:, None] * size + np.arange(size)
    token_RC = begins[sample_R][:, None] + offset_RC
    is_token_RC = offset_RC < lengths[sample_R][:, None]
    place_T = np.empty(num_tokens, np.int64)
    place_T[token_RC[is_token_RC]] = np.flatnonzero(is_token_RC)
    token_RC[~is_token_RC] = num_tokens
    return Chunks(_placed(token_RC, device), _placed(place_T, device), steps)


def _placed(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
