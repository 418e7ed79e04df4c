"""Types for sampling (docs/protocol.md, Sampling)."""

from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from tinker_server.api_schemas.base import FirstError, Request, Response, require_storable
from tinker_server.api_schemas.fields import BaseModelName, Integer, Real, SamplingSessionId, SessionId
from tinker_server.api_schemas.inputs import ModelInput, TensorData

T = TypeVar("T")
MAX_STOP_CHARACTERS = 1 << 16
"""Largest total length of a request's stop strings, which are all searched for after every token."""
Stops = Annotated[list[T], FirstError(), Field(max_length=1024)]
StopValue = str | Stops[str] | Stops[Integer] | None


class SamplingParams(Request):
    """Parameters of sampling."""

    max_tokens: Integer | None = Field(default=None, ge=1)
    """Largest number of tokens; absent: up to the context limit."""
    seed: Integer | None = Field(default=None, ge=-(2**63), lt=2**64)
    """Any 64 bits, signed or not. The same seed and request give the same tokens."""
    stop: StopValue = None
    """Stop strings or token ids, in addition to the model's end tokens. An empty list disables the end tokens too."""
    temperature: Real = Field(default=1.0, ge=0)
    """Temperature; 0 is greedy."""
    top_k: Integer = Field(default=-1, ge=-1)
    """Number of the likeliest tokens to sample from; -1 (or 0) is off."""
    top_p: Real = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1 is off."""

    @field_validator("stop")
    @classmethod
    def _is_short(cls, value: StopValue) -> StopValue:
        texts = [value] if isinstance(value, str) else [item for item in value or () if isinstance(item, str)]
        if (length := sum(map(len, texts))) > MAX_STOP_CHARACTERS:
            text = "has {length} characters; {most} are allowed"
            raise PydanticCustomError("too_long", text, {"length": length, "most": MAX_STOP_CHARACTERS})
        return value

    @field_validator("*")
    @classmethod
    def _can_be_stored(cls, value: object, field: ValidationInfo) -> object:
        return value if field.field_name == "seed" else require_storable(value)  # a seed is not stored as a number


class SampleRequest(Request):
    """Sample `num_samples` continuations of a prompt from a sampling session, a base model or saved weights."""

    type: Literal["sample"] = "sample"
    sampling_session_id: str | None = None
    """The sampling session: `{session_id}:sample:{sampling_session_seq_id}`."""
    seq_id: Integer | None = None
    """Identifies the request within its sampling session, without ordering it. Up to about 10^18."""
    base_model: str | None = None
    """Without a sampling session: the base model to sample from."""
    model_path: str | None = None
    """Without a sampling session: the tinker:// path to sample from. Such a request has no identity, so a repeat
    runs again."""
    prompt: ModelInput
    """The prompt to continue."""
    sampling_params: SamplingParams
    """Length, temperature, seed and ends of each continuation."""
    num_samples: Integer = Field(default=1, ge=1, le=100_000)
    """Number of continuations."""
    prompt_logprobs: bool = False
    """Whether to score the prompt's tokens too."""
    topk_prompt_logprobs: Integer = Field(default=0, ge=0)
    """Number of likeliest tokens to score at each prompt position."""
    topk_sample_logprobs: Integer = Field(default=0, ge=0)
    """Number of likeliest tokens to score at each sampled position."""
    prompt_alt_tokens_k: Integer = Field(default=0, ge=0)
    """Number of tokens to sample at each prompt position."""
    prompt_logprobs_last_n: Integer | None = None
    """Number of positions at the prompt's end to score; absent: all."""
    target_prompt_logprobs: TensorData | None = None
    """Token ids to score, int64 [prompt length - 1, K]: row i is for position i + 1; -1 or omitted: none."""
    record_stability_info: bool = False
    """Not supported; true is refused."""


class TopkLogprobs(Response):
    """The k likeliest tokens per position; empty cells hold token 0 and -99999."""

    token_ids: np.ndarray
    """[T, K] int32"""
    logprobs: np.ndarray
    """[T, K] float32, nats"""


class SampledSequence(Response):
    """A continuation. `tokens` includes the stop token, or the tokens of the stop string."""

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    """[T] int32"""
    logprobs: np.ndarray
    """[T] float32, nats: in the temperature-scaled distribution, renormalised over what top_k and top_p keep. Image
    placeholders, which are never sampled, count as part of the distribution unless top_k or top_p cut it."""
    topk_logprobs: TopkLogprobs | None = None


class PromptTensor(Response):
    """A float32 tensor [prompt length - 1, K], dense or CSR."""

    values: np.ndarray
    """Dense: of shape `shape`; CSR: [number of cells]"""
    shape: list[int]
    crow_indices: np.ndarray | None = None
    col_indices: np.ndarray | None = None


class PromptAltTokens(Response):
    """Independent samples of alternative prompt tokens, at the request's temperature; row i is for position i + 1."""

    tokens: np.ndarray
    """[prompt length - 1, K] int32"""
    logprobs: np.ndarray
    """[prompt length - 1, K] float32, nats, at temperature 1 as all prompt log probabilities are"""


class SampleResponse(Response):
    """Result of asample, sent as protobuf, or as JSON to clients that accept no protobuf."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    """[prompt length] float32, nats, at temperature 1: NaN at position 0, 0.0 at image positions"""
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: PromptTensor | None = None
    """Scores in the request's layout; 0.0 where the request has -1."""
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0


class CreateSamplingSessionRequest(Request):
    """Create a sampling session on a base model or on saved weights."""

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
    """Ask for a range of sample numbers for a copy of a sampling client."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    sampling_session_id: SamplingSessionId


class JoinSamplingSessionResponse(Response):
    """The range of sample numbers of one more client."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int
    """The client numbers its samples from 10^9 times this value. The first client has 0."""


class GetSamplerResponse(Response):
    """Base model and weights of a sampling session."""

    sampler_id: SamplingSessionId
    base_model: BaseModelName
    model_path: str | None
    """tinker:// path of saved weights; null: the base model alone."""
