"""Datums that a loss cannot take, and what must follow when one is sent to the real server."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.servers import MODEL, sdk_datum
from tests.training import ADAM, batch, logprobs_of, step
from tinker_server.backends.inputs.rendering import Renderer

INPUT = [1, 2, 3, 4, 5]
Case = tuple[str, types.Datum, str]
"""A loss, a datum that it cannot take, and what the error must say."""


def bad(tokens: list[int] = INPUT, **inputs: np.ndarray | None) -> types.Datum:
    """Targets and nothing else, but for what is given; None leaves an input out."""
    arrays = {"target_tokens": np.zeros(len(tokens), np.int64)} | inputs
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(array) for name, array in arrays.items() if array is not None
        },
    )


def floats(*shape: int, fill: float = 0) -> np.ndarray:
    return np.full(shape, fill, np.float32)


def assert_each_fails_alone(service: tinker.ServiceClient, renderer: Renderer, cases: Iterable[Case]) -> None:
    """Behind a good datum, so that the index counts; the next step says so too, and the one after is as ever."""
    good = batch(renderer)
    client = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    neighbour = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    neighbours = neighbour.forward_backward([sdk_datum(item) for item in good], "cross_entropy")
    for loss_fn, datum, message in cases:
        first = sdk_datum(good[0]) if loss_fn == "cross_entropy" else complete(loss_fn)
        failing = client.forward_backward([first, datum], loss_fn)  # type: ignore[arg-type]
        stepping = client.optim_step(ADAM)
        with pytest.raises(tinker.RequestFailedError, match=message) as caught:
            failing.result()
        assert caught.value.category == "user"
        with pytest.raises(tinker.RequestFailedError, match="incomplete"):
            stepping.result()
    step(client, good)
    neighbours.result()
    neighbour.optim_step(ADAM).result()
    for one, other in zip(logprobs_of(client, good), logprobs_of(neighbour, good), strict=True):
        np.testing.assert_array_equal(one, other)


def complete(loss_fn: str) -> types.Datum:
    """Inputs of an RL loss."""
    inputs: dict[str, Any] = {"logprobs": floats(5, fill=-1), "advantages": floats(5, fill=1)}
    return bad(**inputs, sequence_ratio_mask=floats(5, fill=1) if loss_fn == "gspo" else None)
