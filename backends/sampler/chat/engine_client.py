"""What vLLM's handlers take for the engine: each of their requests becomes sequences that wait for their turns, draw
with the same care as tasks do, and are looked at before they are told."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators

from api_schemas.sampling import SampleRequest, SampleResponse
from backends.inputs.rendering import Renderer
from backends.protocol import BackendFailed, ChatTask, ChatUsage, InvalidInput
from backends.sampler.answers import check_finite, diverged
from backends.sampler.chat.prompts import MODEL_INPUT
from backends.sampler.chat.record import Record
from backends.sampler.engine_weights import EngineWeights
from backends.sampler.fair_admission import Turns
from backends.sampler.grammars import STEP_S, Grammars
from backends.sampler.prompts import Prompt
from backends.sampler.requests import derived_seed
from backends.sampler.sequences import Sequences

_BAD_GRAMMAR = (
    f"response_format: its grammar took more than {STEP_S:g} s between tokens, or allows none where the answer stands"
)
"""The engine ends such a sequence, and says which in its log alone."""


@dataclass(frozen=True)
class Room:
    """What chats share with tasks in one sampler process."""

    sequences: Sequences
    turns: Turns
    weights: EngineWeights
    renderer: Renderer
    end_tokens: Sequence[int]
    placeholders: Sequence[int]
    grammars: Grammars


class ChatEngine:
    """vLLM's `EngineClient` as far as its handlers use it, for one request."""

    def __init__(self, room: Room, task: ChatTask, held: Any) -> None:
        self._room = room
        self._task = task
        self._held = held
        self.errored = False
        """A dead engine ends this process."""
        self.usage = ChatUsage()
        self._records: list[Record] = []
        self.failure: InvalidInput | BackendFailed | None = None
        """What the handler was told by an exception; it may have made an event of it."""

    def drawn(self) -> tuple[tuple[SampleRequest, SampleResponse], ...]:
        """As ChatUsage has it."""
        return tuple(found for record in self._records if (found := record.read()) is not None)

    def check_admission(self, n: int) -> None:
        """The server has admitted the request."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of all of a prompt's sequences, as they come, or joined in one where only the end is asked for.
        What else vLLM passes is its own idea of adapters and turns."""
        try:
            await self._room.grammars.require_quick(self._task.owner, sampling_params.structured_outputs)
        except InvalidInput as error:
            self.failure = error
            raise
        rendered = Prompt(self._room.renderer, prompt[MODEL_INPUT], self._task.owner)
        num_tokens, finals = len(prompt["prompt_token_ids"]), {}
        self.usage = replace(self.usage, prompt=self.usage.prompt + num_tokens)
        record = Record(prompt[MODEL_INPUT], sampling_params, self._task.kept_bytes)
        self._records.append(record)
        streams = [self._sequence(rendered, sampling_params, index) for index in range(sampling_params.n)]
        try:
            async with aclosing(merge_async_iterators(*streams)) as merged:
                async for index, output in merged:
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
        room, task = self._room, self._task
        own = drawn(params, index, room.end_tokens, room.placeholders)
        async with room.turns.turn(task.owner, room.weights.slot(task.weights)) as num_before:
            lora = await room.weights.load(self._held)
            _, inputs = await prompt.render()
            async with aclosing(room.sequences.run(inputs, own, lora, num_before)) as outputs:
                async for output in outputs:
                    try:
                        check_finite(output)
                    except FloatingPointError as error:
                        raise diverged(error, task.weights) from None
                    if output.outputs[0].finish_reason == "error" and params.structured_outputs is not None:
                        raise InvalidInput(_BAD_GRAMMAR)
                    if output.outputs[0].finish_reason not in (None, "stop", "length"):
                        raise BackendFailed(f"the engine ended a sequence with {output.outputs[0].finish_reason}")
                    _sort_likeliest(output)
                    yield output

    def _count(self, output: RequestOutput, index: int, num_tokens: int) -> None:
        """Tokens drawn, and of the first sequence those of the prompt that were cached."""
        sampled = self.usage.sampled + len(output.outputs[0].token_ids)
        cached = self.usage.cached
        if index == 0 and output.finished:
            cached += min(output.num_cached_tokens or 0, num_tokens)
        self.usage = replace(self.usage, sampled=sampled, cached=cached)


def _sort_likeliest(output: RequestOutput) -> None:
    """The engine's step has the drawn token first; a handler tells as many as were asked for, from the first on."""
    for step in output.outputs[0].logprobs or ():
        if len(step) > 1:
            in_order = sorted(step.items(), key=lambda item: item[1].rank or len(step))
            step.clear()
            step.update(in_order)


def drawn(params: SamplingParams, index: int, end_tokens: Sequence[int], placeholders: Sequence[int]) -> SamplingParams:
    """A handler's parameters for its sequence `index`, as `requests.sampling_params` makes them of a task."""
    own = params.clone()
    own.n = 1
    own.seed = None if params.seed is None else derived_seed(params.seed, index)
    own.ignore_eos = True  # the engine's idea of end tokens, in whose place are ours
    own.stop_token_ids = list(dict.fromkeys([*end_tokens, *(params.stop_token_ids or ())]))
    own.logprobs = params.logprobs or 0  # always, so that weights that have diverged are told
    own.prompt_logprobs = params.prompt_logprobs if index == 0 else None
    cuts = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or bool(params.logit_bias)
    if cuts and placeholders:
        own.logit_bias = {**(params.logit_bias or {}), **dict.fromkeys(placeholders, float("-inf"))}
    return own
