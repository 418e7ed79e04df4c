"""JSON forms of results, for clients that accept no protobuf, and their encoding.

They are encoded in parts of some kilobytes: Python holds its interpreter lock while it encodes one value, and no other
request of the server is answered meanwhile.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas.base import Response

_TOPK_SENTINEL = -99999.0
_SLICE = 1024
"""Items of a list that are encoded at once, which takes a millisecond."""
_PART_BYTES = 1 << 16


class TensorJson(Response):
    """A float32 tensor, row-major; null stands for a value that is not finite."""

    data: list[float | None]
    """Values in row-major order."""
    dtype: Literal["float32"]
    """Type of the values."""
    shape: list[int]
    """Sizes of the dimensions."""


class ForwardBackwardJson(Response):
    """Result of forward_backward and of forward."""

    loss_fn_output_type: str
    """`ArrayRecord`."""
    loss_fn_outputs: list[dict[str, TensorJson]]
    """Per datum, in the order sent: `logprobs` of the shape of its target_tokens, and of cross_entropy
    `elementwise_loss`, minus the weight times the log probability."""
    metrics: dict[str, float]
    """Keys are `name:reduction`; values that are not finite are left out."""


class SampledSequenceJson(Response):
    """A continuation."""

    stop_reason: Literal["stop", "length"]
    """`stop`: ended by a stop token or string; `length`: ended by max_tokens or the context's end."""
    tokens: list[int]
    """Sampled tokens, with the stop token or the tokens of the stop string at the end."""
    logprobs: list[float | None]
    """Log probability of each token, in nats, in the temperature-scaled distribution it was sampled from."""


class SampleJson(Response):
    """Result of asample."""

    type: Literal["sample"]
    sequences: list[SampledSequenceJson]
    """Continuations, as many as the request's num_samples."""
    prompt_logprobs: list[float | None] | None = None
    """Log probability per prompt position, at temperature 1: null at position 0, 0.0 at image positions."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Per prompt position, [token, log probability] of the likeliest tokens; null if there are none."""


@dataclass(frozen=True)
class _Items:
    """A list that is encoded a slice at a time."""

    length: int
    slice: Callable[[int, int], Sequence[object]]


def forward_backward_json(body: bytes) -> Iterator[bytes]:
    """Encode a protobuf ForwardBackwardOutput as a ForwardBackwardJson, in parts."""
    message = pb.ForwardBackwardOutput.FromString(body)
    outputs: list[dict[str, object]] = []
    for record in message.loss_fn_outputs:
        parts = {name: _split_batch(tensor) for name, tensor in record.fields.items()}
        outputs += [{name: _tensor_json(parts[name][index]) for name in parts} for index in range(record.num_datums)]
    yield from _strict_json(
        {
            "loss_fn_output_type": message.loss_fn_output_type,
            "loss_fn_outputs": outputs,
            # The SDK's JSON parser accepts no NaN.
            "metrics": {name: value for name, value in message.metrics.items() if np.isfinite(value)},
        }
    )


def _split_batch(message: pb.BatchedTensor) -> list[np.ndarray]:
    offsets = np.frombuffer(message.offsets, "<i8").tolist()
    return [
        np.frombuffer(message.data[start:end], "<f4").reshape(-1, *message.trailing_shape)
        for start, end in pairwise(offsets)
    ]


def _tensor_json(array: np.ndarray) -> dict[str, object]:
    return {"data": _null_for_nan(array.ravel()), "dtype": "float32", "shape": list(array.shape)}


def sample_json(body: bytes) -> Iterator[bytes]:
    """Encode a protobuf SampleResponse as a SampleJson, in parts."""
    message = pb.SampleResponse.FromString(body)
    answer: dict[str, object] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
                "tokens": _integers(np.frombuffer(sequence.tokens, "<i4")),
                "logprobs": _null_for_nan(np.frombuffer(sequence.logprobs, "<f4")),
            }
            for sequence in message.sequences
        ],
    }
    if message.HasField("prompt_logprobs"):
        answer["prompt_logprobs"] = _null_for_nan(np.frombuffer(message.prompt_logprobs, "<f4"))
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _topk_json(message.topk_prompt_logprobs)
    yield from _strict_json(answer)


def _topk_json(message: pb.TopkLogprobs) -> _Items:
    """Return [token, log probability] pairs per position; null if there are none."""
    shape = (message.length, message.k)
    ids_PK = np.frombuffer(message.token_ids, "<i4").reshape(shape)
    logprobs_PK = np.frombuffer(message.logprobs, "<f4").reshape(shape)

    def pairs(begin: int, end: int) -> list[list[list[float]] | None]:
        found = [
            [[token, value] for token, value in zip(*position, strict=True) if value > _TOPK_SENTINEL]
            for position in zip(ids_PK[begin:end].tolist(), logprobs_PK[begin:end].tolist(), strict=True)
        ]
        return [position or None for position in found]

    return _Items(message.length, pairs)


def _integers(values: np.ndarray) -> _Items:
    return _Items(len(values), lambda begin, end: values[begin:end].tolist())


def _null_for_nan(values: np.ndarray) -> _Items:
    """Replace values that are not finite by null, since the SDK's JSON parser refuses them."""

    def numbers(begin: int, end: int) -> list[float | None]:
        return [value if np.isfinite(value) else None for value in values[begin:end].tolist()]

    return _Items(len(values), numbers)


def _strict_json(value: object) -> Iterator[bytes]:
    """Encode JSON in parts of some kilobytes."""
    held: list[str] = []
    size = 0
    for text in _texts(value):
        held.append(text)
        size += len(text)
        if size > _PART_BYTES:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join(held).encode()


def _texts(value: object) -> Iterator[str]:
    match value:
        case dict():
            for number, (key, item) in enumerate(value.items()):
                yield f"{',' if number else '{'}{json.dumps(key)}:"
                yield from _texts(item)
            yield "}" if value else "{}"
        case list():
            for number, item in enumerate(value):
                yield "," if number else "["
                yield from _texts(item)
            yield "]" if value else "[]"
        case _Items(length, items):
            for begin in range(0, length, _SLICE):
                text = json.dumps(items(begin, begin + _SLICE), allow_nan=False, separators=(",", ":"))
                yield f"{',' if begin else '['}{text[1:-1]}"
            yield "]" if length else "[]"
        case _:
            yield json.dumps(value, allow_nan=False)
