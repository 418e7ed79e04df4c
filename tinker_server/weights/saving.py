"""Saving a model's weights: for training, for sampling (also straight into a sampling session), or for elsewhere."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from api_schemas.weights import (
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
from backends.protocol import Trainer
from tinker_server.errors import BadRequest, Unsupported
from tinker_server.models import Models
from tinker_server.store.directories import Storage
from tinker_server.store.runs import CheckpointStore
from tinker_server.store.sessions import SamplerStore
from tinker_server.store.tables import Checkpoint, SamplingSession, TrainingRun
from tinker_server.store.usage import AuditStore, UsageStore
from tinker_server.weights import export
from tinker_server.weights.encryption import Recipient, encrypt_files, parse_recipients

PEFT = "peft"
"""Subdirectory of exported weights that holds them in PEFT's form."""
MIN_TTL_S, MAX_TTL_S = 3600, 315_360_000


def check_ttl(ttl_s: int | None) -> None:
    """Raises BadRequest."""
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise BadRequest(f"ttl_seconds {ttl_s} is not between {MIN_TTL_S} and {MAX_TTL_S}")


class Saving:
    """Writes directories and records them, in this order: a recorded checkpoint is whole."""

    def __init__(
        self,
        models: Models,
        checkpoints: CheckpointStore,
        samplers: SamplerStore,
        storage: Storage,
        usage: UsageStore,
        audit: AuditStore,
    ) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._superseded: dict[str, set[str]] = {}
        """By model, the inflight weights that were replaced last."""
        self._storage = storage
        self._usage = usage
        self._audit = audit

    async def save_weights(self, request: SaveWeightsRequest) -> SaveWeightsResponse:
        """A training checkpoint."""
        async with self._models.training(request.model_id) as (run, trainer):
            path = await self._save(run, "weights", request.path, request, trainer.save_state)
        return SaveWeightsResponse(path=path)

    async def save_weights_for_sampler(self, request: SaveWeightsForSamplerRequest) -> SaveWeightsForSamplerResponse:
        """Sampler weights under a name, or a new sampling session on unnamed ones."""
        inflight = request.kind == "inflight"
        if inflight and request.path is not None:
            raise Unsupported("kind 'inflight' is for a sampling session; weights with a name are of kind 'snapshot'")
        if (request.path is None) == (request.sampling_session_seq_id is None):
            raise Unsupported("give either path (a name) or sampling_session_seq_id (a new sampling session)")
        async with self._models.training(request.model_id) as (run, trainer):
            save = trainer.save_sampler_weights
            if request.path is not None:
                path = await self._save(run, "sampler_weights", request.path, request, save)
                return SaveWeightsForSamplerResponse(path=path)
            if request.ttl_seconds is not None or request.user_metadata is not None:
                raise Unsupported("ttl_seconds and user_metadata are supported only for weights with a name")
            directory = self._storage.fresh(run.model_id, request.kind, f"{request.seq_id}")
            try:
                await save(run.model_id, self._storage.path(directory))
                sampling_session_id = await self._sampling_session(run, request.sampling_session_seq_id, directory)
            except BaseException:
                await self._storage.delete(directory)
                raise
        if inflight:
            await self._supersede(run.model_id, directory)
        return SaveWeightsForSamplerResponse(sampling_session_id=sampling_session_id)

    async def _sampling_session(self, run: TrainingRun, number: int | None, directory: str) -> str:
        sampler = SamplingSession(
            sampling_session_id=f"{run.session_id}:sample:{number}",
            owner=run.owner,
            session_id=run.session_id,
            base_model=run.base_model,
            directory=directory,
            created_at=time.time(),
        )
        return await self._samplers.create(sampler)

    async def _supersede(self, model_id: str, directory: str) -> None:
        """All inflight sampling sessions of a model sample from its newest weights from now on."""
        left = await self._samplers.repoint(f"{directory.rpartition('/')[0]}/", directory)
        # A sample that has just begun may still be reading the weights it began with, but not the ones before.
        for old in self._superseded.get(model_id, set()) - {directory}:
            await self._storage.delete(old)
        self._superseded[model_id] = left

    async def save_weights_external(self, request: SaveWeightsExternalRequest) -> SaveWeightsExternalResponse:
        """The adapter as files for other programs."""
        texts = request.age_encryption_recipients
        recipients = [] if texts is None else parse_recipients(texts)
        async with self._models.training(request.model_id) as (run, trainer):

            async def save(model_id: str, directory: Path) -> None:
                await _export(trainer, model_id, directory, recipients)

            path = await self._save(run, "external_weights", request.path, request, save)
        saved = await self._checkpoints.require(TinkerPath.parse(path), run.owner, time.time())
        return SaveWeightsExternalResponse(path=path, size_bytes=saved.size_bytes)

    async def _save(
        self,
        run: TrainingRun,
        kind: Kind,
        name: str,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
        save: Callable[[str, Path], Awaitable[None]],
    ) -> str:
        try:
            path = TinkerPath(run.model_id, kind, check_name(name))
        except ValueError as error:
            raise Unsupported(str(error)) from None
        now = time.time()
        check_ttl(request.ttl_seconds)
        first = await self._checkpoints.find(path)
        if first is not None and not request.overwrite:
            raise Unsupported(f"{path} exists already; overwrite=true replaces it, or take another name")
        directory = self._storage.fresh(path.run_id, path.kind, path.name)
        try:
            await save(run.model_id, self._storage.path(directory))
            await self._storage.flush(directory)
        except BaseException:
            await self._storage.delete(directory)
            raise
        checkpoint = Checkpoint(
            tinker_path=str(path),
            owner=run.owner,
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            directory=directory,
            base_model=run.base_model,
            lora_rank=run.lora_rank,
            lora_seed=run.lora_seed,
            train_unembed=run.train_unembed,
            train_mlp=run.train_mlp,
            train_attn=run.train_attn,
            user_metadata=request.user_metadata,
            size_bytes=await self._storage.size_bytes(directory),
            created_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            public=False,
            copied_from=None,
        )
        await self._checkpoints.put(checkpoint)
        self._usage.count("checkpoint", run.session_id, run.base_model, 1)
        await self._audit.note("checkpoint_saved", run.owner, model_id=run.model_id, tinker_path=str(path))
        if first is not None:
            await self._storage.delete(first.directory)
        return str(path)


async def _export(trainer: Trainer, model_id: str, directory: Path, recipients: list[Recipient]) -> None:
    """PEFT's form in a subdirectory, the tinker tools' beside it; encrypted if there are recipients."""
    await trainer.save_sampler_weights(model_id, directory / PEFT)
    await asyncio.to_thread(export.write_tinker_form, directory / PEFT, directory)
    if recipients:
        await asyncio.to_thread(encrypt_files, directory, recipients)
