"""Scores of chosen tokens, and random draws, at every prompt position: on both of vLLM's runners alike.

vLLM's own scoring of chosen tokens works on one of its runners only, and nothing in it draws. So a request
asks for that many more of the likeliest tokens, and says in its extra arguments what it wants instead; here,
inside the worker, the last columns of its prompt log probabilities are filled with that.

P prompt positions after the first, N of them in this step, K chosen tokens, D draws, V vocabulary
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEY = "prompt_columns"
ROWS_AT_ONCE = 256
"""Of logits, which are as wide as the vocabulary: as many as the engine samples from in the run by which it
measures the memory it needs, so that scores of prompts stay within that."""


def extra_args(targets_PK: np.ndarray, num_draws: int, temperature: float, seed: int) -> dict[str, Any]:
    """For SamplingParams. `targets_PK` holds -1 where nothing is asked."""
    return {
        KEY: {
            "targets": np.ascontiguousarray(targets_PK, dtype="<i8").tobytes(),
            "num_targets": targets_PK.shape[1],
            "num_draws": num_draws,
            "temperature": temperature,
            "seed": seed,
        }
    }


@dataclass
class Columns:
    """One request's, filled as its prompt is computed, in one step or several."""

    targets_PK: Tensor
    num_draws: int
    temperature: float
    generator: torch.Generator
    ids_PC: Tensor
    """C = K + D"""
    logprobs_PC: Tensor

    @classmethod
    def asked_by(cls, params: Any, num_rows: int, device: torch.device) -> "Columns | None":
        """None where the request's SamplingParams ask for none."""
        asked = (params.extra_args or {}).get(KEY)
        if asked is None:
            return None
        num_targets, num_draws = asked["num_targets"], asked["num_draws"]
        targets = np.frombuffer(asked["targets"], "<i8").reshape(num_rows, num_targets).copy()
        shape = (num_rows, num_targets + num_draws)
        return cls(
            torch.from_numpy(targets).to(device),
            num_draws,
            asked["temperature"],
            torch.Generator(device).manual_seed(asked["seed"]),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
        )

    def fill(self, first: int, hidden_NH: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Rows from `first`, of which `hidden_NH` are the hidden states."""
        for start in range(0, len(hidden_NH), ROWS_AT_ONCE):
            part = hidden_NH[start : start + ROWS_AT_ONCE]
            rows = slice(first + start, first + start + len(part))
            logits_NV = compute_logits(part).float()
            logprobs_NV = logits_NV.log_softmax(-1)
            ids_NC = torch.cat([self.targets_PK[rows].clamp_min(0), self._draw(logits_NV)], dim=1)
            self.ids_PC[rows] = ids_NC
            self.logprobs_PC[rows] = logprobs_NV.gather(1, ids_NC)

    def _draw(self, logits_NV: Tensor) -> Tensor:
        """[N, D]: independent draws at the request's temperature."""
        if self.num_draws == 0 or self.temperature == 0:
            return logits_NV.argmax(-1, keepdim=True).expand(-1, self.num_draws)
        # Rows of weights that have diverged are NaN, which multinomial refuses, to the engine's death. Any draw will
        # do there: the request fails for the log probabilities beside it.
        probabilities_NV = (logits_NV / self.temperature).softmax(-1).nan_to_num(nan=1.0)
        return torch.multinomial(probabilities_NV, self.num_draws, replacement=True, generator=self.generator)

    def put_into(self, tensors: Any) -> None:
        """Over the last columns of vLLM's LogprobsTensors of the whole prompt."""
        width = self.ids_PC.shape[1]
        tensors.logprob_token_ids[:, -width:] = self.ids_PC.to(tensors.logprob_token_ids)
        tensors.logprobs[:, -width:] = self.logprobs_PC.to(tensors.logprobs)


def on_first_runner(runner: Any) -> Callable[..., Any]:
    """Replaces `_get_prompt_logprobs_dict` of the V1 runner (CPU)."""
    vllm_step = runner._get_prompt_logprobs_dict
    under_way: dict[str, Columns] = {}

    def step(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        for req_id in set(under_way) - set(runner.requests):
            del under_way[req_id]
        for req_id in runner.num_prompt_logprobs:
            request, num_tokens = runner.requests[req_id], num_scheduled_tokens.get(req_id)
            num_rows = len(request.prompt_token_ids) - 1
            if num_tokens is None or num_rows == 0:
                continue
            if req_id not in under_way:
                asked = Columns.asked_by(request.sampling_params, num_rows, hidden_states.device)
                if asked is None:
                    continue
                under_way[req_id] = asked
            first = request.num_computed_tokens
            offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[req_id]].item()
            hidden = hidden_states[offset : offset + min(num_tokens, num_rows - first)]
            under_way[req_id].fill(first, hidden, runner.model.compute_logits)
        answer: dict[str, Any] = vllm_step(hidden_states, num_scheduled_tokens)
        _put(under_way, answer)
        return answer

    return step


def on_second_runner(worker: Any) -> Callable[..., Any]:
    """Replaces `compute_prompt_logprobs` of the V2 runner's PromptLogprobsWorker (CUDA)."""
    vllm_step, add_request, remove_request = worker.compute_prompt_logprobs, worker.add_request, worker.remove_request
    params: dict[str, Any] = {}
    under_way: dict[str, Columns] = {}

    def add(req_id: str, req_idx: int, sampling_params: Any) -> None:
        add_request(req_id, req_idx, sampling_params)
        if KEY in (sampling_params.extra_args or {}):
            params[req_id] = sampling_params

    def remove(req_id: str) -> None:
        remove_request(req_id)
        params.pop(req_id, None)
        under_way.pop(req_id, None)

    def step(  # noqa: PLR0913
        logits_fn: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, Any]:
        for index, req_id in enumerate(input_batch.req_ids) if params else ():
            num_rows = int(prompt_lens[input_batch.idx_mapping_np[index]]) - 1
            first = int(input_batch.num_computed_prefill_tokens_np[index])
            end = min(first + int(input_batch.num_scheduled_tokens[index]), num_rows)
            if req_id not in params or first >= end:
                continue
            if req_id not in under_way:
                asked = Columns.asked_by(params[req_id], num_rows, hidden_states.device)
                assert asked is not None
                under_way[req_id] = asked
            offset = int(input_batch.query_start_loc_np[index])
            under_way[req_id].fill(first, hidden_states[offset : offset + end - first], logits_fn)
        answer: dict[str, Any] = vllm_step(
            logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        )
        _put(under_way, answer)
        for req_id in answer:
            params.pop(req_id, None)
        return answer

    worker.add_request, worker.remove_request = add, remove
    return step


def _put(under_way: dict[str, Columns], answer: dict[str, Any]) -> None:
    for req_id in answer.keys() & under_way.keys():
        under_way.pop(req_id).put_into(answer[req_id])
