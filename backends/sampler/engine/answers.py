"""Turns the engine's outputs into answers. Knows no engine.

T tokens, P prompt positions after the first, K likeliest or chosen tokens, C all of a position's scored tokens
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from tinker_server.api_schemas.inputs import TensorData
from tinker_server.api_schemas.sampling import (
    PromptAltTokens,
    PromptTensor,
    SampledSequence,
    SampleResponse,
    TopkLogprobs,
)
from tinker_server.backends.inputs.rendering import Rendered
from tinker_server.backends.protocol import BackendFailed, InvalidInput, PromptScores, SamplingTask
from tinker_server.backends.sampler.engine.requests import num_scored_tokens

_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
"""Fill empty cells of a top-k table."""


def answer(task: SamplingTask, rendered: Rendered, outputs: Sequence[RequestOutput]) -> SampleResponse:
    """Return the answer from the outputs of all the task's samples, in order; the first one scored the prompt.

    Raises InvalidInput (of a base model BackendFailed) where log probabilities are not finite.
    """
    try:
        return _answer(task, rendered, outputs)
    except FloatingPointError as error:
        raise divergence_error(error, task.weights) from None


def divergence_error(error: FloatingPointError, weights: Path | None) -> Exception:
    """Return the error for log probabilities that are not finite."""
    if weights is None:
        return BackendFailed(f"{error}: the base model's own")
    return InvalidInput(
        f"{error}: the sampler weights have diverged (or overflow in the model's precision); sample from a"
        " checkpoint before that, and train on with a smaller learning rate"
    )


def check_finite(output: RequestOutput) -> None:
    """Check an output of a chat, with log probabilities by token. Raises FloatingPointError as `answer` does."""
    for sequence in output.outputs:
        for token_id, step in zip(sequence.token_ids, sequence.logprobs or (), strict=True):
            if step[token_id].logprob == -math.inf:
                raise FloatingPointError("log probabilities of sampled tokens are not finite")
            _check_step(step)
    for step in output.prompt_logprobs or ():
        _check_step(step or {})


def _check_step(step: Mapping[int, Logprob]) -> None:
    if not all(token.logprob < math.inf for token in step.values()):
        raise FloatingPointError("log probabilities are not finite")


class PromptFields(TypedDict, total=False):
    """The fields of a SampleResponse that its prompt has."""

    prompt_logprobs: np.ndarray
    topk_prompt_logprobs: TopkLogprobs
    target_prompt_logprobs: PromptTensor
    prompt_alt_tokens: PromptAltTokens


def _answer(task: SamplingTask, rendered: Rendered, outputs: Sequence[RequestOutput]) -> SampleResponse:
    fields: PromptFields = {}
    num_scored = num_scored_tokens(task.scores)
    if task.scores.logprobs or num_scored:
        length = len(rendered.token_ids_T)
        token_ids_PC, logprobs_PC = _read_scores(outputs[0].prompt_logprobs, 1, length, num_scored)
        fields = _prompt_scores(task.scores, rendered, token_ids_PC, logprobs_PC)
    return SampleResponse(
        sequences=[_sequence(output.outputs[0], task.topk) for output in outputs],
        prompt_cache_hit_tokens=outputs[0].num_cached_tokens or 0,
        **fields,
    )


def _sequence(output: CompletionOutput, k: int) -> SampledSequence:
    if output.finish_reason not in ("stop", "length"):
        raise BackendFailed(f"the engine ended a sample with {output.finish_reason}")
    token_ids_TK, logprobs_TK = _read_scores(output.logprobs, 0, len(output.token_ids), k)
    if np.isneginf(logprobs_TK[:, 0]).any():
        raise FloatingPointError("log probabilities of sampled tokens are not finite")
    return SampledSequence(
        stop_reason=output.finish_reason,
        tokens=np.array(output.token_ids, dtype=np.int32),
        logprobs=logprobs_TK[:, 0].copy(),
        topk_logprobs=_topk(token_ids_TK[:, 1:], logprobs_TK[:, 1:]) if k else None,
    )


def _prompt_scores(
    scores: PromptScores, rendered: Rendered, ids_PC: np.ndarray, logprobs_PC: np.ndarray
) -> PromptFields:
    """Return the requested scores, from columns: the token itself, the likeliest, the chosen, the drawn."""
    k, draws = scores.topk, ids_PC.shape[1] - scores.num_draws
    fields: PromptFields = {}
    logprobs_T, topk = _token_scores(scores, rendered, ids_PC[:, : k + 1], logprobs_PC[:, : k + 1])
    if scores.logprobs:
        fields["prompt_logprobs"] = logprobs_T
    if k:
        fields["topk_prompt_logprobs"] = topk
    if scores.targets is not None:
        fields["target_prompt_logprobs"] = _chosen(scores.targets, logprobs_PC[:, k + 1 : draws])
    if scores.num_draws:
        tokens, logprobs = ids_PC[:, draws:].copy(), logprobs_PC[:, draws:].copy()
        fields["prompt_alt_tokens"] = PromptAltTokens(tokens=tokens, logprobs=logprobs)
    return fields


def _token_scores(
    scores: PromptScores, rendered: Rendered, ids_PK: np.ndarray, logprobs_PK: np.ndarray
) -> tuple[np.ndarray, TopkLogprobs]:
    """Return each prompt token's log probability, and the likeliest at each position; images predict nothing."""
    length, k = len(rendered.token_ids_T), scores.topk
    logprobs_T = np.full(length, np.nan, dtype=np.float32)
    logprobs_T[1:] = logprobs_PK[:, 0]
    topk_ids_TK = np.full((length, k), _NO_TOKEN, dtype=np.int32)
    topk_logprobs_TK = np.full((length, k), -np.inf, dtype=np.float32)
    topk_ids_TK[1:], topk_logprobs_TK[1:] = ids_PK[:, 1:], logprobs_PK[:, 1:]
    for span in rendered.spans:
        logprobs_T[max(span.offset, 1) : span.offset + span.num_tokens] = 0.0
        topk_logprobs_TK[span.offset : span.offset + span.num_tokens] = -np.inf
    if scores.last_n is not None:
        logprobs_T[: length - scores.last_n] = np.nan
        topk_logprobs_TK[: length - scores.last_n] = -np.inf
    return logprobs_T, _topk(topk_ids_TK, topk_logprobs_TK)


def _chosen(targets: TensorData, logprobs_PK: np.ndarray) -> PromptTensor:
    """Return the chosen tokens' scores in the layout of the request, 0.0 where it holds -1."""
    shape = list(logprobs_PK.shape)
    if targets.sparse_crow_indices is None:
        asked = targets.to_array() >= 0
        return PromptTensor(values=np.where(asked, logprobs_PK, 0).astype(np.float32), shape=shape)
    crow, col = (
        np.array(indices or [], np.int64) for indices in (targets.sparse_crow_indices, targets.sparse_col_indices)
    )
    values = logprobs_PK[np.repeat(np.arange(shape[0]), np.diff(crow)), col]
    values = np.where(np.array(targets.data, np.int64) >= 0, values, 0).astype(np.float32)
    return PromptTensor(values=values, shape=shape, crow_indices=crow, col_indices=col)


def _read_scores(flat: FlatLogprobs, start: int, end: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and log probabilities [end - start, k + 1]: each token itself, then the k likeliest.

    Raises FloatingPointError for NaN and infinity.
    """
    shape = (end - start, k + 1)
    if len(flat) != end or len(flat.logprobs) != shape[0] * shape[1]:
        raise BackendFailed(f"the engine gave {len(flat.logprobs)} log probabilities where {shape} were due")
    token_ids = np.array(flat.token_ids, dtype=np.int32).reshape(shape)
    logprobs = np.array(flat.logprobs, dtype=np.float32).reshape(shape)
    (bad,) = np.nonzero(~(logprobs < np.inf).all(1))  # minus infinity is that of a token shut out
    if len(bad):
        raise FloatingPointError(f"log probabilities are not finite, of token {start + bad[0] + 1} of {end} first")
    return token_ids, logprobs


def _topk(token_ids_TK: np.ndarray, logprobs_TK: np.ndarray) -> TopkLogprobs:
    """Empty the cells of tokens that top_k or top_p shut out: they have no probability."""
    none = np.isneginf(logprobs_TK)
    return TopkLogprobs(
        token_ids=np.where(none, np.int32(_NO_TOKEN), token_ids_TK),
        logprobs=np.where(none, np.float32(_NO_LOGPROB), logprobs_TK),
    )
