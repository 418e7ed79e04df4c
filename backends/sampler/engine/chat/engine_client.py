"""Stands in for the engine in vLLM's handlers.

Each of their requests becomes sequences that wait for admission, are sampled with the same care as those of tasks, and
are checked before they are sent.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from vllm.inputs import EngineInput
from vllm.logprobs import PromptLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators

from tinker_server.api_schemas import sampling as api
from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed, ChatTask, ChatUsage, InvalidInput
from tinker_server.backends.sampler.engine.adapters import Version
from tinker_server.backends.sampler.engine.answers import check_finite, divergence_error
from tinker_server.backends.sampler.engine.chat.prompts import MODEL_INPUT, NAMES
from tinker_server.backends.sampler.engine.fair_admission import FairAdmission
from tinker_server.backends.sampler.engine.grammars import OWNER, OWNER_S, Grammars, allow_objects_alone
from tinker_server.backends.sampler.engine.requests import Prompt, derive_seed
from tinker_server.backends.sampler.engine.sequences import Sequences
from tinker_server.backends.sampler.engine.versions import VersionCache

_BAD_GRAMMAR = (
    f"response_format: its grammar, with your others', took more than {OWNER_S:g} s between tokens (allow fewer lengths"
    " and repetitions, or ask for fewer choices at once), or allows none where the answer stands"
)
"""The engine ends such a sequence, and reports which only in its log."""
_TOKEN_BYTES = 8
"""Size of a recorded token with its log probability."""


@dataclass(frozen=True)
class Shared:
    """The parts of a sampler process that chats share with tasks."""

    sequences: Sequences
    admission: FairAdmission
    weights: VersionCache
    renderer: Renderer
    end_tokens: Sequence[int]
    placeholders: Sequence[int]
    grammars: Grammars


class ChatEngine:
    """vLLM's `EngineClient`, as far as its handlers use it, for a request."""

    def __init__(self, shared: Shared, task: ChatTask, held: Version | None) -> None:
        self._shared = shared
        self._task = task
        self._held = held
        self.errored = False
        """A dead engine ends this process."""
        self.usage = ChatUsage()
        self._records: list[Record] = []
        self.failure: InvalidInput | BackendFailed | None = None
        """The exception that the handler got; it may have made an event of it."""

    @property
    def _only_echoes(self) -> bool:
        """True if the request asks for its prompt and no token more."""
        return self._task.endpoint == "completions" and self._task.body.get("max_tokens") == 0

    def samples(self) -> tuple[tuple[api.SampleRequest, api.SampleResponse], ...]:
        """Return the recorded samples, for `ChatUsage.drawn`."""
        return tuple(found for record in self._records if (found := record.read()) is not None)

    def check_admission(self, n: int) -> None:
        """Do nothing: the server has admitted the request."""

    async def generate(
        self, prompt: EngineInput, sampling_params: SamplingParams, request_id: str, **_: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of all of a prompt's sequences as they come, or one in the end where that alone is asked
        for.

        vLLM's other arguments, for adapters and priorities, are ignored.
        """
        if self._task.body.get("tools") and sampling_params.structured_outputs is not None:
            allow_objects_alone(sampling_params.structured_outputs)
        try:
            await self._shared.grammars.require_quick(self._task.owner, sampling_params.structured_outputs)
        except InvalidInput as error:
            self.failure = error
            raise
        rendered = Prompt(self._shared.renderer, prompt[MODEL_INPUT], self._task.owner, prompt[NAMES])
        num_tokens, finals = len(prompt["prompt_token_ids"]), {}
        self.usage = replace(self.usage, prompt=self.usage.prompt + num_tokens)
        record = Record(prompt[MODEL_INPUT], sampling_params, self._task.kept_bytes)
        if not self._only_echoes:
            self._records.append(record)
        streams = [self._sequence(rendered, sampling_params, index) for index in range(sampling_params.n)]
        try:
            async with aclosing(merge_async_iterators(*streams)) as merged:
                async for index, output in _with_prompt_logprobs(merged, sampling_params):
                    if self._only_echoes:
                        _remove_drawn(output.outputs[0])
                    self._count(output, index, num_tokens)
                    record.add(index, output.outputs[0])
                    output.outputs[0].index = index
                    output.prompt = prompt["prompt"]
                    if sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                        finals[index] = output
                    else:
                        yield output
        except (InvalidInput, BackendFailed) as error:
            self.failure = error
            raise
        if finals:
            joined = finals[0]
            joined.outputs = [finals[index].outputs[0] for index in sorted(finals)]
            yield joined

    async def _sequence(
        self, prompt: Prompt, params: SamplingParams, index: int
    ) -> AsyncGenerator[RequestOutput, None]:
        shared, task = self._shared, self._task
        own = params_of_sequence(params, index, shared.end_tokens, shared.placeholders)
        own.extra_args = {**(own.extra_args or {}), OWNER: task.owner}
        async with shared.admission.admission(task.owner, task.weights) as num_before:
            lora = await shared.weights.load(self._held)
            _, inputs = await prompt.render()
            async with aclosing(shared.sequences.run(inputs, own, lora, num_before)) as outputs:
                async for output in outputs:
                    # Where a grammar allows no token, no log probability is finite either.
                    if output.outputs[0].finish_reason == "error" and params.structured_outputs is not None:
                        raise InvalidInput(_BAD_GRAMMAR)
                    try:
                        check_finite(output)
                    except FloatingPointError as error:
                        raise divergence_error(error, task.weights) from None
                    if output.outputs[0].finish_reason not in (None, "stop", "length"):
                        raise BackendFailed(f"the engine ended a sequence with {output.outputs[0].finish_reason}")
                    _sort_likeliest(output)
                    yield output

    def _count(self, output: RequestOutput, index: int, num_tokens: int) -> None:
        """Count sampled tokens, and for the first sequence those of the prompt that were cached."""
        sampled = self.usage.sampled + len(output.outputs[0].token_ids)
        cached = self.usage.cached
        if index == 0 and output.finished:
            cached += min(output.num_cached_tokens or 0, num_tokens)
        self.usage = replace(self.usage, sampled=sampled, cached=cached)


async def _with_prompt_logprobs(
    outputs: AsyncIterator[tuple[int, RequestOutput]], params: SamplingParams
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs of a prompt's sequences, each sequence's first with the prompt's log probabilities.

    Sequence 0 alone computes them, so the others' outputs wait for its first.
    """
    found: PromptLogprobs | None = None
    held: list[tuple[int, RequestOutput]] = []
    begun: set[int] = set()
    async for index, output in outputs:
        if index == 0:
            found = found or output.prompt_logprobs
        if params.prompt_logprobs is not None and found is None:
            held.append((index, output))
            continue
        for answer in (*held, (index, output)):
            if answer[0] not in begun:
                begun.add(answer[0])
                answer[1].prompt_logprobs = found
            yield answer
        held.clear()
    assert not held, "the engine returned no log probabilities of the prompt"


def _remove_drawn(output: CompletionOutput) -> None:
    """Remove the token that the engine draws behind every prompt."""
    output.text, output.token_ids, output.logprobs = "", [], []
    if output.finish_reason is not None:
        output.finish_reason, output.stop_reason = "length", None


def _sort_likeliest(output: RequestOutput) -> None:
    """Sort each step by rank: it has the sampled token first, and a handler returns the first k."""
    for step in output.outputs[0].logprobs or ():
        if len(step) > 1:
            in_order = sorted(step.items(), key=lambda item: item[1].rank or len(step))
            step.clear()
            step.update(in_order)


def params_of_sequence(
    params: SamplingParams, index: int, end_tokens: Sequence[int], placeholders: Sequence[int]
) -> SamplingParams:
    """Return a handler's parameters for its sequence `index`, as `requests.sampling_params` does for a task."""
    own = params.clone()
    own.n = 1
    own.seed = None if params.seed is None else derive_seed(params.seed, index)
    own.ignore_eos = True  # our end tokens replace the engine's
    own.stop_token_ids = list(dict.fromkeys([*end_tokens, *(params.stop_token_ids or ())]))
    own.logprobs = params.logprobs or 0  # always, so that diverged weights are found
    own.prompt_logprobs = params.prompt_logprobs if index == 0 else None
    cuts = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    if cuts and placeholders:
        own.logit_bias = {**(params.logit_bias or {}), **dict.fromkeys(placeholders, float("-inf"))}
    return own


class Record:
    """Records the sequences of a prompt as samples, until they are more than `max_bytes`."""

    def __init__(self, prompt: ModelInput, params: SamplingParams, max_bytes: int) -> None:
        self._prompt = prompt
        self._params = params
        self._left_bytes = max_bytes - sum(_size_bytes(chunk) for chunk in prompt.chunks)
        self._sampled: dict[int, tuple[list[int], list[float]]] = {}
        self._ends: dict[int, str] = {}

    def add(self, index: int, output: CompletionOutput) -> None:
        """Add the next tokens of a sequence, with their log probabilities."""
        self._left_bytes -= _TOKEN_BYTES * len(output.token_ids)
        if self._left_bytes < 0:
            return
        tokens, logprobs = self._sampled.setdefault(index, ([], []))
        tokens += output.token_ids
        logprobs += [
            step[token_id].logprob for token_id, step in zip(output.token_ids, output.logprobs or (), strict=True)
        ]
        if output.finish_reason is not None:
            self._ends[index] = output.finish_reason

    def read(self) -> tuple[api.SampleRequest, api.SampleResponse] | None:
        """Return what was sampled; None where it was too large."""
        if self._left_bytes < 0:
            return None
        params = api.SamplingParams(temperature=self._params.temperature, seed=self._params.seed)
        sequences = [_make_sequence(*self._sampled[index], end) for index, end in sorted(self._ends.items())]
        request = api.SampleRequest(prompt=self._prompt, sampling_params=params, num_samples=self._params.n)
        return request, api.SampleResponse(sequences=sequences)


def _make_sequence(tokens: list[int], logprobs: list[float], end: str) -> api.SampledSequence:
    return api.SampledSequence(
        stop_reason="stop" if end == "stop" else "length",
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
    )


def _size_bytes(chunk: object) -> int:
    match chunk:
        case EncodedTextChunk(tokens=tokens):
            return _TOKEN_BYTES * len(tokens)
        case ImageChunk(data=data):
            return len(data)
    raise AssertionError(chunk)
