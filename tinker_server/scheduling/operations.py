"""What each kind of accepted work does, on the trainers and samplers; knows neither HTTP nor lanes.

Lasting refusals are raised here, not at the submit: a number that was accepted is never missing.
"""

import json
import secrets
import time
from collections.abc import Set

from api_schemas import wire
from api_schemas.base import Request, Response
from api_schemas.sampling import SampleRequest
from api_schemas.training import (
    AdamParams,
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardRequest,
    LoraConfig,
    OptimizerConfig,
    OptimStepRequest,
    OptimStepResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from api_schemas.weights import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinker_server.auth.keys import Keys
from tinker_server.errors import UnknownCheckpoint, Unsupported
from tinker_server.models import Models, lora_of
from tinker_server.offload import off_loop
from tinker_server.scheduling.counting import count_sample, count_training
from tinker_server.store.directories import Storage
from tinker_server.store.futures import Work
from tinker_server.store.results import Result
from tinker_server.store.runs import CheckpointStore, RunStore, parse_path
from tinker_server.store.sessions import SamplerStore
from tinker_server.store.tables import Checkpoint, TrainingRun
from tinker_server.store.usage import AuditStore, UsageStore
from tinker_server.weights.lookup import find_weights
from tinker_server.weights.saving import Saving


class ModelOperations:
    """Runs one piece of work to its result."""

    def __init__(
        self,
        keys: Keys,
        models: Models,
        runs: RunStore,
        checkpoints: CheckpointStore,
        samplers: SamplerStore,
        storage: Storage,
        usage: UsageStore,
        audit: AuditStore,
    ) -> None:
        self._keys = keys
        self._models = models
        self._runs = runs
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._storage = storage
        self._usage = usage
        self._saving = Saving(models, checkpoints, samplers, storage, usage, audit)

    async def run(self, work: Work, request: Request) -> Result:
        """Raises InvalidInput, BackendFailed or a TinkerServerError; its text is for the user."""
        match request:
            case ForwardBackwardRequest():
                return await self._forward_backward(request, len(work.body))
            case OptimStepRequest():
                return _json(await self._optim_step(request))
            case SampleRequest():
                return await self._sample(request, work.owner)
            case SaveWeightsRequest():
                return _json(await self._saving.save_weights(request))
            case SaveWeightsForSamplerRequest():
                return _json(await self._saving.save_weights_for_sampler(request))
            case SaveWeightsExternalRequest():
                return _json(await self._saving.save_weights_external(request))
            case UnloadModelRequest():
                return _json(await self._unload_model(request))
            case CreateModelRequest():
                return _json(await self._create_model(request, work.owner))
            case LoadWeightsRequest():
                return _json(await self._load_weights(request, work.owner))
        raise AssertionError(f"no operation takes a {type(request).__name__}")

    def replay(self, work: Work) -> Request | None:
        """A sample's request; None for training work, whose model is gone after a restart."""
        return SampleRequest.model_validate_json(work.body) if work.kind == "sample" else None

    async def _forward_backward(self, request: ForwardBackwardRequest, size_bytes: int) -> Result:
        async with self._models.training(request.model_id) as (run, trainer):
            output = await trainer.forward_backward(
                request.model_id, request.forward_backward_input, backward=not request.forward_only
            )
        count_training(self._usage, run.session_id, run.base_model, output)
        return Result(await off_loop(size_bytes, wire.encode_forward_backward, output), wire.PROTOBUF)

    async def _optim_step(self, request: OptimStepRequest) -> OptimStepResponse:
        if request.optimizer_params is not None:
            raise Unsupported("optimizer_params is not supported: models here have adamw; send adam_params")
        async with self._models.training(request.model_id) as (_, trainer):
            return await trainer.optim_step(request.model_id, request.adam_params or AdamParams())

    async def _sample(self, request: SampleRequest, owner: str) -> Result:
        if request.sampling_session_id is None:
            session_id, model_path = None, request.model_path
            base_model, directory = await find_weights(
                self._models, self._checkpoints, request.base_model, request.model_path, owner
            )
        else:
            sampler = await self._samplers.get(request.sampling_session_id)
            session_id, base_model = sampler.session_id, sampler.base_model
            model_path, directory = sampler.model_path, sampler.directory
            self._samplers.note_use(sampler.sampling_session_id)
            if sampler.weights_deleted_at is not None:
                raise UnknownCheckpoint(
                    "the weights of the sampling session were deleted: they had no name, and were not used for long"
                )
        base = self._models.base(base_model)
        weights = None
        if directory is not None:
            if not self._storage.holds(directory):
                raise UnknownCheckpoint(f"{model_path or 'the weights of the sampling session'} were deleted")
            weights = self._storage.path(directory)
        response = await base.sampler.sample(request, weights)
        if session_id is not None:
            count_sample(self._usage, session_id, base_model, request, response)
        return Result(wire.encode_sample(response), wire.PROTOBUF)

    async def _create_model(self, request: CreateModelRequest, owner: str) -> CreateModelResponse:
        self._models.base(request.base_model)
        if request.lora_config is None:
            raise Unsupported("lora_config is missing: full fine-tuning is not supported, only LoRA")
        run = _run(request, owner, request.base_model, _checked_lora(request.lora_config), request.optimizer_config)
        await self._create(run, None, with_optimizer=False)
        return CreateModelResponse(model_id=run.model_id)

    async def _unload_model(self, request: UnloadModelRequest) -> UnloadModelResponse:
        run = await self._runs.get(request.model_id)
        await self._models.drop(run)
        return UnloadModelResponse(model_id=run.model_id)

    async def _load_weights(self, request: LoadWeightsRequest, owner: str) -> LoadWeightsResponse:
        checkpoint = await self._checkpoint(request.path, self._keys.readers(owner, request.weights_access_token))
        if request.base_model not in (None, checkpoint.base_model):
            raise Unsupported(f"{request.path} is of {checkpoint.base_model}, not of {request.base_model}")
        if request.model_id is not None:
            model_id = request.model_id
            async with self._models.training(model_id) as (run, trainer):
                if run.base_model != checkpoint.base_model:
                    raise Unsupported(f"{request.path} is of {checkpoint.base_model}, not of {run.base_model}")
                directory = self._storage.path(checkpoint.directory)
                await trainer.load_state(model_id, directory, with_optimizer=request.optimizer)
        else:
            lora = lora_of(checkpoint)
            run = _run(request, owner, checkpoint.base_model, lora, request.optimizer_config or OptimizerConfig())
            await self._create(run, checkpoint, with_optimizer=request.optimizer)
            model_id = run.model_id
        return LoadWeightsResponse(path=request.path, model_id=model_id)

    async def _checkpoint(self, path: str, readers: Set[str]) -> Checkpoint:
        parsed = parse_path(path)
        if parsed.kind != "weights":
            raise Unsupported(f"{path} cannot be trained on; take a tinker://<run>/weights/<name> (save_state)")
        return await self._checkpoints.require_readable(parsed, readers, time.time())

    async def _create(self, run: TrainingRun, checkpoint: Checkpoint | None, *, with_optimizer: bool) -> None:
        """The run is recorded once the model is in memory, and is not in memory unless it is recorded."""
        async with self._models.turn(run.base_model) as trainer:
            await trainer.create_model(run.model_id, lora_of(run))
            try:
                if checkpoint is not None:
                    directory = self._storage.path(checkpoint.directory)
                    await trainer.load_state(run.model_id, directory, with_optimizer=with_optimizer)
                await self._runs.add(run)
            except BaseException:
                await trainer.delete_model(run.model_id)
                raise


def _json(response: Response) -> Result:
    """Strict JSON: the SDK's parser takes no NaN, so that is an error here."""
    body = json.dumps(response.model_dump(mode="json", exclude_none=True), allow_nan=False)
    return Result(body.encode(), "application/json")


def _checked_lora(lora: LoraConfig) -> LoraConfig:
    """With the seed filled in. What ranks there are is the trainer's to say."""
    if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
        raise Unsupported("lora_config trains nothing: set train_unembed, train_mlp or train_attn")
    if lora.seed is not None and not 0 <= lora.seed < 2**63:
        raise Unsupported(f"lora_config.seed {lora.seed} is not between 0 and 2^63 - 1")
    return lora if lora.seed is not None else lora.model_copy(update={"seed": secrets.randbelow(2**31)})


def _run(
    request: CreateModelRequest | LoadWeightsRequest,
    owner: str,
    base_model: str,
    lora: LoraConfig,
    optimizer: OptimizerConfig,
) -> TrainingRun:
    if optimizer != OptimizerConfig():
        raise Unsupported(f"optimizer_config {optimizer.model_dump()} is not supported; only type 'adamw' is")
    return TrainingRun(
        model_id=f"{request.session_id}:train:{request.model_seq_id}",
        owner=owner,
        session_id=request.session_id,
        model_seq_id=request.model_seq_id,
        base_model=base_model,
        lora_rank=lora.rank,
        lora_seed=lora.seed,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        user_metadata=request.user_metadata,
        optimizer_config=optimizer.model_dump(),
        status="active",
        created_at=time.time(),
    )
