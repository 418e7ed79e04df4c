"""The latest samples in memory, for people to read. They are bounded; `sample_files.py` keeps them on disk."""

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.store.futures.observers import Work

MAX_BYTES = 64 << 20
"""Bytes of all owners' samples."""
SEQUENCES, TOKENS = 4, 2000
"""Sequences cached per sample, and tokens per sequence: the first ones."""
PROMPT_TOKENS = 20_000
"""Prompts with more tokens are not cached, nor those with more bytes of images than IMAGE_BYTES."""
IMAGE_BYTES = 8 << 20
_TOKEN_BYTES = 8
CHUNKS = 1000
"""Prompts with more chunks are not cached either."""
_CHUNK_BYTES = 1000
"""Memory of a chunk beside its content."""
CHAT_BYTES = IMAGE_BYTES + PROMPT_TOKENS * _TOKEN_BYTES + (1 << 20)
"""Largest size of a chat's prompt with its continuations that the sampler's process sends."""


class Drawn(NamedTuple):
    """The weights that a sample was drawn from."""

    base_model: str
    model_path: str | None = None
    """tinker:// path of named weights."""
    directory: str | None = None
    """Directory of the weights, below the data directory; None: the base model alone."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A request and its samples."""

    owner: str
    sampler_id: str
    """The sampling session; empty if the request had none."""
    of: Drawn
    prompt: ModelInput
    params: SamplingParams
    num_samples: int
    sequences: list[SampledSequence]
    size_bytes: int
    at: float = field(default_factory=time.time)
    sample_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Gallery:
    """Caches up to `per_owner` samples of each owner, fewer if they are large."""

    def __init__(
        self, per_owner: int, max_bytes: int = MAX_BYTES, on_change: Callable[[str], None] = lambda owner: None
    ) -> None:
        """`on_change` is called with the owner whose samples have changed."""
        self.per_owner = per_owner
        self.chat_bytes = CHAT_BYTES if per_owner else 0
        """Value of `protocol.ChatTask.kept_bytes`."""
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._of: dict[str, deque[Shown]] = {}
        self._bytes: dict[str, int] = {}

    async def on_success(self, work: Work[Any]) -> None:
        """Cache a sample that an operation has drawn."""
        if isinstance(work.response, SampleResponse):
            of = Drawn(work.base_model, work.model_path, work.directory)
            self.note(work.request, work.response, work.operation.owner, of)

    def note(self, request: SampleRequest, response: SampleResponse, owner: str, of: Drawn) -> None:
        """Cache a sample of these weights."""
        if not self.per_owner or (size_bytes := _size_bytes(request.prompt)) is None:
            return
        sequences = [_beginning(sequence) for sequence in itertools.islice(response.sequences, SEQUENCES)]
        size_bytes += sum(len(sequence.tokens) for sequence in sequences) * _TOKEN_BYTES
        shown = Shown(
            owner=owner,
            sampler_id=request.sampling_session_id or "",
            of=of,
            prompt=request.prompt,
            params=request.sampling_params.model_copy(update={"stop": None}),  # not shown
            num_samples=request.num_samples,
            sequences=sequences,
            size_bytes=size_bytes,
        )
        self._add(shown)
        self._on_change(owner)

    def _add(self, shown: Shown) -> None:
        owner = shown.owner
        self._of.setdefault(owner, deque()).appendleft(shown)
        self._bytes[owner] = self._bytes.get(owner, 0) + shown.size_bytes
        if len(self._of[owner]) > self.per_owner:
            self._evict_oldest(owner)
        while sum(self._bytes.values()) > self._max_bytes:
            self._evict_oldest(max(self._bytes, key=lambda owner: self._bytes[owner]))

    def of(self, owner: str) -> list[Shown]:
        """Return an owner's samples, newest first."""
        return list(self._of.get(owner, ()))

    def get(self, owner: str, sample_id: str) -> Shown | None:
        """Return a sample, or None if it was evicted or belongs to another owner."""
        return next((shown for shown in self._of.get(owner, ()) if shown.sample_id == sample_id), None)

    def all(self) -> list[Shown]:
        """Return the samples of all owners, newest first."""
        return sorted(itertools.chain(*self._of.values()), key=lambda shown: shown.at, reverse=True)

    def restore(self, samples: list[Shown]) -> None:
        """Cache samples of an earlier server, the newest first."""
        if self.per_owner:
            for shown in reversed(samples):
                self._add(shown)

    def _evict_oldest(self, owner: str) -> None:
        self._bytes[owner] -= self._of[owner].pop().size_bytes
        if not self._of[owner]:
            del self._of[owner], self._bytes[owner]


def _size_bytes(prompt: ModelInput) -> int | None:
    """Return the memory that a prompt takes, or None if it is too large to cache."""
    if len(prompt.chunks) > CHUNKS:
        return None
    tokens, images, overhead = 0, 0, _CHUNK_BYTES * (1 + len(prompt.chunks))
    for chunk in prompt.chunks:
        if isinstance(chunk, ImageChunk):
            images += len(chunk.data)
        else:
            tokens += len(getattr(chunk, "tokens", ()))
    return None if tokens > PROMPT_TOKENS or images > IMAGE_BYTES else tokens * _TOKEN_BYTES + images + overhead


def _beginning(sequence: SampledSequence) -> SampledSequence:
    """Copy the first tokens, so that the whole array is not kept alive."""
    tokens, logprobs = sequence.tokens[:TOKENS].copy(), sequence.logprobs[:TOKENS].copy()
    return sequence.model_copy(update={"tokens": tokens, "logprobs": logprobs, "topk_logprobs": None})
