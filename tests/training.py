"""Steps of training through the SDK, and what a server then holds."""

from pathlib import Path

import numpy as np
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.factories import MIXED, datum
from tests.servers import Server, sdk_datum
from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.inputs.rendering import Renderer

ADAM = types.AdamParams(learning_rate=3e-3)
PLACEHOLDER = 320
"""The tiny model's <|image_pad|>."""


def batch(renderer: Renderer, seed: int = 0) -> list[Datum]:
    return [datum(model_input, renderer, seed * 100 + i) for i, model_input in enumerate(MIXED.values())]


def step(
    client: tinker.TrainingClient, data: list[Datum], adam: types.AdamParams = ADAM
) -> types.ForwardBackwardOutput:
    """One training step; submits both before it awaits either, as recipes do."""
    forward_backward = client.forward_backward([sdk_datum(item) for item in data], "cross_entropy")
    optim_step = client.optim_step(adam)
    result = forward_backward.result()
    optim_step.result()
    return result


def logprobs_of(client: tinker.TrainingClient, data: list[Datum]) -> list[np.ndarray]:
    output = client.forward([sdk_datum(item) for item in data], "cross_entropy").result()
    return [np.array(row["logprobs"].tolist()) for row in output.loss_fn_outputs]


def rl_datum(prompt: list[int], drawn: types.SampledSequence, advantage: float) -> types.Datum:
    """A datum of a prompt and a sample; the prompt's tokens have no advantage."""
    tokens = [*prompt, *drawn.tokens]
    before, logprobs = np.zeros(len(prompt) - 1, np.float32), np.asarray(drawn.logprobs, np.float32)
    rows = {
        "target_tokens": np.asarray(tokens[1:]),
        "logprobs": np.concatenate([before, logprobs]),
        "advantages": np.concatenate([before, np.full_like(logprobs, advantage)]),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in rows.items()},
    )


def saved_adapter(server: Server, path: str) -> dict[str, torch.Tensor]:
    """The tensors of a tinker:// path on the server's disk."""
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    (found,) = Path(server.log.with_suffix("")).glob(f"checkpoints/{run_id}/{kind}/{name}*/adapter_model.safetensors")
    return load_file(found)
