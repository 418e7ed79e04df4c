"""Datums that begin alike."""

import numpy as np

from tests.factories import image
from tinker_server.api_schemas.inputs import Chunk, EncodedTextChunk
from tinker_server.backends.trainer.model.shared_prefixes import count_common


def random_trie(seed: int, vocab_size: int = 300) -> list[np.ndarray]:
    """Texts of a random trie of 1 to 5 levels, of 1 to 300 tokens each; some begin others, and some are equal."""
    random = np.random.default_rng(seed)

    def grow(begin: np.ndarray, levels: int) -> list[np.ndarray]:
        most = int(random.choice([1, 3, 40, 300]))
        own = np.concatenate([begin, random.integers(0, vocab_size, random.integers(1, most + 1))])
        if levels == 1:
            return [own]
        children = [one for _ in range(random.integers(1, 4)) for one in grow(own, levels - 1)]
        return [*children, *[own] * int(random.integers(0, 3) == 0)]

    found = [
        one for _ in range(random.integers(1, 3)) for one in grow(np.zeros(0, np.int64), int(random.integers(1, 6)))
    ]
    found = found[:24] + found[:1] * int(random.integers(0, 2))
    return [found[index] for index in random.permutation(len(found))]


def depth_of(texts: list[np.ndarray]) -> int:
    """Return the levels of the deepest text: the different beginnings that it has in common with others, and itself."""
    depths = []
    for number, text in enumerate(texts):
        others = [other for place, other in enumerate(texts) if place != number]
        depths.append(1 + len({common for other in others if 0 < (common := count_common(text, other)) < len(text)}))
    return max(depths)


def put_images(text: np.ndarray, first: int = 0, most: int = 2) -> list[Chunk]:
    """Put small images into a text, each where what is before it says so: equal beginnings have equal images, if
    `first` of the first image is the same."""
    chunks: list[Chunk] = []
    begin = 0
    for place in np.flatnonzero(text % 50 == 7)[:most].tolist():
        seed = int(text[place]) + (0 if chunks else 1000 * first)
        chunks += [text_of(text[begin : place + 1]), image(96, 64, seed)]
        begin = place + 1
    return [*chunks, text_of(text[begin:])] if begin < len(text) else chunks


def text_of(tokens: np.ndarray) -> EncodedTextChunk:
    """Make a chunk of tokens."""
    return EncodedTextChunk(tokens=tokens.astype(np.int32))


STATES: list[tuple[list[int], list[int]]] = [
    ([70, 3, 65], [-1, 0, 0]),
    ([64, 64, 128, 1], [-1, 0, 1, 2]),
    ([5, 1, 1, 200, 2], [-1, 0, 1, 2, 1]),
    ([1, 1, 1, 1, 1], [-1, 0, 1, 2, 2]),
    ([130, 2, 9, 40, 1, 3], [-1, 0, 1, 1, -1, 0]),
    ([2, *[1] * 20], [-1, *[0] * 20]),
]
"""Lengths of segments, and the segment before each, -1 for none."""


def paths_of(lengths: list[int], parents: list[int]) -> list[list[int]]:
    """By segment, the packed tokens of a sample that ends with it."""
    ends = np.cumsum([0, *lengths]).tolist()
    found: list[list[int]] = []
    for segment, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), *range(ends[segment], ends[segment + 1])])
    return found


def datums_of(*parts: tuple[int, ...]) -> list[np.ndarray]:
    """Each datum is some texts of these lengths; equal beginnings of the lengths are equal texts."""
    made: dict[tuple[int, ...], np.ndarray] = {}
    for own in parts:
        for end in range(1, len(own) + 1):
            made.setdefault(own[:end], np.random.default_rng(len(made)).integers(0, 300, own[end - 1]))
    return [np.concatenate([made[own[:end]] for end in range(1, len(own) + 1)]) for own in parts]
