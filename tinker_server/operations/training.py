"""Creates, trains, loads and unloads models; knows neither HTTP nor lanes.

Each function works for a model's actor, and raises InvalidInput, BackendFailed or a TinkerServerError; texts are for
the user.
Lasting refusals are raised here, not at the submit: a number that was accepted is never missing.
"""

import contextlib
import secrets
import time
from collections.abc import Mapping, Set
from typing import cast, get_args

from tinker_server.api_schemas import ids
from tinker_server.api_schemas.training import (
    AdamParams,
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardOutput,
    Layout,
    LoraConfig,
    OptimizerConfig,
    OptimStepRequest,
    OptimStepResponse,
    Trainable,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinker_server.api_schemas.weights import LoadWeightsRequest, LoadWeightsResponse
from tinker_server.backends.protocol import BaseModelInfo, EncodedBatch, InvalidInput
from tinker_server.errors import Unsupported
from tinker_server.models.model import Model
from tinker_server.store.checkpoints import parse_path
from tinker_server.store.futures.observers import Work
from tinker_server.store.records import Checkpoint, TrainingRun
from tinker_server.weights.lookup import WeightStores, loadable_directory


async def forward_backward(_stores: WeightStores, model: Model, work: Work[None]) -> ForwardBackwardOutput:
    """Compute log probabilities, and add the gradient of a forward_backward to the model's."""
    operation = work.operation
    assert operation.body is not None, "the body has been read"
    batch = EncodedBatch(operation.body, operation.content_type)  # the ranks decode it for themselves
    _, trainer, loaded = await model.ensure_loaded()
    output = await trainer.forward_backward(loaded, batch, backward=operation.operation_kind == "forward_backward")
    # Every position of every datum; images as many as they are expanded to.
    work.used["training"] = sum(len(outputs["logprobs"]) for outputs in output.loss_fn_outputs)
    return output


async def optim_step(_stores: WeightStores, model: Model, work: Work[OptimStepRequest]) -> OptimStepResponse:
    """Apply the gradient, then clear it. A gradient that is incomplete is only cleared."""
    request = work.request
    _, trainer, loaded = await model.ensure_loaded()
    if work.missing or request.optimizer_params is not None:
        await trainer.mark_incomplete(loaded)
    if request.optimizer_params is not None:
        # As with every step that its user is to blame for, the gradient is cleared.
        with contextlib.suppress(InvalidInput):
            await trainer.optim_step(loaded, AdamParams())
        raise Unsupported("optimizer_params is not supported: models here have adamw; send adam_params")
    return await trainer.optim_step(loaded, request.adam_params or AdamParams())


async def create_model(stores: WeightStores, model: Model, work: Work[CreateModelRequest]) -> CreateModelResponse:
    """Make a fresh model."""
    request = work.request
    base = stores.bases.base(request.base_model).info
    if request.lora_config is None:
        raise Unsupported("lora_config is missing: send one; models here are LoRA adapters")
    others = {"train_vision": _trains_vision(request, base), "layout": _layout(request, base)}
    trainable = _trainable(request.lora_config, others)
    _require_slots(trainable, base, "user_metadata.experts is 'own'", "leave it out, or make")
    run = _run(request, work.operation.owner, base, trainable, request.optimizer_config)
    work.base_model = run.base_model
    async with stores.holdings.model(run.owner, run.model_id):
        await model.create(run, None, with_optimizer=False)
    return CreateModelResponse(model_id=run.model_id)


async def unload_model(_stores: WeightStores, model: Model, _work: Work[UnloadModelRequest]) -> UnloadModelResponse:
    """Free the model's memory, and delete its snapshot."""
    await model.drop()
    return UnloadModelResponse(model_id=model.id)


async def load_weights(stores: WeightStores, model: Model, work: Work[LoadWeightsRequest]) -> LoadWeightsResponse:
    """Make a model of a checkpoint, or read it into a model."""
    request, owner = work.request, work.operation.owner
    readers = stores.keys.readers_by_seal(owner, request.weights_access_token)
    checkpoint = await _checkpoint(stores, request.path, readers)
    if request.base_model not in (None, checkpoint.base_model):
        raise Unsupported(f"{request.path} is of {checkpoint.base_model}, not of {request.base_model}")
    stores.bases.require_same(checkpoint.base_model, checkpoint.base_fingerprint, request.path)
    base = stores.bases.base(checkpoint.base_model).info
    _require_slots(checkpoint.trainable, base, f"{request.path} has the LoRA layout own", "load weights with")
    directory = stores.storage.path(loadable_directory(checkpoint, stores.storage))
    work.loaded_directory = checkpoint.directory
    if request.model_id is not None:
        run, trainer, loaded = await model.ensure_loaded()
        if run.base_model != checkpoint.base_model:
            raise Unsupported(f"{request.path} is of {checkpoint.base_model}, not of {run.base_model}")
        await trainer.load_state(loaded, directory, with_optimizer=request.optimizer)
    else:
        optimizer = request.optimizer_config or OptimizerConfig()
        run = _run(request, owner, base, checkpoint.trainable, optimizer)
        work.base_model = run.base_model
        async with stores.holdings.model(run.owner, run.model_id):
            await model.create(run, directory, with_optimizer=request.optimizer)
    return LoadWeightsResponse(path=request.path, model_id=model.id)


async def _checkpoint(stores: WeightStores, path: str, readers: Set[str]) -> Checkpoint:
    parsed = parse_path(path)
    if parsed.kind == "sampler_weights":
        raise Unsupported(f"{path} cannot be trained on; take a tinker://<run>/weights/<name> (save_state)")
    return await stores.checkpoints.require_readable(parsed, readers, time.time())


def _trains_vision(request: CreateModelRequest, base: BaseModelInfo) -> bool:
    """Return whether the model trains the vision tower: where the server does, unless its user_metadata declines."""
    said = (request.user_metadata or {}).get("train_vision")
    if said not in (None, "true", "false"):
        raise Unsupported(f"user_metadata.train_vision is {said!r}: it must be 'true' or 'false'")
    if said == "true" and not base.trains_vision:
        raise Unsupported(
            f"user_metadata.train_vision is 'true', but this server trains no vision tower of {base.name}"
            " (setting backend.train_vision)"
        )
    return base.trains_vision and said != "false"


def _layout(request: CreateModelRequest, base: BaseModelInfo) -> Layout:
    """Return the layout of a new model: the server's, unless its user_metadata names one."""
    said = (request.user_metadata or {}).get("experts", base.lora_layout)
    for layout in get_args(Layout):
        if said == layout:
            return cast(Layout, layout)
    raise Unsupported(f"user_metadata.experts is {said!r}: it must be {' or '.join(map(repr, get_args(Layout)))}")


def _require_slots(trainable: Trainable, base: BaseModelInfo, what: str, instead: str) -> None:
    """Raise Unsupported for a model that no engine of this server could sample from. `what` of a request has the
    layout `own`, and `instead` is what to do but for changes of what trains."""
    if trainable.layout != "own":
        return
    both = "setting backend.lora_layout service; own takes both"
    if trainable.train_mlp and base.expert_slots == "service":
        raise Unsupported(
            f"{what}, but this server's engines have slots for {base.name} in which the experts of a layer share"
            f" factors ({both}); {instead} train_mlp false"
        )
    if trainable.train_attn and base.latent_cache:
        raise Unsupported(
            f"{what}, but this server's engines keep latents of {base.name}, and its attention would have adapters of"
            f" linears out of latents ({both}); {instead} train_attn false"
        )


def _trainable(lora: LoraConfig, others: Mapping[str, object]) -> Trainable:
    """Return what trains, with its seed, and `others` of its fields. The trainer says which ranks it has."""
    if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
        raise Unsupported("lora_config trains nothing: set train_unembed, train_mlp or train_attn")
    if lora.seed is not None and not 0 <= lora.seed < 2**63:
        raise Unsupported(f"lora_config.seed {lora.seed} is not between 0 and 2^63 - 1")
    seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
    return Trainable.model_validate(lora.model_dump() | {"seed": seed, **others})


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
