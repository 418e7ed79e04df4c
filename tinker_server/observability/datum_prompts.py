"""The prompts of a batch's datums: which are equal, and their ends for reading."""

import hashlib
import itertools
from collections.abc import Sequence, Set

from tinker_server.api_schemas.inputs import Chunk, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.observability.recent_samples import CHUNK_BYTES

PROMPT_TOKENS = 512
"""Last tokens of a prompt that are kept."""
IMAGE_BYTES = 4 << 20
"""Bytes of the kept images of all prompts of a batch."""


class Prompts:
    """The prompts of a batch. Equal prompts have one number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._prompts: list[list[Chunk]] = []

    def number(self, chunks: Sequence[Chunk], num_answer: int) -> int:
        """Return the number of an input's prompt: all but its last positions, as far as these are text."""
        prompt = _without_end(chunks, num_answer)
        digest = hashlib.sha256()
        for is_image, parts in itertools.groupby(prompt, key=lambda chunk: isinstance(chunk, ImageChunk)):
            known = (part for part in parts if isinstance(part, EncodedTextChunk | ImageChunk))
            content = b"".join(part.data if isinstance(part, ImageChunk) else part.tokens.tobytes() for part in known)
            digest.update(b"%d %d " % (is_image, len(content)) + content)
        number = self._numbers.setdefault(digest.digest(), len(self._prompts))
        if number == len(self._prompts):
            self._prompts.append(prompt)
        return number

    def shorten(self, numbers: Set[int]) -> tuple[dict[int, ModelInput], int]:
        """Return these prompts' last tokens and the images that fit, and the bytes of the images and of all chunks."""
        left_bytes, kept = IMAGE_BYTES, {}
        for number in sorted(numbers):
            chunks: list[Chunk] = []
            left_tokens = PROMPT_TOKENS
            for chunk in reversed(self._prompts[number]):
                if isinstance(chunk, ImageChunk) and len(chunk.data) <= left_bytes:
                    left_bytes -= len(chunk.data)
                    chunks.append(ImageChunk(data=bytes(chunk.data), format=chunk.format))
                elif isinstance(chunk, EncodedTextChunk) and left_tokens:
                    tokens = chunk.tokens[-left_tokens:].copy()
                    chunks.append(EncodedTextChunk(tokens=tokens))
                    left_tokens -= len(tokens)
            kept[number] = ModelInput(chunks=chunks[::-1])
        num_chunks = sum(len(prompt.chunks) for prompt in kept.values())
        return kept, IMAGE_BYTES - left_bytes + num_chunks * CHUNK_BYTES


def _without_end(chunks: Sequence[Chunk], num_positions: int) -> list[Chunk]:
    prompt = list(chunks)
    while num_positions > 0 and prompt and isinstance(last := prompt[-1], EncodedTextChunk):
        prompt.pop()
        if len(last.tokens) > num_positions:
            prompt.append(EncodedTextChunk(tokens=last.tokens[:-num_positions]))
        num_positions -= len(last.tokens)
    return prompt
