"""The work of every SDK, as JSON: the same numbers in every version's own types."""

import base64
from typing import Any

import numpy as np

from tests.factories import MIXED, VOCAB, as_text, datum
from tests.servers import MODEL
from tinker_server.api_schemas.inputs import Datum, ImageChunk, ModelInput
from tinker_server.backends.inputs.rendering import Renderer

NUM_SMALL = 1100
"""More datums than any version sends in one request (1024 at most)."""


def work(renderer: Renderer) -> dict[str, Any]:
    """Three batches: text and images, soft targets over two tokens each, and many small datums."""
    mixed = [_datum(datum(one, renderer, seed), renderer) for seed, one in enumerate(MIXED.values())]
    soft = [_datum(datum(one, renderer, 10 + seed, k=2), renderer) for seed, one in enumerate(MIXED.values())]
    random = np.random.default_rng(3)
    small = [
        {
            "chunks": [{"tokens": random.integers(0, VOCAB, 4).tolist()}],
            "targets": random.integers(0, VOCAB, 4).tolist(),
            "weights": [1 / NUM_SMALL] * 4,
        }
        for _ in range(NUM_SMALL)
    ]
    prompts = [_chunks(MIXED[name], renderer) for name in ("text", "one image", "three images of different sizes")]
    return {"model": MODEL, "rank": 8, "seed": 5, "batches": [mixed, soft, small], "prompts": prompts}


def _datum(one: Datum, renderer: Renderer) -> dict[str, Any]:
    return {
        "chunks": _chunks(one.model_input, renderer),
        "targets": one.loss_fn_inputs["target_tokens"].tolist(),
        "weights": one.loss_fn_inputs["weights"].tolist(),
    }


def _chunks(model_input: ModelInput, renderer: Renderer) -> list[dict[str, Any]]:
    """Every other image says how many tokens it takes, the rest leave it to the server."""
    chunks: list[dict[str, Any]] = []
    for number, chunk in enumerate(model_input.chunks):
        if isinstance(chunk, ImageChunk):
            length, _ = renderer.layout(ModelInput(chunks=[chunk]), "prompt")
            png = base64.b64encode(chunk.data).decode()
            chunks.append({"png": png, "expected_tokens": None if number % 2 else length})
        else:
            chunks.append({"tokens": as_text(chunk).tokens.tolist()})
    return chunks
