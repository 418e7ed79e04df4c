"""Choose the engine of a request: the one that has the beginning of its prompt in its prefix cache, unless it is busy.

A prompt is taken as a chain of pieces, each hashed with all before it: blocks of tokens, images, messages of a chat.
Two prompts with the same beginning share the first links, and so does the next turn of a conversation. Knows no engine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk
from tinker_server.backends.lru import LRU
from tinker_server.backends.protocol import ChatTask, SamplingTask

BLOCK_TOKENS = 128
"""Tokens hashed at once; vLLM caches blocks of 16 on CUDA and 128 on the CPU."""
SLACK_TOKENS = 8192
"""An engine with so many waiting tokens more than another is not clearly busier: eight answers of 1,024 tokens."""
WORTH = 4
"""A cached token outweighs this many waiting tokens. Chosen, not measured: much larger, and a prompt that all share
would keep everything on a single engine; much smaller, and a long conversation would be prefilled again and again."""
_LONGEST_ANSWER_TOKENS = 1024
"""Answers that may be longer are counted with so many tokens: a high limit says little about their length."""
_IMAGE_TOKENS = 1024
"""Tokens of an image whose client has counted none."""
_BYTES_PER_TOKEN = 4
_READ_BYTES = 4096
"""Bytes hashed of each end of an image or a long text. Two that differ only in between go to the same engine, no
more."""
_REMEMBERED_PIECES = 1 << 16
"""Of 128 tokens each: 8 million tokens, more than the caches of eight engines hold of most models."""


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt."""

    digest: int
    """Hash of this piece and all before it."""
    num_tokens: int


class PrefixRoutes:
    """Remembers which engine each beginning of a prompt was sent to last.

    A request goes to the engine of the longest beginning that is known. It goes to the engine with the fewest waiting
    tokens instead, the lowest number among equals, if nothing is known, or if the known engine has more waiting tokens
    than that engine by `SLACK_TOKENS`, and by `WORTH` times the tokens of the known beginning. The same requests in the
    same order are thus sent the same way.
    """

    def __init__(self) -> None:
        self._engines: LRU[int, int] = LRU(_REMEMBERED_PIECES)

    def choose(self, pieces: Sequence[Piece], waiting_tokens: Mapping[int, int]) -> int:
        """Return an engine of `waiting_tokens`, which has their waiting tokens by number."""
        least = min(waiting_tokens, key=lambda engine: (waiting_tokens[engine], engine))
        engine, known = least, 0
        num_tokens = 0
        for piece in pieces:
            found = self._engines.get(piece.digest)
            if found is None:
                break
            num_tokens += piece.num_tokens
            if found in waiting_tokens:
                engine, known = found, num_tokens
        if waiting_tokens[engine] - waiting_tokens[least] > max(SLACK_TOKENS, WORTH * known):
            engine = least
        for piece in pieces:
            self._engines.put(piece.digest, engine)
        return engine


def task_pieces(task: SamplingTask) -> list[Piece]:
    """Return the pieces of a prompt. Adapters and owners share no cached prefixes."""
    return _chain(task.owner, task.weights, _parts(task))


def task_tokens(task: SamplingTask, pieces: Sequence[Piece]) -> int:
    """Return the tokens that an engine is expected to compute for a task, prompt and answers."""
    longest = min(task.params.max_tokens or _LONGEST_ANSWER_TOKENS, _LONGEST_ANSWER_TOKENS)
    return sum(piece.num_tokens for piece in pieces) + task.num_samples * longest


def chat_pieces(task: ChatTask) -> list[Piece]:
    """Return the pieces of a chat: its instructions, if they are as long as a block, and each message; or the prompt of
    a completion, in pieces of the size of a block."""
    prompt, messages = task.body.get("prompt"), task.body.get("messages")
    if isinstance(prompt, str):
        size = BLOCK_TOKENS * _BYTES_PER_TOKEN
        parts: list[object] = [prompt[start : start + size] for start in range(0, len(prompt), size)]
    else:
        parts = _messages([task.body.get("system"), task.body.get("tools"), prompt], messages)
    return _chain(task.owner, task.weights, ((text, len(text) // _BYTES_PER_TOKEN) for text in map(_text, parts)))


def _messages(instructions: list[object], messages: object) -> list[object]:
    """Return what stands before the conversation, then each message. Short instructions, which many conversations have
    in common, are one piece with the first message: they are not worth sharing an engine."""
    rest = list(messages) if isinstance(messages, list) else []
    while rest and isinstance(rest[0], dict) and rest[0].get("role") in ("system", "developer"):
        instructions = [*instructions, rest.pop(0)]
    if len(_text(instructions)) >= BLOCK_TOKENS * _BYTES_PER_TOKEN:
        return [instructions, *rest]
    return [[instructions, *rest[:1]], *rest[1:]]


def chat_tokens(task: ChatTask, pieces: Sequence[Piece]) -> int:
    """Return the tokens that an engine is expected to compute for a chat, prompt and answers."""
    return sum(piece.num_tokens for piece in pieces) + task.num_sequences * _LONGEST_ANSWER_TOKENS


def _chain(owner: str, weights: Path | None, parts: Iterator[tuple[object, int]]) -> list[Piece]:
    digest, found = hash((owner, weights)), []
    for part, num_tokens in parts:
        digest = hash((digest, part))
        found.append(Piece(digest, num_tokens))
    return found


def _parts(task: SamplingTask) -> Iterator[tuple[object, int]]:
    """Yield what is hashed of each piece, and its tokens. Text in several chunks is the same as in a single chunk."""
    text: list[np.ndarray] = []
    for chunk in task.prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            text.append(chunk.tokens)
            continue
        yield from _blocks(text)
        text = []
        if isinstance(chunk, ImageChunk):
            yield _ends(chunk.data), chunk.expected_tokens or _IMAGE_TOKENS
    yield from _blocks(text)


def _blocks(text: Sequence[np.ndarray]) -> Iterator[tuple[bytes, int]]:
    tokens_T = np.concatenate(text) if text else np.zeros(0, np.int64)
    for start in range(0, len(tokens_T), BLOCK_TOKENS):
        block = tokens_T[start : start + BLOCK_TOKENS]
        yield block.tobytes(), len(block)


def _ends(data: bytes) -> tuple[int, bytes, bytes]:
    return len(data), bytes(data[:_READ_BYTES]), bytes(data[-_READ_BYTES:])


def _text(part: object) -> str:
    return json.dumps(_shorten(part), default=str)


def _shorten(value: object) -> object:
    """Return a JSON value with the middle of long texts, as of images, left out."""
    if isinstance(value, str) and len(value) > 2 * _READ_BYTES:
        return [len(value), value[:_READ_BYTES], value[-_READ_BYTES:]]
    if isinstance(value, list):
        return [_shorten(item) for item in value]
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in value.items()}
    return value
