"""Sampling (docs/protocol.md, Sampling)."""

from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from api_schemas.base import FirstError, Request, Response, require_storable
from api_schemas.fields import BaseModelName, Integer, Real, SamplingSessionId, SessionId
from api_schemas.inputs import ModelInput, TensorData

T = TypeVar("T")
MAX_STOP_CHARACTERS = 1 << 16
"""Of one request's stop strings together: each is looked for after every token."""
Stops = Annotated[list[T], FirstError(), Field(max_length=1024)]


class SamplingParams(Request):
    """How to draw tokens."""

    max_tokens: Integer | None = Field(default=None, ge=1)
    """Absent: up to the context limit."""
    seed: Integer | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Any 64 bits, signed or not. The same seed and request give the same tokens."""
    stop: str | Stops[str] | Stops[Integer] | None = None
    """Absent: the model's end tokens. A list is exactly what stops: an empty one stops at nothing."""
    temperature: Real = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_k: Integer = Field(default=-1, ge=-1)
    """-1 (or 0) is off."""
    top_p: Real = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that together have this probability; 1 is off."""

    @field_validator("stop")
    @classmethod
    def _is_short(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else [one for one in value or () if isinstance(one, str)]
        if (length := sum(map(len, texts))) > MAX_STOP_CHARACTERS:
            text = "has {length} characters; {most} are allowed"
            raise PydanticCustomError("too_long", text, {"length": length, "most": MAX_STOP_CHARACTERS})
        return value

    @field_validator("*")
    @classmethod
    def _can_be_stored(cls, value: Any, field: ValidationInfo) -> Any:
        return value if field.field_name == "seed" else require_storable(value)  # a seed is no number of the database's


class SampleRequest(Request):
    """Draw `num_samples` continuations of a prompt, from a sampling session's weights."""

    type: Literal["sample"] = "sample"
    sampling_session_id: str | None = None
    """What to sample from: `{session_id}:sample:{sampling_session_seq_id}`."""
    seq_id: Integer | None = None
    """With the session, the request's identity (not its order). Up to about 10^18."""
    base_model: str | None = None
    """Without a sampling session: the base model to sample from."""
    model_path: str | None = None
    """Without a sampling session: the tinker:// path to sample from. Such a request has no identity, so a repeat
    runs again."""
    prompt: ModelInput
    """What the continuations continue."""
    sampling_params: SamplingParams
    """How to draw."""
    num_samples: Integer = Field(default=1, ge=1, le=100_000)
    """How many continuations to draw."""
    prompt_logprobs: bool = False
    """Also score the prompt."""
    topk_prompt_logprobs: Integer = Field(default=0, ge=0)
    """Likeliest tokens to score at each prompt position."""
    topk_sample_logprobs: Integer = Field(default=0, ge=0)
    """Likeliest tokens to score at each drawn position."""
    prompt_alt_tokens_k: Integer = Field(default=0, ge=0)
    """Tokens to draw at each prompt position."""
    prompt_logprobs_last_n: Integer | None = None
    """Score so many positions at the prompt's end; absent: all."""
    target_prompt_logprobs: TensorData | None = None
    """Token ids to score, int64 [prompt length - 1, K]: row i those for position i + 1; -1, or left out: none."""
    record_stability_info: bool = False
    """Not supported; refused by name."""


class TopkLogprobs(Response):
    """Per position the k likeliest tokens; cells with none hold token 0 and -99999."""

    token_ids: np.ndarray
    """[T, K] int32"""
    logprobs: np.ndarray
    """[T, K] float32, nats"""


class SampledSequence(Response):
    """One continuation. `tokens` ends with the stop token, or the tokens of the stop string."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    """[T] int32"""
    logprobs: np.ndarray
    """[T] float32, nats: of the temperature-scaled distribution, renormalised over what top_k and top_p keep. The image
    placeholders, which are never drawn, count as part of the distribution unless top_k or top_p cut it."""
    topk_logprobs: TopkLogprobs | None = None


class PromptTensor(Response):
    """A float32 [prompt length - 1, K] in one of two layouts: dense, or compressed sparse rows."""

    values: np.ndarray
    """Dense in its shape; sparse [number of cells]"""
    shape: list[int]
    crow_indices: np.ndarray | None = None
    col_indices: np.ndarray | None = None


class PromptAltTokens(Response):
    """Row i: independent draws, at the request's temperature, of what could stand at prompt position i + 1."""

    tokens: np.ndarray
    """[prompt length - 1, K] int32"""
    logprobs: np.ndarray
    """[prompt length - 1, K] float32, nats, at temperature 1 as all prompt log probabilities are"""


class SampleResponse(Response):
    """Answered as protobuf, or as JSON to clients that take no protobuf."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    """[prompt length] float32, nats, at temperature 1: NaN at position 0, 0.0 at image positions"""
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: PromptTensor | None = None
    """In the layout of the request, 0.0 where it holds -1."""
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0


class CreateSamplingSessionRequest(Request):
    """Sample from a base model, or from saved weights."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    session_id: SessionId
    sampling_session_seq_id: Integer = Field(ge=0)
    """The client's number of the sampling session in its session."""
    base_model: str | None = None
    """Public name of the base model; with `model_path`, that of the weights."""
    model_path: str | None = None
    """tinker:// path of saved weights; absent: the base model alone."""


class CreateSamplingSessionResponse(Response):
    """The sampling session."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: SamplingSessionId


class JoinSamplingSessionRequest(Request):
    """A copy of a sampling client asks for the numbers that none of the others uses."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    sampling_session_id: SamplingSessionId


class JoinSamplingSessionResponse(Response):
    """The numbers of one more client."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int
    """The client numbers its samples from 10^9 times this. The first client's is 0."""


class GetSamplerResponse(Response):
    """What a sampling session samples from."""

    sampler_id: SamplingSessionId
    base_model: BaseModelName
    model_path: str | None
    """tinker:// path of saved weights; null: the base model alone."""
