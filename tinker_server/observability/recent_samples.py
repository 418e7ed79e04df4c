"""Samples in memory, for people to read: the latest, and a few of a run's steps. `sample_files.py` keeps them on disk.

All samples are bounded together. Where room is needed, the owner with the most bytes gives way.
"""

import itertools
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.observability.thinned_steps import ThinnedSteps
from tinker_server.store.futures.observers import Work
from tinker_server.store.samplers import run_of_weights

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

    @property
    def run_id(self) -> str:
        """Return the run that saved the weights; empty for a base model."""
        return run_of_weights(self.model_path, self.directory)


OnChange = Callable[[str], None]
"""Gets the owner whose samples have changed."""
StepOf = Callable[[Drawn], Awaitable[int | None]]
"""Returns the steps of the run before weights were saved; None if that is not known."""


async def _unknown_step(_: Drawn) -> int | None:
    return None


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


class _Owned:
    """The samples of an owner."""

    def __init__(self) -> None:
        self.by_id: dict[str, Shown] = {}
        self.newest: deque[Shown] = deque()
        """The latest, newest first."""
        self.of_runs: dict[str, ThinnedSteps[Drawn, Shown]] = {}
        """Older samples by run."""
        self.size_bytes = 0

    def add(self, shown: Shown, most_newest: int) -> None:
        """Add a sample; one that is no longer among the latest stays as one of its run's, if it has a run."""
        self.by_id[shown.sample_id] = shown
        self.size_bytes += shown.size_bytes
        self.newest.appendleft(shown)
        if len(self.newest) > most_newest:
            old = self.newest.pop()
            of = self.of_runs.setdefault(old.of.run_id, ThinnedSteps()) if old.of.run_id else None
            self.remove([old] if of is None else of.add(old.of, old.at, old))

    def shrink(self) -> None:
        """Remove a step's samples from the run that has most of them, else the oldest of the latest."""
        if not self.of_runs:
            self.remove([self.newest.pop()])
            return
        run_id = max(self.of_runs, key=lambda name: len(self.of_runs[name]))
        self.remove(self.of_runs[run_id].thin())
        if not len(self.of_runs[run_id]):
            del self.of_runs[run_id]

    def remove(self, gone: Iterable[Shown]) -> None:
        """Forget samples that are in no list any more."""
        for shown in gone:
            del self.by_id[shown.sample_id]
            self.size_bytes -= shown.size_bytes

    def drop_run(self, run_id: str) -> None:
        """Remove all samples of a run's weights."""
        self.remove([shown for shown in self.by_id.values() if shown.of.run_id == run_id])
        self.newest = deque(shown for shown in self.newest if shown.sample_id in self.by_id)
        self.of_runs.pop(run_id, None)


class Gallery:
    """Caches the latest `per_owner` samples of each owner, and some older of each run, fewer if they are large."""

    def __init__(
        self,
        per_owner: int,
        max_bytes: int = MAX_BYTES,
        on_change: OnChange = lambda owner: None,
        step_of: StepOf = _unknown_step,
    ) -> None:
        """Cache nothing if `per_owner` is 0."""
        self.per_owner = per_owner
        self.chat_bytes = CHAT_BYTES if per_owner else 0
        """Value of `protocol.ChatTask.kept_bytes`."""
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._step_of = step_of
        self._of: dict[str, _Owned] = {}

    async def on_success(self, work: Work[Any]) -> None:
        """Cache a sample that an operation has drawn."""
        if not isinstance(work.response, SampleResponse):
            return
        of = Drawn(work.base_model, work.model_path, work.directory)
        shown = self._shown(work.request, work.response, work.operation.owner, of)
        if shown is not None:
            self._cache(replace(shown, step=await self._step_of(of)) if of.run_id else shown)

    def note(self, request: SampleRequest, response: SampleResponse, owner: str, of: Drawn) -> None:
        """Cache a sample of these weights, whose step is not known yet."""
        if (shown := self._shown(request, response, owner, of)) is not None:
            self._cache(shown)

    def _shown(self, request: SampleRequest, response: SampleResponse, owner: str, of: Drawn) -> Shown | None:
        """Return what is cached of a sample; None if it is too large."""
        if not self.per_owner or (size_bytes := _size_bytes(request.prompt)) is None:
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

    def _cache(self, shown: Shown) -> None:
        self._add(shown)
        self._on_change(shown.owner)

    def _add(self, shown: Shown) -> None:
        self._of.setdefault(shown.owner, _Owned()).add(shown, self.per_owner)
        while sum(owned.size_bytes for owned in self._of.values()) > self._max_bytes:
            largest = max(self._of, key=lambda owner: self._of[owner].size_bytes)
            self._of[largest].shrink()
            if not self._of[largest].by_id:
                del self._of[largest]

    def of(self, owner: str) -> list[Shown]:
        """Return an owner's latest samples, newest first."""
        return list(self._of[owner].newest) if owner in self._of else []

    def of_run(self, owner: str, run_id: str) -> list[Shown]:
        """Return the samples of a run's weights, newest first: of the latest and of those that are kept by step."""
        if (owned := self._of.get(owner)) is None:
            return []
        newest = [shown for shown in owned.newest if shown.of.run_id == run_id]
        return newest + list(owned.of_runs.get(run_id, ()))[::-1]

    def get(self, owner: str, sample_id: str) -> Shown | None:
        """Return a sample, or None if it was evicted or belongs to another owner."""
        return self._of[owner].by_id.get(sample_id) if owner in self._of else None

    def all(self) -> list[Shown]:
        """Return the samples of all owners, newest first."""
        every = itertools.chain.from_iterable(owned.by_id.values() for owned in self._of.values())
        return sorted(every, key=lambda shown: shown.at, reverse=True)

    def restore(self, samples: list[Shown]) -> None:
        """Cache samples of an earlier server, the newest first."""
        if self.per_owner:
            for shown in reversed(samples):
                self._add(shown)

    def drop_run(self, owner: str, run_id: str) -> None:
        """Forget the samples of a run that is deleted."""
        if owner in self._of:
            self._of[owner].drop_run(run_id)


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
