"""The part of attention in which tokens see a prefix that is packed once for all of them, merged with the causal part.

Segments of the packed tokens form tries. The causal part has each segment as a sample of its own; tokens behind a
segment in its trie then see all of it, in a call without a mask for each level of the tries. With m and n the
log-sum-exps of a token's scores in both parts, that of all is l = log(exp(m) + exp(n)), and the output is the sum of
the parts, times exp(m - l) and exp(n - l). Backward of each part needs the whole output and l, and nothing else of the
other part: the gradient of a score s is exp(s - l) (dO V^T - sum(dO O)).

T tokens of a microbatch, G segments that others see, Q tokens of a level that see a segment, P tokens of these, H
query heads, D values of a head
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 5
_NO_BOUNDS, _NO_ROWS = 13, 17
"""Bounds in front, and rows of a table without segments. Code is compiled where there are none: a size of 0 or 1, or
of another tensor too, would be taken for the only one."""


@dataclass(frozen=True)
class Level:
    """The tokens of a level that see a segment, contiguous for each, and the segments."""

    query_Q: Tensor
    key_P: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    longest_queries: int
    longest_keys: int


Forward = Callable[[list[Tensor], Level, float], tuple[Tensor, Tensor]]
"""Attends from the queries [Q, H, D] of a level to its keys, without a mask; returns the output and the log-sum-exp of
the scores [H, Q]."""
Backward = Callable[[Tensor, list[Tensor], Level, float], tuple[Tensor, ...]]


def tables(spans: Sequence[tuple[int, int, int, int, int]]) -> tuple[Tensor, Tensor]:
    """Return on the host the bounds of each level's calls, one after the other, and the table [G * 5] of them: a
    segment's level, first and last token that see it, and its own."""
    spans = sorted(spans)
    parts = [np.zeros(_NO_BOUNDS, np.int32)]
    for _, group in groupby(spans, key=lambda span: span[0]):
        bounds = np.array([span[1:] for span in group])
        queries, keys = bounds[:, :2], bounds[:, 2:]
        parts += [np.concatenate([np.arange(*pair) for pair in pairs]) for pairs in (queries, keys)]
        parts += [np.concatenate([[0], np.cumsum(pairs[:, 1] - pairs[:, 0])]) for pairs in (queries, keys)]
    table = np.array(spans, np.int32).ravel() if spans else np.zeros(_NO_ROWS * _COLUMNS, np.int32)
    return torch.from_numpy(np.concatenate(parts).astype(np.int32)), torch.from_numpy(table)


def rows_of(table: Tensor) -> list[list[int]]:
    """Return the rows of a table."""
    return [row for row in table.view(-1, _COLUMNS).tolist() if row[2] > row[1]]


def prefixes_of(rows: Iterable[Sequence[int]], begin: int) -> list[slice]:
    """Return the tokens that the token `begin` sees besides its own segment's, in their order; `rows` are those of a
    table."""
    return [slice(first, last) for _, lowest, highest, first, last in rows if lowest <= begin < highest]


def levels(bounds: Tensor, table: Tensor) -> Iterator[Level]:
    """Yield the levels of `tables`, of which the bounds are on the device."""
    place = _NO_BOUNDS
    for _, group in groupby(rows_of(table), key=lambda row: row[0]):
        sizes = [(row[2] - row[1], row[4] - row[3]) for row in group]
        num_queries, num_keys = map(sum, zip(*sizes, strict=True))
        counts = [num_queries, num_keys, len(sizes) + 1, len(sizes) + 1]
        parts = bounds[place : place + sum(counts)].split(counts)
        place += sum(counts)
        longest_queries, longest_keys = map(max, zip(*sizes, strict=True))
        yield Level(parts[0], parts[1], parts[2], parts[3], longest_queries, longest_keys)


def add_prefixes(
    causal: tuple[Tensor, Tensor], qkv: Sequence[Tensor], of: Sequence[Level], attend: Forward, scale: float
) -> tuple[Tensor, Tensor]:
    """Return [T, H, D], and the log-sum-exp of the scores [H, T], nats, from those of causal attention."""
    out_THD, lse_HT = (tensor.clone() for tensor in causal)
    query, key, value = qkv
    for level in of:
        tokens = level.query_Q
        part_QHD, part_HQ = attend([query[tokens], key[level.key_P], value[level.key_P]], level, scale)
        own_HQ = lse_HT[:, tokens]
        whole_HQ = torch.logaddexp(own_HQ, part_HQ)
        own_QH1, part_QH1 = ((lse - whole_HQ).exp().T[..., None] for lse in (own_HQ, part_HQ))
        out_THD[tokens] = (out_THD[tokens] * own_QH1 + part_QHD * part_QH1).to(out_THD.dtype)
        lse_HT[:, tokens] = whole_HQ.to(lse_HT.dtype)
    return out_THD, lse_HT


def add_prefix_gradients(  # noqa: PLR0913
    gradients: Sequence[Tensor],
    grad_THD: Tensor,
    saved: Sequence[Tensor],
    of: Sequence[Level],
    attend_backward: Backward,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, from those of the causal part, which was given the whole output and
    its log-sum-exp; `saved` are query, key and value with these two."""
    query, key, value, out_THD, lse_HT = saved
    of_query, of_key, of_value = (gradient.clone() for gradient in gradients)
    for level in of:
        tokens, keys = level.query_Q, level.key_P
        of_level = [query[tokens], key[keys], value[keys], out_THD[tokens], lse_HT[:, tokens].contiguous()]
        parts = attend_backward(grad_THD[tokens], of_level, level, scale)
        for total, index, part in zip((of_query, of_key, of_value), (tokens, keys, keys), parts, strict=True):
            total.index_add_(0, index, part)
    return of_query, of_key, of_value
