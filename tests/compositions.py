"""Random packed microbatches of several models, for comparing a GPU's gradients with a reference."""

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np

from tests.factories import image, prompt, words
from tinker_server.api_schemas.inputs import Chunk, Datum, ModelInput
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.trainer.model.cuda_graphs import TOKENS

MAX_TOKENS, LONGEST = 16_384, 6_500
"""Limits of a microbatch and of a datum."""
RANKS = (1, 2, 4, 8, 16, 32, 64)
IMAGE_SIDES = ((64, 64), (320, 256), (96, 200), (640, 480))
Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Composition:
    """A packed microbatch: for each model its rank and the tokens of its datums; some datums have images."""

    name: str
    models: tuple[tuple[int, Lengths], ...]
    has_images: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all datums."""
        return sum(sum(lengths) for _, lengths in self.models)


def compositions() -> list[Composition]:
    """116 microbatches, the same in every run."""
    rows = [Composition("two-long-ones-then-four-tokens", ((32, (2955,)), (4, (5349, 6285)), (1, (1, 1, 1, 1))))]
    for size in TOKENS:
        rows += [_with_total(f"graph-{size}{more:+d}", size + more, few=24) for more in (-1, 0, 1)]
    # A last step of a product over tokens, and in it a small model: what it loses shows nowhere else.
    totals = [block * 64 + left for block in (65, 129, 228, 255) for left in (1, 2, 3, 4, 7, 9, 63)]
    rows += [_with_tail(f"tail-{number}", total) for number, total in enumerate(totals)]
    rows += [_with_long_ones(f"long-{number}") for number in range(16)]
    rows += [_with_many(f"many-{number}") for number in range(5)]
    rows += [_with_total(f"images-{number}", int(_random(number).integers(500, 9000)), few=8) for number in range(42)]
    return [dataclasses.replace(row, has_images=row.name.startswith("images")) for row in rows]


def _random(*seed: int | str) -> np.random.Generator:
    return np.random.default_rng([one if isinstance(one, int) else zlib.crc32(one.encode()) for one in seed])


def _cut(total: int, pieces: int, random: np.random.Generator) -> Lengths:
    """`total` tokens in so many datums of random lengths, none longer than may be."""
    ends = np.sort(random.choice(np.arange(1, total), pieces - 1, replace=False))
    lengths = np.diff([0, *ends, total]).tolist()
    return tuple(part for length in lengths for part in _halved(length))


def _halved(length: int) -> list[int]:
    return [length] if length <= LONGEST else [*_halved(length // 2), *_halved(length - length // 2)]


def _with_total(name: str, total: int, few: int) -> Composition:
    random = _random(name)
    shares = _cut(total, int(random.integers(1, 5)), random)
    models = [
        (int(random.choice(RANKS)), _cut(share, int(random.integers(1, max(2, min(few, share)))), random))
        for share in shares[:4]
    ]
    missing = total - sum(sum(lengths) for _, lengths in models)
    if missing:
        rank, lengths = models[0]
        models[0] = rank, (*lengths, *_halved(missing))
    return Composition(name, tuple(models))


def _with_tail(name: str, total: int) -> Composition:
    random = _random(name)
    tail = tuple([1] * int(random.integers(1, 5)))
    first = _with_total(name, total - len(tail), few=6).models[:3]
    rest = total - len(tail) - sum(sum(lengths) for _, lengths in first)
    first = ((first[0][0], (*first[0][1], *(_halved(rest) if rest else []))), *first[1:])
    return Composition(name, (*first, (int(random.choice(RANKS)), tail)))


def _with_long_ones(name: str) -> Composition:
    """Datums that cuDNN takes, and of one token, in any order."""
    random = _random(name)
    models = []
    for _ in range(int(random.integers(2, 5))):
        kinds = random.integers(0, 3, int(random.integers(1, 5)))
        choices = ([1], random.integers(4090, LONGEST, 1), random.integers(2, 500, 1))
        models.append((int(random.choice(RANKS)), [int(choices[kind][0]) for kind in kinds]))
    while sum(sum(lengths) for _, lengths in models) > MAX_TOKENS:
        max((lengths for _, lengths in models), key=lambda lengths: max(lengths)).sort()
        longest = max((lengths for _, lengths in models), key=max)
        longest[longest.index(max(longest))] = 1
    return Composition(name, tuple((rank, tuple(lengths)) for rank, lengths in models))


def _with_many(name: str) -> Composition:
    """130 datums, half of them of one model, many of one token."""
    random = _random(name)
    lengths = np.where(random.random(130) < 0.4, 1, random.integers(2, 90, 130)).tolist()
    return Composition(name, ((8, tuple(lengths[:65])), (2, tuple(lengths[65:100])), (1, tuple(lengths[100:]))))


def data_of(row: Composition, renderer: Renderer) -> list[list[Datum]]:
    """The data of each model."""
    random = _random(row.name, "data")
    return [[_datum(length, row, renderer, random) for length in lengths] for _, lengths in row.models]


def _datum(length: int, row: Composition, renderer: Renderer, random: np.random.Generator) -> Datum:
    inputs = prompt(words(length, int(random.integers(1 << 30))))
    if row.has_images and random.random() < 0.7:
        inputs = _with_images(inputs, length, renderer, random)
    num_tokens, _ = renderer.layout(inputs, "datum")
    weights = random.normal(size=num_tokens).astype(np.float32) * (random.random(num_tokens) < 0.8)
    weights[-1] = random.choice([-1, 1])  # one at least
    targets = random.integers(0, 300, num_tokens)
    return Datum(model_input=inputs, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def _with_images(inputs: ModelInput, length: int, renderer: Renderer, random: np.random.Generator) -> ModelInput:
    """The same number of tokens, some of them of one or two images; as it is where they do not fit."""
    pictures: list[Chunk] = [image(*IMAGE_SIDES[random.integers(4)], int(random.integers(50)))]
    if random.random() < 0.5:  # apart: transformers takes two images side by side for one
        pictures += [words(1), image(*IMAGE_SIDES[random.integers(4)], int(random.integers(50)))]
    taken, _ = renderer.layout(prompt(*pictures), "datum")
    if taken + 2 > length:
        return inputs
    before = int(random.integers(0, length - taken))
    texts = [words(count, before) for count in (before, length - taken - before)]
    chunks = [*([texts[0]] if before else []), *pictures, texts[1]]
    return prompt(*chunks)
