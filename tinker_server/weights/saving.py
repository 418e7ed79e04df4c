"""Saving of a model's weights: for training, for sampling (also directly into a sampling session), or for export.

Directories are written first and then recorded, so that a recorded checkpoint is whole.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tinker_server.api_schemas import ids
from tinker_server.api_schemas.weights import (
    Kind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    TinkerPath,
    check_name,
)
from tinker_server.backends.protocol import SavedForm
from tinker_server.errors import BadRequest, UnknownSampler, Unsupported
from tinker_server.models.model import Model
from tinker_server.offload import on_files
from tinker_server.store.futures.observers import Work
from tinker_server.store.records import Checkpoint, SamplingSession, TrainingRun
from tinker_server.weights import export
from tinker_server.weights.encryption import Recipient, encrypt_files, parse_recipients
from tinker_server.weights.lookup import WeightStores

MIN_TTL_S, MAX_TTL_S = 3600, 315_360_000


def check_ttl(ttl_s: int | None) -> None:
    """Raise BadRequest for a lifetime outside the limits."""
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise BadRequest(f"ttl_seconds {ttl_s} is not between {MIN_TTL_S} and {MAX_TTL_S}")


async def save_weights(stores: WeightStores, model: Model, work: Work[SaveWeightsRequest]) -> SaveWeightsResponse:
    """Save a training checkpoint."""
    saved = await _save(stores, "weights", model, work)
    return SaveWeightsResponse(path=saved.tinker_path)


async def save_weights_for_sampler(
    stores: WeightStores, model: Model, work: Work[SaveWeightsForSamplerRequest]
) -> SaveWeightsForSamplerResponse:
    """Save sampler weights under a name, or as a new sampling session on weights without a name."""
    request = work.request
    if request.kind == "inflight" and request.path is not None:
        raise Unsupported("kind 'inflight' is for a sampling session; weights with a name are of kind 'snapshot'")
    if (request.path is None) == (request.sampling_session_seq_id is None):
        raise Unsupported("give either path (a name) or sampling_session_seq_id (a new sampling session)")
    if request.path is not None:
        saved = await _save(stores, "sampler_weights", model, work)
        return SaveWeightsForSamplerResponse(path=saved.tinker_path)
    if request.ttl_seconds is not None or request.user_metadata is not None:
        raise Unsupported("ttl_seconds and user_metadata are supported only for weights with a name")
    if (earlier := await _find_earlier(stores, request)) is not None:
        if request.kind == "inflight":  # what interrupted the save may have come before this
            await _supersede(stores, earlier.directory or "")
        return SaveWeightsForSamplerResponse(sampling_session_id=earlier.sampling_session_id)
    async with stores.storage.writing(request.model_id, request.kind, f"{request.seq_id}") as directory:
        run, trainer, loaded = await model.ensure_loaded()
        await stores.holdings.require_room(run.owner)
        await trainer.save(loaded, stores.storage.path(directory), "sampler")
        async with stores.holdings.weights(run.owner, directory) as size_bytes:
            await _publish(stores, run, directory)
            session_id = ids.sampling_session_id(run.session_id, request.sampling_session_seq_id or 0)
            name = await _sampling_session(stores, run, session_id, directory, size_bytes)
    if request.kind == "inflight":
        await _supersede(stores, directory)
    return SaveWeightsForSamplerResponse(sampling_session_id=name)


async def _find_earlier(stores: WeightStores, request: SaveWeightsForSamplerRequest) -> SamplingSession | None:
    """Return the sampling session of this same operation, if an earlier server or try made it but stored no answer."""
    session_id = request.model_id.partition(":train:")[0]
    name = ids.sampling_session_id(session_id, request.sampling_session_seq_id or 0)
    with contextlib.suppress(UnknownSampler):
        known = await stores.samplers.get(name)
        if (known.directory or "").startswith(f"checkpoints/{request.model_id}/{request.kind}/{request.seq_id}~"):
            return known
    return None


async def _publish(stores: WeightStores, run: TrainingRun, directory: str) -> None:
    """Have the sampler load the weights. If it does not score them as the trainer does, the save fails."""
    await stores.bases.base(run.base_model).sampler.publish(stores.storage.path(directory), run.owner)


async def _sampling_session(
    stores: WeightStores, run: TrainingRun, sampling_session_id: str, directory: str, size_bytes: int
) -> str:
    sampler = SamplingSession(
        sampling_session_id=sampling_session_id,
        owner=run.owner,
        session_id=run.session_id,
        base_model=run.base_model,
        base_fingerprint=run.base_fingerprint,
        directory=directory,
        size_bytes=size_bytes,
        created_at=time.time(),
    )
    return await stores.samplers.create(sampler)


async def _supersede(stores: WeightStores, directory: str) -> None:
    """Have all inflight sampling sessions of a model sample from its newest weights."""
    folder = f"{directory.rpartition('/')[0]}/"
    left = await stores.samplers.repoint(folder, directory)
    # A sample that has just begun may still be reading the weights it began with, but not those before.
    await stores.storage.delete_unreferenced_in(folder, left)


async def save_weights_external(
    stores: WeightStores, model: Model, work: Work[SaveWeightsExternalRequest]
) -> SaveWeightsExternalResponse:
    """Save the adapter as files for other programs."""
    texts = work.request.age_encryption_recipients
    recipients = [] if texts is None else parse_recipients(texts)
    saved = await _save(stores, "external_weights", model, work, recipients)
    return SaveWeightsExternalResponse(path=saved.tinker_path, size_bytes=saved.size_bytes)


async def _save(
    stores: WeightStores,
    kind: Kind,
    model: Model,
    work: Work[SaveWeightsRequest] | Work[SaveWeightsForSamplerRequest] | Work[SaveWeightsExternalRequest],
    recipients: Sequence[Recipient] = (),
) -> Checkpoint:
    """Save and record weights under a name. The trainer is held only while it writes."""
    request = work.request
    try:
        path = TinkerPath(model.id, kind, check_name(request.path or ""))
    except ValueError as error:
        raise Unsupported(str(error)) from None
    now = time.time()
    check_ttl(request.ttl_seconds)
    first = await stores.checkpoints.find(path)
    if first is not None and first.saved_as == request.seq_id:
        return first  # saved by this same operation, whose answer an earlier server did not store
    if first is not None and not request.overwrite and not first.has_expired(now):
        raise Unsupported(f"{path} exists already; overwrite=true replaces it, or take another name")
    replaced = None if first is None else first.directory
    async with stores.storage.writing(path.run_id, path.kind, path.name) as directory:
        run, trainer, loaded = await model.ensure_loaded()
        await stores.holdings.require_room(run.owner, replaced=replaced)
        if kind == "external_weights":
            target = stores.storage.path(directory)
            await trainer.save(loaded, target / export.PEFT, "export")
            await _finish_export(run, target, recipients)
        else:
            form: SavedForm = "state" if kind == "weights" else "export"
            await trainer.save(loaded, stores.storage.path(directory), form)
        async with stores.holdings.weights(run.owner, directory, replaced) as size_bytes:
            await stores.storage.flush(directory)
            if kind == "sampler_weights":
                await _publish(stores, run, directory)
            checkpoint = replace(
                Checkpoint.of_run(run, path, directory, size_bytes, now),
                user_metadata=request.user_metadata,
                expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
                saved_as=request.seq_id,
            )
            await stores.checkpoints.put(checkpoint)
    work.used["checkpoint"] = 1
    await stores.audit.note("checkpoint_saved", run.owner, model_id=run.model_id, tinker_path=str(path))
    if first is not None:
        await stores.storage.delete(first.directory)
    return checkpoint


async def _finish_export(run: TrainingRun, directory: Path, recipients: Sequence[Recipient]) -> None:
    """Add an adapter in the tinker tools' form to PEFT's in its subdirectory. The files are encrypted if there are
    recipients."""
    await on_files(run.owner, export.write_both_forms, directory)
    if recipients:
        await on_files(run.owner, encrypt_files, directory, recipients)
