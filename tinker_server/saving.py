"""Saving a model's weights: for training or for sampling, under a name or straight into a sampling session."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from api_schemas.weights import (
    Kind,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    TinkerPath,
    check_name,
)
from tinker_server.db.tables import Checkpoint, SamplingSession, TrainingRun
from tinker_server.errors import Unsupported
from tinker_server.models import Models
from tinker_server.storage import Storage
from tinker_server.store.runs import CheckpointStore
from tinker_server.store.sessions import SamplerStore

MIN_TTL_S, MAX_TTL_S = 3600, 315_360_000


class Saving:
    """Writes directories and records them, in this order: a recorded checkpoint is whole."""

    def __init__(self, models: Models, checkpoints: CheckpointStore, samplers: SamplerStore, storage: Storage) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._storage = storage

    async def save_weights(self, request: SaveWeightsRequest) -> SaveWeightsResponse:
        """A training checkpoint."""
        async with self._models.training(request.model_id) as (run, trainer):
            path = await self._save(run, "weights", request.path, request, trainer.save_state)
        return SaveWeightsResponse(path=path)

    async def save_weights_for_sampler(self, request: SaveWeightsForSamplerRequest) -> SaveWeightsForSamplerResponse:
        """Sampler weights under a name, or a new sampling session on unnamed ones."""
        if request.kind == "inflight":
            raise Unsupported("kind 'inflight' is not supported; use kind 'snapshot'")
        if (request.path is None) == (request.sampling_session_seq_id is None):
            raise Unsupported("give either path (a name) or sampling_session_seq_id (a new sampling session)")
        async with self._models.training(request.model_id) as (run, trainer):
            save = trainer.save_sampler_weights
            if request.path is not None:
                path = await self._save(run, "sampler_weights", request.path, request, save)
                return SaveWeightsForSamplerResponse(path=path)
            if request.ttl_seconds is not None or request.user_metadata is not None:
                raise Unsupported("ttl_seconds and user_metadata are supported only for weights with a name")
            directory = self._storage.fresh(run.model_id, "ephemeral", f"{request.seq_id}")
            await save(run.model_id, self._storage.path(directory))
        sampler = SamplingSession(
            sampling_session_id=f"{run.session_id}:sample:{request.sampling_session_seq_id}",
            session_id=run.session_id,
            base_model=run.base_model,
            directory=directory,
            created_at=time.time(),
        )
        return SaveWeightsForSamplerResponse(sampling_session_id=await self._samplers.create(sampler))

    async def _save(
        self,
        run: TrainingRun,
        kind: Kind,
        name: str,
        request: SaveWeightsRequest | SaveWeightsForSamplerRequest,
        save: Callable[[str, Path], Awaitable[None]],
    ) -> str:
        try:
            path = TinkerPath(run.model_id, kind, check_name(name))
        except ValueError as error:
            raise Unsupported(str(error)) from None
        now = time.time()
        if request.ttl_seconds is not None and not MIN_TTL_S <= request.ttl_seconds <= MAX_TTL_S:
            raise Unsupported(f"ttl_seconds {request.ttl_seconds} is not between {MIN_TTL_S} and {MAX_TTL_S}")
        first = await self._checkpoints.find(path)
        if first is not None and not request.overwrite:
            raise Unsupported(f"{path} exists already; overwrite=true replaces it, or take another name")
        directory = self._storage.fresh(path.run_id, path.kind, path.name)
        await save(run.model_id, self._storage.path(directory))
        checkpoint = Checkpoint(
            tinker_path=str(path),
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
        )
        await self._checkpoints.put(checkpoint)
        if first is not None:
            await self._storage.delete(first.directory)
        return str(path)
