"""What is kept of a sample, for people to read."""

import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.store.samplers import run_of_weights

SEQUENCES, TOKENS = 4, 2000
"""Sequences cached per sample, and tokens per sequence: the first ones."""
PROMPT_TOKENS = 20_000
"""Prompts with more tokens are not cached, nor those with more bytes of images than IMAGE_BYTES."""
IMAGE_BYTES = 8 << 20
_TOKEN_BYTES = 8
CHUNKS = 1000
"""Prompts with more chunks are not cached either."""
CHUNK_BYTES = 1000
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

    @property
    def run_id(self) -> str:
        """Return the run that saved the weights; empty for a base model."""
        return run_of_weights(self.model_path, self.directory)


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
    step: int | None = None
    """Steps of the run before the weights were saved; None if they were not known when it was drawn."""
    at: float = field(default_factory=time.time)
    sample_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def make_shown(request: SampleRequest, response: SampleResponse, owner: str, of: Drawn) -> Shown | None:
    """Return what is kept of a sample of these weights; None if it is too large."""
    if (size_bytes := _size_bytes(request.prompt)) is None:
        return None
    sequences = [_beginning(sequence) for sequence in itertools.islice(response.sequences, SEQUENCES)]
    size_bytes += sum(len(sequence.tokens) for sequence in sequences) * _TOKEN_BYTES
    return Shown(
        owner=owner,
        sampler_id=request.sampling_session_id or "",
        of=of,
        prompt=request.prompt,
        params=request.sampling_params.model_copy(update={"stop": None}),  # not shown
        num_samples=request.num_samples,
        sequences=sequences,
        size_bytes=size_bytes,
    )


def _size_bytes(prompt: ModelInput) -> int | None:
    """Return the memory that a prompt takes, or None if it is too large to cache."""
    if len(prompt.chunks) > CHUNKS:
        return None
    tokens, images, overhead = 0, 0, CHUNK_BYTES * (1 + len(prompt.chunks))
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
