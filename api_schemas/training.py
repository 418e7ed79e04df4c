"""Types for creating and training models (docs/protocol.md, Training)."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tinker_server.api_schemas.base import NOTED, FirstError, Request, Response, at_most
from tinker_server.api_schemas.fields import BaseModelName, Integer, ModelId, ModelSeqId, Real, SeqId, SessionId
from tinker_server.api_schemas.inputs import Datum, require_few_cells, sparse_cells

MAX_DATUMS = 4096
"""Largest number of datums of a request; the SDK sends 1024 at most."""
MAX_CONFIG = 16
"""Largest number of entries of loss_fn_config."""

SMALLEST_EPS = 1e-30
Layout = Literal["own", "service"]
"""Which adapters a model has."""


class LoraConfig(Request):
    """The adapter of a model. Alpha is 32 for every model, so its output is scaled by 32 / rank."""

    rank: Integer
    """Rank of the adapter."""
    seed: Integer | None = None
    """Seed of the initial weights; absent: chosen by the server at random."""
    train_unembed: bool = True
    """Whether the adapter covers the unembedding."""
    train_mlp: bool = True
    """Whether the adapter covers the MLPs."""
    train_attn: bool = True
    """Whether the adapter covers attention."""


class Trainable(BaseModel):
    """Trained parts of a model, as stored and as given to the trainer: a LoraConfig with a definite seed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int
    """Rank of the adapter."""
    seed: int
    """Seed of the initial weights, from 0 to 2^63 - 1."""
    train_unembed: bool = True
    """Whether the adapter covers the unembedding."""
    train_mlp: bool = True
    """Whether the adapter covers the MLPs."""
    train_attn: bool = True
    """Whether the adapter covers attention."""
    train_vision: bool = False
    """Whether the adapter covers the vision tower and its mergers."""
    full: bool = False
    """Whether all weights were trained instead of an adapter, by an older server; it cannot be loaded."""
    layout: Layout = "own"
    """`service`: the hosted service's adapters, in which the experts of a layer share the factors on the hidden side,
    and which are of some rows of a linear, or leave it out, as `families/lora_names.py` says. `own`: every
    linear and every expert has an adapter of its own, as in all runs that were stored without this field."""

    @property
    def lora_rank(self) -> int | None:
        """Return the adapter's rank, or None if all weights were trained."""
        return None if self.full else self.rank


class OptimizerConfig(Request):
    """Optimizer of a model. Only adamw is supported; no other one is publicly specified."""

    model_config = {"extra": "allow"}
    type: str = "adamw"
    """Name of the optimizer."""


class CreateModelRequest(Request):
    """Create a LoRA model on a base model. Its id is `{session_id}:train:{model_seq_id}`."""

    type: Literal["create_model"] = "create_model"
    session_id: SessionId
    model_seq_id: ModelSeqId = Field(ge=0)
    base_model: BaseModelName
    user_metadata: Annotated[dict[str, object] | None, NOTED] = None
    """Free-form metadata, which is listed. Two entries have an effect. `train_vision`, 'true' or 'false', says whether
    the adapter covers the vision tower, on a server that trains it. `experts`, 'own' or 'service', says whether the
    experts of a mixture have adapters of their own, or share factors as at the hosted service, and whether linear
    attention, Mamba2 and latent attention have adapters of every linear, or its target modules."""
    lora_config: LoraConfig | None = None
    """The adapter."""
    optimizer_config: OptimizerConfig = OptimizerConfig()
    """The optimizer. Models here have adamw."""


class CreateModelResponse(Response):
    """Result of create_model."""

    type: Literal["create_model"] = "create_model"
    model_id: ModelId


class UnloadModelRequest(Request):
    """Unload a model once all earlier work is done. The SDK has had no method for it since 0.2."""

    type: Literal["unload_model"] = "unload_model"
    model_id: ModelId


class UnloadModelResponse(Response):
    """Result of unload_model."""

    type: Literal["unload_model"] = "unload_model"
    model_id: ModelId


class GetInfoRequest(Request):
    """Ask for a model's base model, LoRA rank and optimizer."""

    type: Literal["get_info"] = "get_info"
    model_id: ModelId


class ModelData(Response):
    """The base model of a model."""

    arch: str
    """Architecture of the base model, as its config names it."""
    model_name: BaseModelName
    tokenizer_id: str
    """Hub id or directory that a client loads the tokenizer from."""


class GetInfoResponse(Response):
    """Base model, LoRA rank and optimizer of a model."""

    type: Literal["get_info"] = "get_info"
    model_id: ModelId
    is_lora: bool = True
    """Whether the model is a LoRA adapter; false for a whole model that an older server trained."""
    lora_rank: int | None
    """Rank of the adapter; null for a whole model."""
    model_name: BaseModelName
    model_data: ModelData
    """The base model."""
    optimizer_config: OptimizerConfig
    """The optimizer. Models here have adamw."""


def _sparse_shapes(data: object) -> Iterator[object]:
    """Yield the shapes of the sparse tensors in an input that is not validated yet."""
    datums = data.get("data") if isinstance(data, dict) else None
    for datum in datums if isinstance(datums, list) else []:
        inputs = datum.get("loss_fn_inputs") if isinstance(datum, dict) else None
        for tensor in inputs.values() if isinstance(inputs, dict) else []:
            if isinstance(tensor, dict) and tensor.get("sparse_crow_indices") is not None:
                yield tensor.get("shape")


class ForwardBackwardInput(Request):
    """Datums and a loss. The loss is a plain sum over positions and datums."""

    data: Annotated[list[Datum], FirstError(), Field(max_length=MAX_DATUMS)]
    """The training examples."""
    loss_fn: str
    """Name of the loss."""
    loss_fn_config: Annotated[dict[str, Real | str], at_most(MAX_CONFIG)] | None = None
    """Parameters of the loss by name; absent: its defaults."""

    @model_validator(mode="before")
    @classmethod
    def _few_cells(cls, data: object) -> object:
        require_few_cells(sum(map(sparse_cells, _sparse_shapes(data))))
        return data


class ForwardBackwardRequest(Request):
    """Compute a loss and its gradient. It is sent as protobuf, by clients before 0.25 as JSON."""

    type: Literal["forward_backward"] = "forward_backward"
    model_id: ModelId
    seq_id: SeqId
    forward_only: bool = False
    """Whether to compute only log probabilities, without a gradient."""
    forward_backward_input: ForwardBackwardInput
    """Datums and loss."""


LOGPROBS, ELEMENTWISE_LOSS = "logprobs", "elementwise_loss"
OUTPUT_BYTES = 4
"""Bytes of a float32 value."""
MORE_OUTPUTS: Mapping[str, tuple[str, ...]] = {"cross_entropy": (ELEMENTWISE_LOSS,)}
"""By loss, the tensors that a result has of each datum besides its log probabilities."""


class ForwardBackwardOutput(Response):
    """Result of forward_backward, sent as protobuf, or as JSON to clients that accept no protobuf."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, np.ndarray]]
    """Per datum, in the order sent, `logprobs` and what `MORE_OUTPUTS` names: float32, in its target_tokens' shape."""
    metrics: dict[str, float]
    """Keys are `name:reduction` with exactly one colon."""


def _not_zero_in_float32(eps: float) -> float:
    if not eps >= SMALLEST_EPS:
        raise PydanticCustomError(
            "eps", "must be 1e-30 or more: if a gradient was always 0, a step divides by eps alone"
        )
    return eps


class AdamParams(Request):
    """Parameters of torch.optim.AdamW, sent with every optim_step: the server has no schedule."""

    learning_rate: Real = Field(default=1e-4, ge=0)
    """Size of the step."""
    beta1: Real = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: Real = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of the squared gradient."""
    eps: Annotated[Real, AfterValidator(_not_zero_in_float32)] = Field(
        default=1e-12, json_schema_extra={"minimum": SMALLEST_EPS}
    )
    """Added to the denominator."""
    weight_decay: Real = Field(default=0.0, ge=0)
    """Decoupled weight decay: a step subtracts learning_rate x weight_decay x weight."""
    grad_clip_norm: Real = Field(default=0.0, ge=0)
    """Largest global L2 norm of the gradient; 0 disables clipping."""


class OptimStepRequest(Request):
    """Apply the gradient summed since the last step, then clear it."""

    type: Literal["optim_step"] = "optim_step"
    model_id: ModelId
    seq_id: SeqId
    adam_params: AdamParams | None = None
    """Parameters of this step; absent: their defaults."""
    optimizer_params: dict[str, object] | None = None
    """Parameters of another optimizer; refused, since models here have adamw."""


class OptimStepResponse(Response):
    """Result of optim_step."""

    type: Literal["optim_step"] = "optim_step"
    metrics: dict[str, float]
    """`grad_norm`: L2 norm of the gradient before clipping. All finite."""
