"""The JSON forms of results that are kept as protobuf, for clients that take none; `wire.py` writes them."""

from typing import Literal

from api_schemas.base import Response


class TensorJson(Response):
    """float32, row-major; null stands for what is not finite."""

    data: list[float | None]
    """The values, row by row."""
    dtype: Literal["float32"]
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
