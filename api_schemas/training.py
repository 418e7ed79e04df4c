"""Creating, training and stepping a model (docs/protocol.md, Training)."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.base import NOTED, FirstError, Request, Response, at_most
from api_schemas.fields import BaseModelName, Integer, ModelId, ModelSeqId, Real, SeqId, SessionId
from api_schemas.inputs import Datum, require_few_cells, sparse_cells

MAX_DATUMS = 4096
"""Of one request; the SDK sends 1024 at most."""
MAX_CONFIG = 16
"""Entries of loss_fn_config."""

SMALLEST_EPS = 1e-30


class LoraConfig(Request):
    """The adapter of one model. Alpha is 32 for every model, so its output is scaled by 32 / rank."""

    rank: Integer
    """Rank of the adapter."""
    seed: Integer | None = None
    """Seed of the initial weights; absent: drawn by the server."""
    train_unembed: bool = True
    """Whether the adapter covers the unembedding."""
    train_mlp: bool = True
    """Whether the adapter covers the MLPs."""
    train_attn: bool = True
    """Whether the adapter covers attention."""


class Trainable(BaseModel):
    """What a model trains, as it is stored and as a trainer makes it: a LoraConfig whose seed is drawn."""

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
    """Whether it is no adapter, but all weights: `rank` and `seed` are then as they were sent, and mean nothing."""

    @property
    def lora_rank(self) -> int | None:
        """None of what is no adapter."""
        return None if self.full else self.rank


class OptimizerConfig(Request):
    """Which optimizer a model has. Only adamw is public enough to build."""

    model_config = {"extra": "allow"}
    type: str = "adamw"
    """Its name."""


class CreateModelRequest(Request):
    """Create a LoRA model on a base model. Its id is `{session_id}:train:{model_seq_id}`."""

    type: Literal["create_model"] = "create_model"
    session_id: SessionId
    model_seq_id: ModelSeqId = Field(ge=0)
    base_model: BaseModelName
    user_metadata: Annotated[dict[str, Any] | None, NOTED] = None
    """Whatever the client wants to note. It is listed; only `train_vision`, 'true' or 'false', means something here:
    whether the adapter covers the vision tower, on a server that trains it."""
    lora_config: LoraConfig | None = None
    """The adapter, or where the server trains all weights which of them; of its rank nothing is then used."""
    optimizer_config: OptimizerConfig = OptimizerConfig()
    """The optimizer. Models here have adamw."""


class CreateModelResponse(Response):
    """Result of create_model."""

    type: Literal["create_model"] = "create_model"
    model_id: ModelId


class UnloadModelRequest(Request):
    """Let a model go. The SDK has no method for it since 0.2; its answer comes once all earlier work is done."""

    type: Literal["unload_model"] = "unload_model"
    model_id: ModelId


class UnloadModelResponse(Response):
    """Result of unload_model."""

    type: Literal["unload_model"] = "unload_model"
    model_id: ModelId


class GetInfoRequest(Request):
    """Ask what a model is."""

    type: Literal["get_info"] = "get_info"
    model_id: ModelId


class ModelData(Response):
    """The base model of a model."""

    arch: str
    """Architecture of the base model, as its config names it."""
    model_name: BaseModelName
    tokenizer_id: str
    """What a client loads its tokenizer from: a hub id or a directory."""


class GetInfoResponse(Response):
    """What a client needs to know of its model."""

    type: Literal["get_info"] = "get_info"
    model_id: ModelId
    is_lora: bool = True
    """Whether the model is a LoRA adapter, and no whole model in training."""
    lora_rank: int | None
    """Rank of the adapter; absent where it is none."""
    model_name: BaseModelName
    model_data: ModelData
    """The base model."""
    optimizer_config: OptimizerConfig
    """The optimizer. Models here have adamw."""


def _sparse_shapes(data: Any) -> Iterator[Any]:
    """The shapes of the sparse tensors in an input that is not checked yet."""
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
    """Numbers of the loss, by name; absent: its defaults."""

    @model_validator(mode="before")
    @classmethod
    def _few_cells(cls, data: Any) -> Any:
        require_few_cells(sum(map(sparse_cells, _sparse_shapes(data))))
        return data


class ForwardBackwardRequest(Request):
    """Compute a loss and its gradient. Comes as protobuf, from clients before 0.25 as JSON."""

    type: Literal["forward_backward"] = "forward_backward"
    model_id: ModelId
    seq_id: SeqId
    forward_only: bool = False
    """Compute log probabilities, and leave the gradient alone."""
    forward_backward_input: ForwardBackwardInput
    """Datums and loss."""


class ForwardBackwardOutput(Response):
    """Answered as protobuf, or as JSON to clients that take no protobuf."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, np.ndarray]]
    """Per datum, in the order sent: `logprobs` float32 of the shape of its target_tokens."""
    metrics: dict[str, float]
    """Keys are `name:reduction` with exactly one colon."""


def _not_zero_in_float32(eps: float) -> float:
    if not eps >= SMALLEST_EPS:
        raise PydanticCustomError(
            "eps", "must be 1e-30 or more: where a gradient was always 0, a step divides by eps alone"
        )
    return eps


class AdamParams(Request):
    """Sent with every optim_step: the server keeps no schedule. Meanings as in torch.optim.AdamW."""

    learning_rate: Real = Field(default=1e-4, ge=0)
    """Size of the step."""
    beta1: Real = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: Real = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of its square."""
    eps: Annotated[Real, AfterValidator(_not_zero_in_float32)] = Field(
        default=1e-12, json_schema_extra={"minimum": SMALLEST_EPS}
    )
    """Added to the denominator."""
    weight_decay: Real = Field(default=0.0, ge=0)
    """Part of the weights that a step takes away, times learning_rate."""
    grad_clip_norm: Real = Field(default=0.0, ge=0)
    """Largest global L2 norm of the gradient; 0 leaves it alone."""


class OptimStepRequest(Request):
    """Apply the gradient summed since the last step, then clear it."""

    type: Literal["optim_step"] = "optim_step"
    model_id: ModelId
    seq_id: SeqId
    adam_params: AdamParams | None = None
    """Parameters of this step; absent: their defaults."""
    optimizer_params: dict[str, Any] | None = None
    """Parameters of another optimizer family; refused by name, since models here have adamw."""


class OptimStepResponse(Response):
    """Result of optim_step."""

    type: Literal["optim_step"] = "optim_step"
    metrics: dict[str, float]
    """`grad_norm`: L2 norm of the gradient before clipping. All finite."""
