"""What the operations on models do: creating, training, loading and unloading; knows neither HTTP nor lanes.

Lasting refusals are raised here, not at the submit: a number that was accepted is never missing.
"""

import contextlib
import secrets
import time
from collections.abc import Set

from api_schemas import ids
from api_schemas.training import (
    AdamParams,
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardOutput,
    LoraConfig,
    OptimizerConfig,
    OptimStepRequest,
    OptimStepResponse,
    Trainable,
    UnloadModelRequest,
    UnloadModelResponse,
)
from api_schemas.weights import LoadWeightsRequest, LoadWeightsResponse
from backends.protocol import BaseModelInfo, EncodedBatch, InvalidInput
from tinker_server.auth.keys import Keys
from tinker_server.errors import ModelIdTaken, Unsupported
from tinker_server.models.registry import Models
from tinker_server.observability.tracing.hooks import note
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.store.records import Checkpoint, TrainingRun
from tinker_server.store.runs import RunStore
from tinker_server.store.usage import UsageStore


class ModelOperations:
    """On the trainers. Methods raise InvalidInput, BackendFailed or a TinkerServerError; texts are for the user."""

    def __init__(  # noqa: PLR0913
        self,
        keys: Keys,
        models: Models,
        runs: RunStore,
        checkpoints: CheckpointStore,
        storage: Storage,
        usage: UsageStore,
        holdings: Holdings,
    ) -> None:
        self._keys = keys
        self._models = models
        self._runs = runs
        self._checkpoints = checkpoints
        self._storage = storage
        self._usage = usage
        self._holdings = holdings

    async def forward_backward(self, model_id: str, batch: EncodedBatch, *, backward: bool) -> ForwardBackwardOutput:
        """Log probabilities, and with `backward` the gradient added to the model's."""
        async with self._models.training(model_id) as (run, trainer):
            output = await trainer.forward_backward(model_id, batch, backward=backward)
        # Every position of every datum; images as many as they are expanded to.
        tokens = sum(len(outputs["logprobs"]) for outputs in output.loss_fn_outputs)
        self._usage.count("training", run.owner, run.session_id, run.base_model, tokens)
        note(trained_tokens=tokens)
        return output

    async def mark_incomplete(self, model_id: str) -> None:
        """Have the model's next optim_step fail and clear the gradient."""
        async with self._models.training(model_id) as (_, trainer):
            await trainer.mark_incomplete(model_id)

    async def is_to_be_had(self, model_id: str) -> bool:
        """Whether a model is in memory or can be restored."""
        run = await self._runs.find(model_id)
        return run is not None and run.status != "lost"

    def last_turn(self, model_id: str) -> int:
        """A number that changes when a trainer begins to work for a model."""
        return self._models.last_turn(model_id)

    async def optim_step(self, request: OptimStepRequest) -> OptimStepResponse:
        """Apply the gradient, then clear it."""
        async with self._models.training(request.model_id) as (_, trainer):
            if request.optimizer_params is not None:
                # As every step that its user is to blame for: the gradient is cleared.
                await trainer.mark_incomplete(request.model_id)
                with contextlib.suppress(InvalidInput):
                    await trainer.optim_step(request.model_id, AdamParams())
                raise Unsupported("optimizer_params is not supported: models here have adamw; send adam_params")
            return await trainer.optim_step(request.model_id, request.adam_params or AdamParams())

    async def create_model(self, request: CreateModelRequest, owner: str) -> CreateModelResponse:
        """A fresh model."""
        base = self._models.base(request.base_model).info
        if request.lora_config is None:
            if base.full:
                raise Unsupported("lora_config is missing: its train_attn, train_mlp and train_unembed say what trains")
            raise Unsupported(
                "lora_config is missing: full fine-tuning is not supported, only LoRA, without the setting backend.full"
            )
        trainable = _trainable(request.lora_config, full=base.full, train_vision=_trains_vision(request, base))
        run = _run(request, owner, base, trainable, request.optimizer_config)
        await self._create(run, None, with_optimizer=False)
        return CreateModelResponse(model_id=run.model_id)

    async def unload_model(self, request: UnloadModelRequest) -> UnloadModelResponse:
        """Free a model's memory."""
        await self._models.drop(request.model_id)
        return UnloadModelResponse(model_id=request.model_id)

    async def load_weights(self, request: LoadWeightsRequest, owner: str) -> LoadWeightsResponse:
        """Make a model of a checkpoint, or read one into a model."""
        checkpoint = await self._checkpoint(
            request.path, self._keys.readers_by_seal(owner, request.weights_access_token)
        )
        if request.base_model not in (None, checkpoint.base_model):
            raise Unsupported(f"{request.path} is of {checkpoint.base_model}, not of {request.base_model}")
        self._models.require_same(checkpoint.base_model, checkpoint.base_fingerprint, request.path)
        if request.model_id is not None:
            model_id = request.model_id
            async with self._models.training(model_id) as (run, trainer):
                if run.base_model != checkpoint.base_model:
                    raise Unsupported(f"{request.path} is of {checkpoint.base_model}, not of {run.base_model}")
                if run.trainable.full != checkpoint.trainable.full:
                    kinds = ("a LoRA adapter", "a model that trains all weights")
                    kind, own = kinds[checkpoint.trainable.full], kinds[run.trainable.full]
                    raise Unsupported(f"{request.path} is of {kind}, and {model_id} is {own}")
                directory = self._storage.path(checkpoint.directory)
                await trainer.load_state(model_id, directory, with_optimizer=request.optimizer)
        else:
            optimizer = request.optimizer_config or OptimizerConfig()
            base = self._models.base(checkpoint.base_model).info
            run = _run(request, owner, base, checkpoint.trainable, optimizer)
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
        async with (
            self._holdings.model(run.owner, run.model_id),
            self._models.alone(run.base_model, run.model_id) as trainer,
        ):
            if await self._runs.find(run.model_id) is not None:  # before the trainer would lose the one it has
                raise ModelIdTaken(
                    f"{run.model_id} is in use, for a model or for a copy of weights; take another model_seq_id"
                )
            await trainer.create_model(run.model_id, run.trainable, run.owner)
            try:
                if checkpoint is not None:
                    directory = self._storage.path(checkpoint.directory)
                    await trainer.load_state(run.model_id, directory, with_optimizer=with_optimizer)
                await self._runs.add(run)
            except BaseException:
                await trainer.delete_model(run.model_id)
                raise
            self._models.added(run)


def _trains_vision(request: CreateModelRequest, base: BaseModelInfo) -> bool:
    """Whether the model trains the vision tower: where the server does, unless its user_metadata says otherwise."""
    said = (request.user_metadata or {}).get("train_vision")
    if said not in (None, "true", "false"):
        raise Unsupported(f"user_metadata.train_vision is {said!r}: it must be 'true' or 'false'")
    if said == "true" and not base.trains_vision:
        raise Unsupported(
            f"user_metadata.train_vision is 'true', but this server trains no vision tower of {base.name}"
            " (setting backend.train_vision)"
        )
    return base.trains_vision and said != "false"


def _trainable(lora: LoraConfig, *, full: bool, train_vision: bool) -> Trainable:
    """With the seed filled in. What ranks there are is the trainer's to say."""
    if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
        raise Unsupported("lora_config trains nothing: set train_unembed, train_mlp or train_attn")
    if lora.seed is not None and not 0 <= lora.seed < 2**63:
        raise Unsupported(f"lora_config.seed {lora.seed} is not between 0 and 2^63 - 1")
    seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
    drawn = {"seed": seed, "full": full, "train_vision": train_vision}
    return Trainable.model_validate(lora.model_dump() | drawn)


def _run(
    request: CreateModelRequest | LoadWeightsRequest,
    owner: str,
    base: BaseModelInfo,
    trainable: Trainable,
    optimizer: OptimizerConfig,
) -> TrainingRun:
    if optimizer != OptimizerConfig():
        raise Unsupported(f"optimizer_config {optimizer.model_dump()} is not supported; only type 'adamw' is")
    assert request.session_id is not None and request.model_seq_id is not None, "the route has required them"
    return TrainingRun(
        model_id=ids.model_id(request.session_id, request.model_seq_id),
        owner=owner,
        session_id=request.session_id,
        model_seq_id=request.model_seq_id,
        base_model=base.name,
        base_fingerprint=base.fingerprint,
        trainable=trainable,
        user_metadata=request.user_metadata,
        optimizer_config=optimizer.model_dump(),
        computed_with=dict(base.numerics),
        status="active",
        created_at=time.time(),
    )
