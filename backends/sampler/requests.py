"""Our requests in the engine's terms, and its outputs in ours. Knows no engine.

T tokens, P prompt positions after the first, K likeliest or chosen tokens, C all of a position's columns
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from api_schemas.inputs import TensorData
from api_schemas.sampling import (
    PromptAltTokens,
    PromptTensor,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TopkLogprobs,
)
from backends.families.family import EngineField
from backends.protocol import BackendFailed
from backends.rendering import Rendered
from backends.sampler.prompt_columns import extra_args

_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""Cells of a top-k table that hold nothing."""


def engine_input(rendered: Rendered, fields: Mapping[str, EngineField]) -> EngineInput:
    """A prompt whose images are expanded and normalised already; the engine must do neither again."""
    token_ids = rendered.token_ids_T.tolist()
    images = rendered.images
    if not images:
        return tokens_input(token_ids)
    tensors = {name: torch.cat([image.tensors[name] for image in images]) for name in fields}
    layout = {}
    for name, field in fields.items():
        if field.one_row_each:
            layout[name] = MultiModalFieldConfig.batched("image", keep_on_cpu=field.stays_on_cpu)
        else:
            sizes = torch.tensor([len(image.tensors[name]) for image in images])
            layout[name] = MultiModalFieldConfig.flat_from_sizes("image", sizes, keep_on_cpu=field.stays_on_cpu)
    return mm_input(
        token_ids,
        MultiModalKwargsItems.from_hf_inputs(tensors, layout),
        {"image": [image.hash for image in images]},
        {"image": [PlaceholderRange(offset=span.offset, length=span.num_tokens) for span in rendered.spans]},
    )


def sampling_params(request: SampleRequest, index: int, end_tokens: Sequence[int]) -> SamplingParams:
    """The engine's parameters for sample `index`; the first one also scores the prompt."""
    params = request.sampling_params
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    stop_tokens = list(end_tokens) if stop is None else [one for one in stop if isinstance(one, int)]
    stop_strings = [one for one in stop or [] if isinstance(one, str)]
    num_columns = _num_prompt_columns(request)
    scores_prompt = index == 0 and (request.prompt_logprobs or num_columns > 0)
    return SamplingParams(
        max_tokens=params.max_tokens,
        seed=None if params.seed is None else derived_seed(params.seed, index),
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        # The engine adds its own idea of end tokens unless told to ignore them.
        ignore_eos=True,
        stop_token_ids=stop_tokens,
        stop=stop_strings,
        detokenize=bool(stop_strings),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        logprobs=request.topk_sample_logprobs,
        prompt_logprobs=num_columns if scores_prompt else None,
        extra_args=_prompt_columns(request) if scores_prompt else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _num_prompt_columns(request: SampleRequest) -> int:
    targets = request.target_prompt_logprobs
    num_targets = 0 if targets is None or targets.shape is None else targets.shape[1]
    return request.topk_prompt_logprobs + num_targets + request.prompt_alt_tokens_k


def _prompt_columns(request: SampleRequest) -> dict[str, Any] | None:
    """Tells the worker what to put in the last columns of the prompt's log probabilities."""
    targets, params = request.target_prompt_logprobs, request.sampling_params
    if targets is None and not request.prompt_alt_tokens_k:
        return None
    targets_PK = np.empty((0, 0), np.int64) if targets is None else targets.to_array(fill=-1)
    seed = secrets.randbits(62) if params.seed is None else derived_seed(params.seed, -1)
    return extra_args(targets_PK, request.prompt_alt_tokens_k, params.temperature, seed)


def derived_seed(seed: int, index: int) -> int:
    """A seed per sample of a request, in the 62 bits that every generator takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big") >> 2


def response(request: SampleRequest, rendered: Rendered, outputs: Sequence[RequestOutput]) -> SampleResponse:
    """The outputs of all samples, in order."""
    fields: dict[str, Any] = {}
    num_columns = _num_prompt_columns(request)
    if request.prompt_logprobs or num_columns:
        length = len(rendered.token_ids_T)
        fields = _prompt_scores(request, rendered, *_table(outputs[0].prompt_logprobs, 1, length, num_columns))
    return SampleResponse(
        sequences=[_sequence(output.outputs[0], request.topk_sample_logprobs) for output in outputs],
        prompt_cache_hit_tokens=outputs[0].num_cached_tokens or 0,
        **fields,
    )


def _sequence(output: CompletionOutput, k: int) -> SampledSequence:
    if output.finish_reason not in ("stop", "length"):
        raise BackendFailed(f"the engine ended a sample with {output.finish_reason}")
    token_ids_TK, logprobs_TK = _table(output.logprobs, 0, len(output.token_ids), k)
    return SampledSequence(
        stop_reason=output.finish_reason,
        tokens=np.array(output.token_ids, dtype=np.int32),
        logprobs=logprobs_TK[:, 0].copy(),
        topk_logprobs=_topk(token_ids_TK[:, 1:], logprobs_TK[:, 1:]) if k else None,
    )


def _prompt_scores(
    request: SampleRequest, rendered: Rendered, ids_PC: np.ndarray, logprobs_PC: np.ndarray
) -> dict[str, Any]:
    """What the request asks of its prompt, from columns: the token itself, the likeliest, the chosen, the drawn."""
    k, num_draws = request.topk_prompt_logprobs, request.prompt_alt_tokens_k
    draws = ids_PC.shape[1] - num_draws
    fields: dict[str, Any] = {}
    logprobs_T, topk = _token_scores(request, rendered, ids_PC[:, : k + 1], logprobs_PC[:, : k + 1])
    if request.prompt_logprobs:
        fields["prompt_logprobs"] = logprobs_T
    if k:
        fields["topk_prompt_logprobs"] = topk
    if request.target_prompt_logprobs is not None:
        fields["target_prompt_logprobs"] = _chosen(request.target_prompt_logprobs, logprobs_PC[:, k + 1 : draws])
    if num_draws:
        tokens, logprobs = ids_PC[:, draws:].copy(), logprobs_PC[:, draws:].copy()
        fields["prompt_alt_tokens"] = PromptAltTokens(tokens=tokens, logprobs=logprobs)
    return fields


def _token_scores(
    request: SampleRequest, rendered: Rendered, ids_PK: np.ndarray, logprobs_PK: np.ndarray
) -> tuple[np.ndarray, TopkLogprobs]:
    """Log probability of each prompt token, and the likeliest at each position; images predict nothing."""
    length, k = len(rendered.token_ids_T), request.topk_prompt_logprobs
    logprobs_T = np.full(length, np.nan, dtype=np.float32)
    logprobs_T[1:] = logprobs_PK[:, 0]
    topk_ids_TK = np.full((length, k), _NO_TOKEN, dtype=np.int32)
    topk_logprobs_TK = np.full((length, k), -np.inf, dtype=np.float32)
    topk_ids_TK[1:], topk_logprobs_TK[1:] = ids_PK[:, 1:], logprobs_PK[:, 1:]
    for span in rendered.spans:
        logprobs_T[max(span.offset, 1) : span.offset + span.num_tokens] = 0.0
        topk_logprobs_TK[span.offset : span.offset + span.num_tokens] = -np.inf
    if request.prompt_logprobs_last_n is not None:
        logprobs_T[: length - request.prompt_logprobs_last_n] = np.nan
        topk_logprobs_TK[: length - request.prompt_logprobs_last_n] = -np.inf
    return logprobs_T, _topk(topk_ids_TK, topk_logprobs_TK)


def _chosen(targets: TensorData, logprobs_PK: np.ndarray) -> PromptTensor:
    """In the layout of the request, 0.0 where it holds -1."""
    shape = list(logprobs_PK.shape)
    if targets.sparse_crow_indices is None:
        asked = targets.to_array() >= 0
        return PromptTensor(values=np.where(asked, logprobs_PK, 0).astype(np.float32), shape=shape)
    crow, col = (np.array(one or [], np.int64) for one in (targets.sparse_crow_indices, targets.sparse_col_indices))
    values = logprobs_PK[np.repeat(np.arange(shape[0]), np.diff(crow)), col]
    values = np.where(np.array(targets.data, np.int64) >= 0, values, 0).astype(np.float32)
    return PromptTensor(values=values, shape=shape, crow_indices=crow, col_indices=col)


def _table(flat: FlatLogprobs, start: int, end: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions start to end of the engine's log probabilities: the token itself, then the k likeliest."""
    shape = (end - start, k + 1)
    if len(flat) != end or len(flat.logprobs) != shape[0] * shape[1]:
        raise BackendFailed(f"the engine gave {len(flat.logprobs)} log probabilities where {shape} were due")
    token_ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)
    return token_ids, np.array(flat.logprobs, dtype=np.float32).reshape(shape)


def _topk(token_ids_TK: np.ndarray, logprobs_TK: np.ndarray) -> TopkLogprobs:
    """Tokens that top_k or top_p shut out have no probability, so no cell."""
    none = np.isneginf(logprobs_TK)
    return TopkLogprobs(
        token_ids=np.where(none, np.int32(_NO_TOKEN), token_ids_TK),
        logprobs=np.where(none, np.float32(_NO_LOGPROB), logprobs_TK),
    )
