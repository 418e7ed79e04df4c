"""Samples from a base model or saved weights."""

from pathlib import Path

from api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from api_schemas.sampling import SampleRequest, SampleResponse
from backends.protocol import SamplingTask
from tinker_server.errors import UnknownCheckpoint
from tinker_server.observability.recent_samples import Drawn, Gallery
from tinker_server.observability.tracing.hooks import note
from tinker_server.offload import LARGE, off_loop
from tinker_server.store.usage import NO_SESSION
from tinker_server.weights.lookup import WeightStores, find_weights


class Sampling:
    """Works on the samplers. Raises InvalidInput, BackendFailed or a TinkerServerError; texts are for the user."""

    def __init__(self, stores: WeightStores, gallery: Gallery) -> None:
        self._stores = stores
        self._gallery = gallery

    async def sample(self, request: SampleRequest, owner: str) -> SampleResponse:
        """Return as many continuations as the request asks for."""
        if request.sampling_session_id is not None:
            with self._stores.samplers.using(request.sampling_session_id):
                sampler = await self._stores.samplers.get(request.sampling_session_id)
                if sampler.weights_deleted_at is not None:
                    raise UnknownCheckpoint(
                        "the weights of the sampling session were deleted: they had no name, and were not used for long"
                    )
                session_id, base_model = sampler.session_id, sampler.base_model
                note(base_model=base_model)
                self._stores.bases.require_same(base_model, sampler.base_fingerprint, sampler.sampling_session_id)
                weights = self._weights(sampler.directory, sampler.model_path or "the weights of the sampling session")
                task = SamplingTask.from_request(request, weights, owner)
                of = Drawn(base_model, sampler.model_path, sampler.directory)
                response = await self._stores.bases.base(base_model).sampler.sample(task)
        else:
            session_id = NO_SESSION
            base_model, directory, _ = await find_weights(self._stores, request.base_model, request.model_path, owner)
            note(base_model=base_model)
            weights = self._weights(directory, f"{request.model_path}")
            task = SamplingTask.from_request(request, weights, owner)
            of = Drawn(base_model, request.model_path, directory)
            response = await self._stores.bases.base(base_model).sampler.sample(task)
        await self._count(request, response, owner, session_id, base_model)
        self._gallery.note(request, response, owner, of)
        return response

    def _weights(self, directory: str | None, name: str) -> Path | None:
        if directory is not None and not self._stores.storage.holds(directory):
            raise UnknownCheckpoint(f"{name} were deleted")
        return None if directory is None else self._stores.storage.path(directory)

    async def _count(
        self, request: SampleRequest, response: SampleResponse, owner: str, session_id: str, base_model: str
    ) -> None:
        """Count prompt tokens once, however many continuations were sampled, and an image as what it expands to."""
        length = _known_length(request.prompt)
        if length is None:
            check = self._stores.bases.base(base_model).check_sample
            length = (await off_loop(owner, LARGE, check, request)).num_tokens
        cached = min(response.prompt_cache_hit_tokens, length)
        sampled = sum(len(sequence.tokens) for sequence in response.sequences)
        used = (owner, session_id, base_model)
        self._stores.usage.count("prefill", *used, length - cached)
        self._stores.usage.count("cached_prefill", *used, cached)
        self._stores.usage.count("sampled", *used, sampled)
        note(prompt_tokens=length, cached_tokens=cached, sampled_tokens=sampled)


def _known_length(prompt: ModelInput) -> int | None:
    """Return the tokens of a prompt; None where an image's client did not say how many it expects."""
    length = 0
    for chunk in prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            length += len(chunk.tokens)
        elif isinstance(chunk, ImageChunk) and chunk.expected_tokens is not None:
            length += chunk.expected_tokens
        else:
            return None
    return length
