"""Log probabilities of chosen tokens, and random draws, at every prompt position, on both of vLLM's model runners.

vLLM's own scoring of chosen tokens works on the V2 model runner alone, and nothing in it draws. So a request asks for
that many more of the likeliest tokens, and names in its extra arguments what it wants instead; here, inside the worker,
the last columns of its prompt log probabilities are filled with that.

P prompt positions after the first, N of them in this step, K chosen tokens, D draws, V vocabulary
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

KEY = "scored_tokens"
ROWS_AT_ONCE = 256
"""Rows of logits, which are as wide as the vocabulary: as many as the engine samples from in the run by which it
measures the memory it needs, so that scores of prompts stay within that."""

PromptRows = Callable[[Tensor], AbstractContextManager[None]]
"""Tells the head's LoRA kernels that its rows are prompt tokens (`lora.py`)."""
ScoresV1 = dict[str, LogprobsTensors | None]
StepV1 = Callable[[Tensor, dict[str, int]], ScoresV1]
"""Scores prompts of a step of the V1 model runner, by its hidden states and each request's tokens."""


class Asked(TypedDict):
    """The scored tokens that a request asks for, among its extra arguments."""

    targets: bytes
    num_targets: int
    num_draws: int
    temperature: float
    seed: int
    never_drawn: list[int]
    """Token ids; they are scored all the same."""


def extra_args(
    targets_PK: np.ndarray, num_draws: int, temperature: float, seed: int, never_drawn: Sequence[int]
) -> dict[str, Asked]:
    """Return extra arguments for SamplingParams. `targets_PK` holds -1 where nothing is asked."""
    return {
        KEY: {
            "targets": np.ascontiguousarray(targets_PK, dtype="<i8").tobytes(),
            "num_targets": targets_PK.shape[1],
            "num_draws": num_draws,
            "temperature": temperature,
            "seed": seed,
            "never_drawn": list(never_drawn),
        }
    }


@dataclass
class ScoredTokens:
    """A request's tokens and scores, filled as its prompt is computed, in one step or several."""

    targets_PK: Tensor
    num_draws: int
    temperature: float
    uniform_PD: Tensor
    """From 0 to below 1, what each draw is chosen by: the same however the prompt is divided into steps."""
    never_drawn: Tensor
    ids_PC: Tensor
    """C = K + D"""
    logprobs_PC: Tensor

    @classmethod
    def from_params(cls, params: SamplingParams, num_rows: int, device: torch.device) -> "ScoredTokens | None":
        """Return empty ones for a request's SamplingParams; None where they ask for none."""
        asked: Asked | None = (params.extra_args or {}).get(KEY)
        if asked is None:
            return None
        num_targets, num_draws = asked["num_targets"], asked["num_draws"]
        targets = np.frombuffer(asked["targets"], "<i8").reshape(num_rows, num_targets).copy()
        shape = (num_rows, num_targets + num_draws)
        # Of the CPU, which gives a row the same numbers whatever rows follow.
        generator = torch.Generator().manual_seed(asked["seed"])
        uniform_PD = torch.rand(num_rows, num_draws, generator=generator, dtype=torch.float64)
        return cls(
            torch.from_numpy(targets).to(device),
            num_draws,
            asked["temperature"],
            uniform_PD.to(device),
            torch.tensor(asked["never_drawn"], dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
        )

    def fill(self, first: int, hidden_NH: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Fill the rows from `first` on, whose hidden states are `hidden_NH`."""
        for start in range(0, len(hidden_NH), ROWS_AT_ONCE):
            part = hidden_NH[start : start + ROWS_AT_ONCE]
            rows = slice(first + start, first + start + len(part))
            logits_NV = compute_logits(part).float()
            logprobs_NV = logits_NV.log_softmax(-1)
            drawn_ND = self._draw(logits_NV, self.uniform_PD[rows])
            ids_NC = torch.cat([self.targets_PK[rows].clamp_min(0), drawn_ND], dim=1)
            self.ids_PC[rows] = ids_NC
            self.logprobs_PC[rows] = logprobs_NV.gather(1, ids_NC)

    def _draw(self, logits_NV: Tensor, uniform_ND: Tensor) -> Tensor:
        """Return [N, D] independent draws at the request's temperature: the tokens at which the summed probabilities
        exceed `uniform_ND`."""
        logits_NV = logits_NV.index_fill(1, self.never_drawn, float("-inf"))
        if self.num_draws == 0 or self.temperature == 0:
            return logits_NV.argmax(-1, keepdim=True).expand(-1, self.num_draws)
        # Diverged weights give NaN rows, of which no sum exceeds anything: indices beyond the vocabulary would end the
        # engine. Any draw will do there: the request fails for the log probabilities beside it.
        probabilities_NV = (logits_NV / self.temperature).softmax(-1).nan_to_num_(nan=1.0)
        # In float32 the order of summing, which depends on the number of rows, would decide between unlikely tokens.
        sums_NV = probabilities_NV.double().cumsum_(-1)
        return torch.searchsorted(sums_NV, uniform_ND * sums_NV[:, -1:], right=True)

    def put_into(self, tensors: LogprobsTensors) -> None:
        """Overwrite the last columns of vLLM's LogprobsTensors of the whole prompt."""
        width = self.ids_PC.shape[1]
        tensors.logprob_token_ids[:, -width:] = self.ids_PC.to(tensors.logprob_token_ids)
        tensors.logprobs[:, -width:] = self.logprobs_PC.to(tensors.logprobs)


def scoring_step_v1(runner: "GPUModelRunner", vllm_step: StepV1, prompt_rows: PromptRows) -> StepV1:
    """Return a replacement of `_get_prompt_logprobs_dict` of the V1 model runner (CPU), which is `vllm_step`."""
    in_flight: dict[str, ScoredTokens] = {}

    def step(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> ScoresV1:
        for req_id in set(in_flight) - set(runner.requests):
            del in_flight[req_id]
        for req_id in runner.num_prompt_logprobs:
            request, num_tokens = runner.requests[req_id], num_scheduled_tokens.get(req_id)
            num_rows = len(request.prompt_token_ids) - 1
            if num_tokens is None or num_rows == 0:
                continue
            if req_id not in in_flight:
                asked = ScoredTokens.from_params(request.sampling_params, num_rows, hidden_states.device)
                if asked is None:
                    continue
                in_flight[req_id] = asked
            first = request.num_computed_tokens
            offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[req_id]].item()
            hidden = hidden_states[offset : offset + min(num_tokens, num_rows - first)]
            in_flight[req_id].fill(first, hidden, runner.model.compute_logits)
        answer = vllm_step(hidden_states, num_scheduled_tokens)
        _put(in_flight, answer)
        return answer

    def step_on_prompt_rows(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> ScoresV1:
        with prompt_rows(hidden_states):
            return step(hidden_states, num_scheduled_tokens)

    return step_on_prompt_rows


class ScoringWorker(PromptLogprobsWorker):  # type: ignore[misc]
    """The V2 model runner's (CUDA), which scores and draws as well."""

    prompt_rows: PromptRows = staticmethod(lambda _: nullcontext())

    def __init__(self, *args: object) -> None:
        """Take vLLM's own arguments."""
        super().__init__(*args)
        self._params: dict[str, SamplingParams] = {}
        self._in_flight: dict[str, ScoredTokens] = {}

    def add_request(self, req_id: str, req_idx: int, sampling_params: SamplingParams) -> None:
        """Note a request that asks for scored tokens."""
        super().add_request(req_id, req_idx, sampling_params)
        if KEY in (sampling_params.extra_args or {}):
            self._params[req_id] = sampling_params

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        super().remove_request(req_id)
        self._params.pop(req_id, None)
        self._in_flight.pop(req_id, None)

    def compute_prompt_logprobs(  # noqa: PLR0913
        self,
        logits_fn: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        input_batch: InputBatch,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        """Return the step's prompt log probabilities, with the scored tokens in them."""
        with self.prompt_rows(hidden_states):
            self._fill(logits_fn, hidden_states, input_batch, prompt_lens)
            answer: dict[str, LogprobsTensors] = super().compute_prompt_logprobs(
                logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
            )
        _put(self._in_flight, answer)
        for req_id in answer:
            self._params.pop(req_id, None)
        return answer

    def _fill(
        self,
        logits_fn: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        input_batch: InputBatch,
        prompt_lens: np.ndarray,
    ) -> None:
        for index, req_id in enumerate(input_batch.req_ids) if self._params else ():
            num_rows = int(prompt_lens[input_batch.idx_mapping_np[index]]) - 1
            first = int(input_batch.num_computed_prefill_tokens_np[index])
            end = min(first + int(input_batch.num_scheduled_tokens[index]), num_rows)
            if req_id not in self._params or first >= end:
                continue
            if req_id not in self._in_flight:
                asked = ScoredTokens.from_params(self._params[req_id], num_rows, hidden_states.device)
                assert asked is not None
                self._in_flight[req_id] = asked
            offset = int(input_batch.query_start_loc_np[index])
            self._in_flight[req_id].fill(first, hidden_states[offset : offset + end - first], logits_fn)


def _put(in_flight: dict[str, ScoredTokens], answer: ScoresV1) -> None:
    for req_id in answer.keys() & in_flight.keys():
        in_flight.pop(req_id).put_into(answer[req_id])
