"""The JSON forms of results, for clients that take no protobuf: what they look like, and how they are made."""

import json
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from api_schemas import tinker_wire_pb2 as pb
from api_schemas.base import Response

_TOPK_SENTINEL = -99999.0


class TensorJson(Response):
    """float32, row-major; null stands for what is not finite."""

    data: list[float | None]
    """The values, row by row."""
    dtype: Literal["float32"]
    """Type of the values."""
    shape: list[int]
    """Sizes of the dimensions."""


class ForwardBackwardJson(Response):
    """Result of forward_backward and of forward."""

    loss_fn_output_type: str
    """`ArrayRecord`."""
    loss_fn_outputs: list[dict[str, TensorJson]]
    """Per datum, in the order sent: `logprobs` of the shape of its target_tokens."""
    metrics: dict[str, float]
    """Keys are `name:reduction`; those that are not finite are left out."""


class SampledSequenceJson(Response):
    """One continuation."""

    stop_reason: Literal["stop", "length"]
    """`stop`: a stop token or string came; `length`: max_tokens or the context's end did."""
    tokens: list[int]
    """Ends with the stop token, or the tokens of the stop string."""
    logprobs: list[float | None]
    """Of each token, in nats, of the temperature-scaled distribution it was drawn from."""


class SampleJson(Response):
    """Result of asample."""

    type: Literal["sample"]
    sequences: list[SampledSequenceJson]
    """As many as were asked for."""
    prompt_logprobs: list[float | None] | None = None
    """Per prompt position, at temperature 1: null at position 0, 0.0 at image positions."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Per prompt position [token, log probability] of the likeliest; null where there are none."""


def forward_backward_json(body: bytes) -> bytes:
    """A protobuf ForwardBackwardOutput as a ForwardBackwardJson."""
    message = pb.ForwardBackwardOutput.FromString(body)
    rows: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        parts = {name: _unbatched(tensor) for name, tensor in record.fields.items()}
        rows += [{name: _tensor_json(parts[name][index]) for name in parts} for index in range(record.num_datums)]
    return _strict_json(
        {
            "loss_fn_output_type": message.loss_fn_output_type,
            "loss_fn_outputs": rows,
            # Their parser takes no NaN.
            "metrics": {name: value for name, value in message.metrics.items() if np.isfinite(value)},
        }
    )


def _unbatched(message: pb.BatchedTensor) -> list[np.ndarray]:
    offsets = np.frombuffer(message.offsets, "<i8").tolist()
    return [
        np.frombuffer(message.data[start:end], "<f4").reshape(-1, *message.trailing_shape)
        for start, end in pairwise(offsets)
    ]


def _tensor_json(array: np.ndarray) -> dict[str, Any]:
    return {"data": _null_for_nan(array.ravel()), "dtype": "float32", "shape": list(array.shape)}


def sample_json(body: bytes) -> bytes:
    """A protobuf SampleResponse as a SampleJson."""
    message = pb.SampleResponse.FromString(body)
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop" if sequence.stop_reason == pb.STOP_REASON_STOP else "length",
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": _null_for_nan(np.frombuffer(sequence.logprobs, "<f4")),
            }
            for sequence in message.sequences
        ],
    }
    if message.HasField("prompt_logprobs"):
        answer["prompt_logprobs"] = _null_for_nan(np.frombuffer(message.prompt_logprobs, "<f4"))
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _topk_json(message.topk_prompt_logprobs)
    return _strict_json(answer)


def _topk_json(message: pb.TopkLogprobs) -> list[list[list[float]] | None]:
    """Per position [token, log probability] pairs; null where there are none."""
    shape = (message.length, message.k)
    ids = np.frombuffer(message.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(shape).tolist()
    rows = [
        [[token, value] for token, value in zip(*row, strict=True) if value > _TOPK_SENTINEL]
        for row in zip(ids, logprobs, strict=True)
    ]
    return [row or None for row in rows]


def _null_for_nan(values: np.ndarray) -> list[float | None]:
    """Their parser takes neither NaN nor an infinity."""
    return [value if np.isfinite(value) else None for value in values.tolist()]


def _strict_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
