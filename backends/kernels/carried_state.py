"""States that layers carry from token to token, where samples are packed as tries of segments.

A segment begins with the last state of the segment before it in its samples, and a convolution of its first tokens
reads the last ones before them. So segments are computed in calls, parents before their children. States that several
segments begin with are kept, one in each row of a table, of which the last row is 0.

T tokens of a microbatch, S segments, F tokens whose convolution reads a segment before theirs; N tokens and K parents
among the segments of a call
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_BEFORE = 3
"""Tokens before its own that a convolution reads."""
_AT_ONCE = 64
"""Segments of a call that begin with a state: each state is written once more, in float32."""


class Carried(NamedTuple):
    """What layers need to carry states along tries; in one dimension, of sizes that no other tensor has: code that is
    compiled for a size of 0 or 1, or of another tensor too, would be for that alone."""

    calls: Tensor
    """As `calls` reads it; on the device, as the next."""
    tails: Tensor
    """As `tails` reads it."""
    parents_host: Tensor
    """[S] the segment before each; -1: it begins its samples."""


@dataclass(frozen=True)
class Call:
    """Segments that are computed together."""

    token_N: Tensor
    cu_seqlens: Tensor
    """First token of each segment among these, and the end of the last."""
    begins: Tensor | None
    """Rows of the states that its segments begin with, and last an empty one does; None: they begin samples."""
    parent_K: Tensor
    """Those of its segments that are parents."""
    row_K: Tensor
    """Rows of their last states."""


def tables(begins: Sequence[int], parents: Sequence[int]) -> Carried:
    """Return on the host what `Carried` has, of segments that begin at these of the packed tokens, with the end of the
    last."""
    rows, parts = _rows(parents), []
    for group in _groups(parents, rows):
        parts.append(np.concatenate([np.arange(begins[segment], begins[segment + 1]) for segment in group]))
        parts.append(np.array([0, *accumulate(begins[segment + 1] - begins[segment] for segment in group)]))
        if parents[group[0]] >= 0:
            parts.append(np.array([*(rows[parents[segment]] for segment in group), len(rows)]))
        own = [(place, rows[segment]) for place, segment in enumerate(group) if segment in rows]
        parts += list(np.array(own, np.int64).reshape(-1, 2).T)
    flat = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    tails = torch.from_numpy(_tails(begins, parents).ravel())
    return Carried(flat, tails, torch.tensor(parents, dtype=torch.int64))


def tails(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [F] whose convolution reads segments before theirs, and what it reads there [F, MOST_BEFORE], of
    the token before first; -1: it reads none there."""
    table = flat.view(-1, MOST_BEFORE + 1)
    return table[:, 0], table[:, 1:]


def num_kept(parents_host: Tensor) -> int:
    """Count the states that are kept."""
    return len(_rows(parents_host.tolist()))


def count_states(parents: Sequence[int]) -> int:
    """Return how many states a layer has at most at once, in backward: those kept and their gradients, each with an
    empty state, and four for each segment of a call: what it begins with, the gradient of that, the gradient of its
    last state, and what is left of the call before."""
    num_parents = len(_rows(parents))
    return 2 * (num_parents + 1) + 4 * (min(len(parents), _AT_ONCE) + 1) if num_parents else 0


def calls(flat: Tensor, cu_seqlens_host: Tensor, parents_host: Tensor) -> Iterator[Call]:
    """Yield the calls of a table of `Carried`."""
    lengths, parents = cu_seqlens_host.diff().tolist(), parents_host.tolist()
    rows, place = _rows(parents), 0

    def take(count: int) -> Tensor:
        nonlocal place
        place += count
        return flat[place - count : place]

    for group in _groups(parents, rows):
        tokens, bounds = take(sum(lengths[segment] for segment in group)), take(len(group) + 1)
        begins = take(len(group) + 1) if parents[group[0]] >= 0 else None
        num_parents = sum(segment in rows for segment in group)
        yield Call(tokens, bounds, begins, take(num_parents), take(num_parents))


def _rows(parents: Sequence[int]) -> dict[int, int]:
    """Number the segments that others follow."""
    return {segment: row for row, segment in enumerate(sorted({parent for parent in parents if parent >= 0}))}


def _groups(parents: Sequence[int], rows: dict[int, int]) -> Iterator[list[int]]:
    """Yield the segments of each call: those that nothing is carried to or from, then level by level the others."""
    levels: list[list[int]] = [[]]
    depths: list[int] = []
    single = []
    for segment, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        if parent < 0 and segment not in rows:
            single.append(segment)
            continue
        levels += [[] for _ in range(depths[-1] + 1 - len(levels))]
        levels[depths[-1]].append(segment)
    if single:
        yield single
    for level in levels:
        yield from (level[first : first + _AT_ONCE] for first in range(0, len(level), _AT_ONCE))


def _tails(begins: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """Return [F, 1 + MOST_BEFORE] as `tails` reads it."""
    found = []
    for segment, parent in enumerate(parents):
        if parent < 0:
            continue
        before: list[int] = []
        while parent >= 0 and len(before) < MOST_BEFORE:
            before += range(begins[parent + 1] - 1, begins[parent] - 1, -1)[:MOST_BEFORE]
            parent = parents[parent]
        before = (before + [-1] * MOST_BEFORE)[:MOST_BEFORE]
        for place, token in enumerate(range(begins[segment], begins[segment + 1])[:MOST_BEFORE]):
            found.append([token, *[-1] * place, *before[: MOST_BEFORE - place]])
    return np.array(found, np.int64).reshape(-1, 1 + MOST_BEFORE)
