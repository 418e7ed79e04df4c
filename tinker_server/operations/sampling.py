"""Samples from a base model or saved weights."""

import contextlib
import time

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SampleRequest, SampleResponse
from tinker_server.backends.protocol import InvalidInput, SamplingTask
from tinker_server.errors import UnknownCheckpoint
from tinker_server.offload import LARGE, off_loop
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.futures.observers import Work
from tinker_server.weights.lookup import WeightStores, find_weights


async def sample(stores: WeightStores, _: object, work: Work[SampleRequest]) -> SampleResponse:
    """Return as many continuations as the request asks for. Raises InvalidInput, BackendFailed or a TinkerServerError;
    texts are for the user."""
    request, owner = work.request, work.operation.owner
    with contextlib.ExitStack() as stack:
        if request.sampling_session_id is not None:
            stack.enter_context(stores.samplers.using(request.sampling_session_id))
            sampler = await stores.samplers.get(request.sampling_session_id)
            if sampler.weights_deleted_at is not None:
                raise UnknownCheckpoint(
                    "the weights of the sampling session were deleted: they had no name, and were not used for long"
                )
            work.base_model, work.session_id = sampler.base_model, sampler.session_id
            work.model_path, work.directory = sampler.model_path, sampler.directory
            readable = sampler.model_path
            base = stores.bases.require_same(sampler.base_model, sampler.base_fingerprint, sampler.sampling_session_id)
        else:
            found = await find_weights(stores, request.base_model, request.model_path, owner)
            work.base_model, work.model_path, work.directory = found.base_model, request.model_path, found.directory
            base, readable = stores.bases.base(found.base_model), None
        if work.directory is not None and not stores.storage.holds(work.directory):
            raise UnknownCheckpoint(f"{work.model_path or 'the weights of the sampling session'} were deleted")
        if readable is not None:  # another owner's weights may be published no longer
            await stores.checkpoints.require_readable(parse_path(readable), {owner}, time.time())
        while True:
            weights = None if work.directory is None else stores.storage.path(work.directory)
            task = SamplingTask.from_request(request, weights, owner, work.operation.request_id)
            try:
                response = await base.sampler.sample(task)
                break
            except InvalidInput:
                newer = await _newer_directory(stores, request, work.directory)
                if newer is None:
                    raise
                work.directory = newer
    length = _count_tokens(request.prompt)
    if length is None:
        length = (await off_loop(owner, LARGE, base.check_sample, request)).num_tokens
    # Prompt tokens count once, however many continuations were sampled, and an image as what it expands to.
    cached = min(response.prompt_cache_hit_tokens, length)
    sampled = sum(len(sequence.tokens) for sequence in response.sequences)
    work.used = {"prefill": length - cached, "cached_prefill": cached, "sampled": sampled}
    return response


async def _newer_directory(stores: WeightStores, request: SampleRequest, directory: str | None) -> str | None:
    """Return the weights of a session that has left those of a directory, as an inflight save does, if these are
    deleted by now: another engine does not find them, where that of a sample has died."""
    if request.sampling_session_id is None or directory is None or stores.storage.holds(directory):
        return None
    newer = (await stores.samplers.get(request.sampling_session_id)).directory
    return newer if newer is not None and newer != directory and stores.storage.holds(newer) else None


def _count_tokens(prompt: ModelInput) -> int | None:
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
