"""The texts of tokens as pages show them: pieces of a prompt, and a continuation token by token."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tinker_server.api_schemas.inputs import Chunk, EncodedTextChunk, ImageChunk
from tinker_server.api_schemas.sampling import SampledSequence
from tinker_server.backends.protocol import BaseModel

LIKELY = (-0.05, -0.2, -0.7, -1.6, -3.0, -5.0)
"""Bounds in nats between the colours of tokens by log probability."""


@dataclass(frozen=True)
class Token:
    """A sampled token as it is shown."""

    text: str
    token_id: int
    logprob: float
    level: int
    """Colour by log probability; 0 is the likeliest."""
    is_special: bool


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: text, of special tokens or others, or the number of an image."""

    text: str
    image: int | None = None
    is_special: bool = False


@dataclass(frozen=True)
class Completion:
    """One continuation."""

    tokens: list[Token]
    stop_reason: str
    total_logprob: float


def texts_of(base: BaseModel | None, token_ids: list[int]) -> tuple[list[str], frozenset[int]]:
    """Return the text of each token, and the special ids. A base model that is no longer served has ids alone."""
    if base is None:
        return [f"<{token_id}>" for token_id in token_ids], frozenset()
    return base.token_texts(token_ids), base.special_ids()


def parts_of(base: BaseModel | None, token_ids: list[int]) -> list[Part]:
    """Return the text in pieces, each of special tokens or of others."""
    texts, special = texts_of(base, token_ids)
    known = zip(texts, (token_id in special for token_id in token_ids), strict=True)
    return [
        Part("".join(text for text, _ in pieces), is_special=is_special)
        for is_special, pieces in itertools.groupby(known, key=lambda piece: piece[1])
    ]


def prompt_parts(base: BaseModel | None, chunks: Sequence[Chunk], num_images: int = 0) -> list[Part]:
    """Return a prompt's texts, and its images by their numbers, before which there are so many images."""
    parts: list[Part] = []
    for chunk in chunks:
        if isinstance(chunk, EncodedTextChunk):
            parts += parts_of(base, chunk.tokens.tolist())
        elif isinstance(chunk, ImageChunk):
            parts.append(Part("", num_images))
            num_images += 1
    return parts


def completion_of(base: BaseModel | None, sequence: SampledSequence, most: int | None = None) -> Completion:
    """Return a continuation's first tokens; all of them by default."""
    token_ids: list[int] = sequence.tokens[:most].tolist()
    logprobs: list[float] = sequence.logprobs[:most].tolist()
    texts, special = texts_of(base, token_ids)
    tokens = [
        Token(text, token_id, logprob, sum(logprob < bound for bound in LIKELY), token_id in special)
        for text, token_id, logprob in zip(texts, token_ids, logprobs, strict=True)
    ]
    return Completion(tokens, sequence.stop_reason, float(sequence.logprobs.sum(dtype=float)))
