"""What is drawn from one prompt of a chat, in the words of samples: people read both alike."""

import numpy as np
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams as EngineParams

from api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams

_TOKEN_BYTES = 8


class Record:
    """Follows the sequences of one prompt, until they are more than `max_bytes`."""

    def __init__(self, prompt: ModelInput, params: EngineParams, max_bytes: int) -> None:
        self._prompt = prompt
        self._params = params
        self._left_bytes = max_bytes - sum(_size_bytes(chunk) for chunk in prompt.chunks)
        self._drawn: dict[int, tuple[list[int], list[float]]] = {}
        self._ends: dict[int, str] = {}

    def add(self, index: int, output: CompletionOutput) -> None:
        """The next tokens of a sequence, with their log probabilities."""
        self._left_bytes -= _TOKEN_BYTES * len(output.token_ids)
        if self._left_bytes < 0:
            return
        tokens, logprobs = self._drawn.setdefault(index, ([], []))
        tokens += output.token_ids
        logprobs += [step[one].logprob for one, step in zip(output.token_ids, output.logprobs or (), strict=True)]
        if output.finish_reason is not None:
            self._ends[index] = output.finish_reason

    def read(self) -> tuple[SampleRequest, SampleResponse] | None:
        """None of what is too large."""
        if self._left_bytes < 0:
            return None
        params = SamplingParams(temperature=self._params.temperature, seed=self._params.seed)
        sequences = [_sequence(*self._drawn[index], end) for index, end in sorted(self._ends.items())]
        request = SampleRequest(prompt=self._prompt, sampling_params=params, num_samples=self._params.n)
        return request, SampleResponse(sequences=sequences)


def _sequence(tokens: list[int], logprobs: list[float], end: str) -> SampledSequence:
    return SampledSequence(
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
