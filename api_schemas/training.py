"""Creating, training and stepping a model (protocol sections 4.1 to 4.3, 8 and 9)."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from api_schemas.base import Request, Response
from api_schemas.inputs import Datum


class LoraConfig(Request):
    """The adapter of one model. Alpha is 32 for every model, so its output is scaled by 32 / rank."""

    rank: int
    seed: int | None = None
    """Seed of the initial weights; absent: drawn by the server."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Request):
    """Which optimizer a model has. Only adamw is public enough to build."""

    model_config = {"extra": "allow"}
    type: str = "adamw"


class CreateModelRequest(Request):
    """Create a LoRA model on a base model. Its id is `{session_id}:train:{model_seq_id}`."""

    type: Literal["create_model"] = "create_model"
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CreateModelResponse(Response):
    type: Literal["create_model"] = "create_model"
    model_id: str


class UnloadModelRequest(Request):
    """Let a model go. The SDK has no method for it since 0.2; its answer comes once all earlier work is done."""

    type: Literal["unload_model"] = "unload_model"
    model_id: str


class UnloadModelResponse(Response):
    type: Literal["unload_model"] = "unload_model"
    model_id: str


class GetInfoRequest(Request):
    type: Literal["get_info"] = "get_info"
    model_id: str


class ModelData(Response):
    arch: str
    model_name: str
    tokenizer_id: str
    """What a client loads its tokenizer from: a hub id or a directory."""


class GetInfoResponse(Response):
    type: Literal["get_info"] = "get_info"
    model_id: str
    is_lora: bool = True
    lora_rank: int
    model_name: str
    model_data: ModelData
    optimizer_config: OptimizerConfig


class ForwardBackwardInput(Request):
    """Datums and a loss. The loss is a plain sum over positions and datums."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackwardRequest(Request):
    """Comes as protobuf, from clients before 0.25 as JSON.

    `forward_only` computes log probabilities and leaves the gradient alone.
    """

    type: Literal["forward_backward"] = "forward_backward"
    model_id: str
    seq_id: int
    forward_only: bool = False
    forward_backward_input: ForwardBackwardInput


class ForwardRequest(Request):
    """How clients before 0.25 ask for `forward_only`."""

    type: Literal["forward"] = "forward"
    model_id: str
    seq_id: int
    forward_input: ForwardBackwardInput

    def as_forward_backward(self) -> ForwardBackwardRequest:
        """The same request as later clients send it."""
        return ForwardBackwardRequest(
            model_id=self.model_id,
            seq_id=self.seq_id,
            forward_only=True,
            forward_backward_input=self.forward_input,
        )


class ForwardBackwardOutput(Response):
    """Answered as protobuf, or as JSON to clients that take no protobuf."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, np.ndarray]]
    """Per datum, in the order sent: `logprobs` float32 of the shape of its target_tokens."""
    metrics: dict[str, float]
    """Keys are `name:reduction` with exactly one colon."""


class AdamParams(Request):
    """Sent with every optim_step: the server keeps no schedule. Meanings as in torch.optim.AdamW."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """Largest global L2 norm of the gradient; 0 leaves it alone."""


class OptimStepRequest(Request):
    """Apply the gradient summed since the last step, then clear it."""

    type: Literal["optim_step"] = "optim_step"
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    """Parameters of another optimizer family; refused by name, since models here have adamw."""


class OptimStepResponse(Response):
    type: Literal["optim_step"] = "optim_step"
    metrics: dict[str, float]
    """`grad_norm`: L2 norm of the gradient before clipping. All finite."""
