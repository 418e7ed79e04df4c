"""The last samples that were drawn, for people to read. In memory alone, and bounded."""

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from api_schemas.inputs import ImageChunk, ModelInput
from api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams

MAX_BYTES = 64 << 20
"""Of all owners."""
SEQUENCES, TOKENS = 4, 2000
"""Of one sample, the first."""
PROMPT_TOKENS = 20_000
"""A longer prompt is not kept, nor one with larger images than the next."""
IMAGE_BYTES = 8 << 20
_TOKEN_BYTES = 8
CHUNKS = 1000
"""A prompt of more pieces is not kept either."""
_CHUNK_BYTES = 1000
"""Of memory, beside what it holds."""
CHAT_BYTES = IMAGE_BYTES + PROMPT_TOKENS * _TOKEN_BYTES + (1 << 20)
"""What a sampler's process sends of one prompt of a chat, at most."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One request and what was drawn."""

    owner: str
    sampler_id: str
    """Sampling session; empty outside of any."""
    base_model: str
    model_path: str | None
    prompt: ModelInput
    params: SamplingParams
    num_samples: int
    sequences: list[SampledSequence]
    size_bytes: int
    at: float = field(default_factory=time.time)
    sample_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Gallery:
    """`per_owner` samples of each owner, fewer where they are large."""

    def __init__(
        self, per_owner: int, max_bytes: int = MAX_BYTES, noted: Callable[[str], None] = lambda owner: None
    ) -> None:
        """`noted` is told whose samples have changed."""
        self.per_owner = per_owner
        self.chat_bytes = CHAT_BYTES if per_owner else 0
        """`protocol.ChatTask.kept_bytes`."""
        self._max_bytes = max_bytes
        self._noted = noted
        self._of: dict[str, deque[Shown]] = {}
        self._bytes: dict[str, int] = {}

    def note(self, request: SampleRequest, response: SampleResponse, owner: str, of: tuple[str, str | None]) -> None:
        """A sample was drawn from `of`: base model, and path of the weights if they have one."""
        if not self.per_owner or (size_bytes := _size_bytes(request.prompt)) is None:
            return
        sequences = [_beginning(one) for one in itertools.islice(response.sequences, SEQUENCES)]
        size_bytes += sum(len(one.tokens) for one in sequences) * _TOKEN_BYTES
        shown = Shown(
            owner=owner,
            sampler_id=request.sampling_session_id or "",
            base_model=of[0],
            model_path=of[1],
            prompt=request.prompt,
            params=request.sampling_params.model_copy(update={"stop": None}),  # which nobody is shown
            num_samples=request.num_samples,
            sequences=sequences,
            size_bytes=size_bytes,
        )
        self._of.setdefault(owner, deque()).appendleft(shown)
        self._bytes[owner] = self._bytes.get(owner, 0) + size_bytes
        if len(self._of[owner]) > self.per_owner:
            self._drop_oldest(owner)
        while sum(self._bytes.values()) > self._max_bytes:
            self._drop_oldest(max(self._bytes, key=lambda one: self._bytes[one]))
        self._noted(owner)

    def of(self, owner: str) -> list[Shown]:
        """The newest first."""
        return list(self._of.get(owner, ()))

    def get(self, owner: str, sample_id: str) -> Shown | None:
        """None for what is not kept any more, and for another owner's."""
        return next((shown for shown in self._of.get(owner, ()) if shown.sample_id == sample_id), None)

    def _drop_oldest(self, owner: str) -> None:
        self._bytes[owner] -= self._of[owner].pop().size_bytes
        if not self._of[owner]:
            del self._of[owner], self._bytes[owner]


def _size_bytes(prompt: ModelInput) -> int | None:
    """None for what is too large to be kept."""
    if len(prompt.chunks) > CHUNKS:
        return None
    tokens, images, kept = 0, 0, _CHUNK_BYTES * (1 + len(prompt.chunks))
    for chunk in prompt.chunks:
        if isinstance(chunk, ImageChunk):
            images += len(chunk.data)
        else:
            tokens += len(getattr(chunk, "tokens", ()))
    return None if tokens > PROMPT_TOKENS or images > IMAGE_BYTES else tokens * _TOKEN_BYTES + images + kept


def _beginning(sequence: SampledSequence) -> SampledSequence:
    """A copy, so that no larger array is kept for it."""
    tokens, logprobs = sequence.tokens[:TOKENS].copy(), sequence.logprobs[:TOKENS].copy()
    return sequence.model_copy(update={"tokens": tokens, "logprobs": logprobs, "topk_logprobs": None})
