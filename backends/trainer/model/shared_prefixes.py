"""Datums that begin alike: what is computed once.

The datums of a model form a trie of segments. A segment's tokens see those of its ancestors and themselves, and no
other's. A datum that is the beginning of another needs no segment of its own: its tokens are among the other's.

All is decided from the tokens, the images and, where it is replayed, their routing alone, so that all ranks, and a
repeated step, decide alike.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from tinker_server.api_schemas.inputs import EncodedTextChunk, ModelInput
from tinker_server.backends.inputs.rendering import Layout, images_of
from tinker_server.backends.kernels.carried_state import count_states

LEAST_SAVED = 128
"""Tokens that sharing must save: fewer change rounding for nothing."""
_SAVED_PER_QUERY = 0.5
"""Tokens that a split must save for each token behind it, which attends once more, to its prefix. Measured on an H100,
in a layer of a model of 4 billion parameters: prefixes of 256 and of 1,024 tokens with 8 suffixes of 256 both gave
0.5."""
SAVED_PER_STATE = 64
"""Tokens that a split must save for each segment behind it, where layers carry a state: so many are a chunk, and each
segment begins one, from a state in float32 that is copied for it. Not measured, and meant to be too many."""
MOST_LEVELS = 8
"""Segments of a datum; each but the last is another call of attention."""
NO_PARENT = -1


@dataclass(frozen=True)
class Segment:
    """Tokens that are computed once."""

    datum: int
    """A datum that has them."""
    begin: int
    """First of them in the datum."""
    end: int
    parent: int
    """Number of the segment before it in all its datums; `NO_PARENT`: it begins them."""


@dataclass(frozen=True)
class Trie:
    """The segments of some datums, in the order in which they are packed: each before its children."""

    segments: list[Segment]
    last: list[int]
    """By datum, the segment in which it ends."""
    lengths: list[int]
    """By datum, its tokens."""

    @cached_property
    def begins(self) -> list[int]:
        """First token of each segment among the packed ones, and the end of the last."""
        return [0, *accumulate(segment.end - segment.begin for segment in self.segments)]

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens."""
        return self.begins[-1]

    @property
    def saved(self) -> int:
        """Number of tokens that are not computed."""
        return sum(self.lengths) - self.num_tokens

    def tokens_of(self, datum: int) -> np.ndarray:
        """Return [N] int64, the packed token of each of a datum's."""
        parts, number = [], self.last[datum]
        while number != NO_PARENT:
            segment = self.segments[number]
            first = self.begins[number]
            end = min(segment.end, self.lengths[datum])
            parts.append(np.arange(first, first + end - segment.begin))
            number = segment.parent
        return np.concatenate(parts[::-1])

    def spans(self) -> list[tuple[int, int, int, int, int]]:
        """Return, for each segment with children, its level and four bounds among the packed tokens: the tokens behind
        it that see it, and its own. On a level no token is behind two segments."""
        ends = self.begins[1:]
        depths: list[int] = []
        for segment in self.segments:
            depths.append(0 if segment.parent == NO_PARENT else depths[segment.parent] + 1)
        for number in reversed(range(len(self.segments))):
            if (parent := self.segments[number].parent) != NO_PARENT:
                ends[parent] = max(ends[parent], ends[number])
        own = zip(depths, self.begins, self.begins[1:], ends, strict=False)
        return [(depth, own_end, end, begin, own_end) for depth, begin, own_end, end in own if end > own_end]


def join(tries: Sequence[Trie]) -> Trie:
    """Pack tries in their order; datums are numbered likewise."""
    segments: list[Segment] = []
    last: list[int] = []
    for trie in tries:
        datums, number = len(last), len(segments)
        last += [number + own for own in trie.last]
        for segment in trie.segments:
            parent = NO_PARENT if segment.parent == NO_PARENT else segment.parent + number
            segments.append(Segment(segment.datum + datums, segment.begin, segment.end, parent))
    return Trie(segments, last, [length for trie in tries for length in trie.lengths])


def keep_whole(lengths: Sequence[int]) -> Trie:
    """Return the trie in which nothing is shared."""
    segments = [Segment(datum, 0, length, NO_PARENT) for datum, length in enumerate(lengths)]
    return Trie(segments, list(range(len(lengths))), list(lengths))


def trie_of_three(prefix: int, middle: int, lengths: Sequence[int]) -> Trie:
    """Return the trie of three texts of which all have `prefix` tokens in common, and the last two `middle`."""
    segments = [
        Segment(0, 0, prefix, NO_PARENT),
        Segment(0, prefix, lengths[0], 0),
        Segment(1, prefix, middle, 0),
        Segment(1, middle, lengths[1], 2),
        Segment(2, middle, lengths[2], 2),
    ]
    return Trie(segments, [1, 3, 4], list(lengths))


def identify(model_inputs: Sequence[tuple[ModelInput, Layout]]) -> list[np.ndarray]:
    """Return [N] int64 for each input, equal where a model sees the same: the tokens of text, and for those of an image
    a negative number of its own."""
    numbers: dict[str, int] = {}
    found = []
    for model_input, layout in model_inputs:
        tokens_N, end = np.empty(layout.num_tokens, np.int64), 0
        images = images_of(model_input, layout)
        for chunk in model_input.chunks:
            begin = end
            if isinstance(chunk, EncodedTextChunk):
                end += len(chunk.tokens)
                tokens_N[begin:end] = chunk.tokens
            else:
                name, _, span = next(images)
                end += span.num_tokens
                tokens_N[begin:end] = -1 - numbers.setdefault(name, len(numbers))
        found.append(tokens_N)
    return found


class Prefixes:
    """How many tokens the datums of a batch have in common."""

    def __init__(
        self,
        identities: Sequence[np.ndarray],
        whole_below: int = 0,
        saved_per_segment: int = 0,
        tokens_per_state: float = 0.0,
    ) -> None:
        """`identities` [N] int64 are equal where a model sees the same, negative at images. Microbatches of text of
        fewer tokens than `whole_below` share nothing. A split saves at least `saved_per_segment` tokens for each
        segment behind it. A state that layers carry takes as much memory as `tokens_per_state`."""
        self._lengths = list(map(len, identities))
        self._whole_below = whole_below
        self._saved_per_segment = saved_per_segment
        self._tokens_per_state = tokens_per_state
        self._has_images = [bool((tokens_N < 0).any()) for tokens_N in identities]
        # Bytes sort as numbers from 0 on do, a datum before those that it begins.
        keys = [(tokens_N - np.iinfo(np.int64).min).astype(">u8").tobytes() for tokens_N in identities]
        self._order = sorted(range(len(identities)), key=keys.__getitem__)
        self._rank = {datum: rank for rank, datum in enumerate(self._order)}
        ordered = [identities[datum] for datum in self._order]
        self._common = np.array([0, *map(count_common, ordered, ordered[1:])], np.int64)
        """By rank, tokens in common with the datum before it."""
        has_enough = int(self._common.sum()) >= LEAST_SAVED
        self.shares = has_enough and self.trie(range(len(identities)), alone=False).saved > 0
        """False: what the datums have in common is not worth sharing, and the batch is planned as any other."""

    @property
    def digest(self) -> str:
        """Return a text that is equal for batches of the same lengths that are planned alike."""
        return hashlib.sha256(np.array(self._order, np.int64).tobytes() + self._common.tobytes()).hexdigest()

    def num_tokens(self, datums: Sequence[int]) -> int:
        """Count the tokens that are computed for some datums in one microbatch, and those whose memory its states
        take."""
        return self._size(self.trie(datums))

    def _size(self, trie: Trie) -> int:
        if not self._tokens_per_state:
            return trie.num_tokens
        states = count_states([segment.parent for segment in trie.segments])
        return trie.num_tokens + math.ceil(states * self._tokens_per_state)

    def trie(self, datums: Sequence[int], *, alone: bool = True) -> Trie:
        """Return the trie of some datums, numbered by their places in `datums`; `alone`: the microbatch has no others
        of the batch."""
        lengths = [self._lengths[datum] for datum in datums]
        if alone and sum(lengths) < self._whole_below and not any(self._has_images[datum] for datum in datums):
            return keep_whole(lengths)
        places = sorted(range(len(datums)), key=lambda place: self._rank[datums[place]])
        ranks = [self._rank[datums[place]] for place in places]
        common = [0, *(int(self._common[before + 1 : rank + 1].min()) for before, rank in pairwise(ranks))]
        return _plan(places, common, lengths, self._saved_per_segment)

    def units(self, max_tokens: int, side_by_side: int = 1) -> list[tuple[list[int], int]]:
        """Divide the batch's datums into those that are best in one microbatch each, with the tokens that they have
        there. Several have at most `max_tokens`, and no more than each of the microbatches `side_by_side` then has."""
        alone = max_tokens < self._whole_below  # else what is whole fits
        trie = self.trie(range(len(self._lengths)), alone=False)
        most = min(max_tokens, -(-self._size(trie) // side_by_side))
        by_root: dict[int, list[int]] = {}
        for datum in self._order:
            number = trie.last[datum]
            while (parent := trie.segments[number].parent) != NO_PARENT:
                number = parent
            by_root.setdefault(number, []).append(datum)
        units = [sorted(unit) for datums in by_root.values() for unit in self._fitting(datums, most, alone=alone)]
        return [(unit, self._size(self.trie(unit, alone=alone))) for unit in sorted(units)]

    def _fitting(self, datums: Sequence[int], max_tokens: int, *, alone: bool) -> Iterator[list[int]]:
        if self._size(self.trie(datums, alone=alone)) <= max_tokens:
            yield list(datums)
            return
        left = list(datums)
        while left:
            count = count_fitting(left, lambda some: self._size(self.trie(some, alone=alone)) <= max_tokens)
            yield left[: max(1, count)]
            del left[: max(1, count)]


def count_fitting(datums: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> int:
    """Return how many of the first datums fit together, 0 if the first does not. That many have been tried, of few
    numbers in all: to try each number would take minutes for thousands of datums."""
    count, step, grows = 0, 1, True
    while step:
        if count + step <= len(datums) and fits(datums[: count + step]):
            count += step
        else:
            grows = False
        step = 2 * step if grows else step // 2
    return count


def count_common(first: np.ndarray, second: np.ndarray) -> int:
    """Count the tokens with which both begin."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size


def _plan(places: Sequence[int], common: Sequence[int], lengths: Sequence[int], saved_per_segment: int) -> Trie:
    """Make the trie of datums in the order of their tokens; `common` are the tokens that each has in common with the
    datum before."""
    hosts, alone = _hosts(places, common, lengths)
    kept = [index for index, place in enumerate(places) if hosts[place] == place and place not in alone]
    # Between two that are kept, the smallest number of common tokens on the way.
    between = [0, *(min(common[before + 1 : index + 1]) for before, index in pairwise(kept))]
    datums = [places[index] for index in kept]
    sizes = np.array([lengths[datum] for datum in datums], np.int64)
    segments, last = _split(datums, np.array(between), sizes, saved_per_segment)
    for place in alone:
        last[place] = len(segments)
        segments.append(Segment(place, 0, lengths[place], NO_PARENT))
    for place, host in hosts.items():
        number = last[host]
        while segments[number].begin >= lengths[place]:
            number = segments[number].parent
        last[place] = number
    return Trie(segments, [last[place] for place in range(len(places))], list(lengths))


def _hosts(places: Sequence[int], common: Sequence[int], lengths: Sequence[int]) -> tuple[dict[int, int], set[int]]:
    """Return for each datum the datum that it begins, or itself, and those that begin another but save too little."""
    hosts: dict[int, int] = {}
    saved: dict[int, int] = {}
    begun: list[int] = []
    for index in reversed(range(len(places))):
        place = places[index]
        begins_next = index + 1 < len(places) and common[index + 1] == lengths[place]
        hosts[place] = hosts[places[index + 1]] if begins_next else place
        if begins_next:
            saved[hosts[place]] = saved.get(hosts[place], 0) + lengths[place]
            begun.append(place)
    alone = {place for place in begun if saved[hosts[place]] < LEAST_SAVED}
    return {place: place if place in alone else host for place, host in hosts.items()}, alone


def _split(
    datums: Sequence[int], common: np.ndarray, lengths: np.ndarray, saved_per_segment: int
) -> tuple[list[Segment], dict[int, int]]:
    """Return the segments of ordered datums of which none begins another, and the last segment of each."""
    segments: list[Segment] = []
    last: dict[int, int] = {}
    # Datums from first to end, of which all tokens before `begin` are in segments, and the last of these.
    waiting = [(0, len(datums), 0, NO_PARENT, 1)] if datums else []
    while waiting:
        first, end, begin, parent, level = waiting.pop()
        if end - first == 1:
            last[datums[first]] = len(segments)
            segments.append(Segment(datums[first], begin, int(lengths[first]), parent))
            continue
        inner = common[first + 1 : end]
        shared = int(inner.min())
        bounds = [first, *(first + 1 + np.flatnonzero(inner == shared)).tolist(), end]
        saved = (shared - begin) * (len(bounds) - 2)
        behind = int(lengths[first:end].sum() - inner.sum()) - shared
        least = max(LEAST_SAVED, _SAVED_PER_QUERY * behind, saved_per_segment * (len(bounds) - 1))
        if saved >= least and level < MOST_LEVELS:
            segments.append(Segment(datums[first], begin, shared, parent))
            begin, parent, level = shared, len(segments) - 1, level + 1
        groups = pairwise(bounds)
        waiting += [(start, stop, begin, parent, level) for start, stop in groups][::-1]
    return segments, last
