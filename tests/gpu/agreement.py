"""Distance of trainer and sampler of a server, in bfloat16; and settings of both on CUDA.

The bounds are twice what vLLM and transformers differ by on one H200 with random models.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.factories import as_text, datum, prompt, words
from tests.servers import sdk_input
from tests.trainers import trainer
from tests.training import logprobs_of
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence
from tinker_server.backends.model_spec import Placement
from tinker_server.backends.trainer.rank import TrainerRank

MEAN, LARGEST = 0.03, 0.2
ON_CUDA: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "placement": Placement(sampler_fraction=0.2),
    "kv_cache_bytes": 1 << 30,
}
"""Settings of a sampler beside a trainer in the test's own process."""


TEXTS = {f"{length} words": prompt(words(length, length)) for length in (5, 11, 23, 300)}


def share_kernels(scratch_dir: Path) -> Path:
    """A server's scratch directory with the kernels that this user has compiled before: a first start compiles for
    minutes."""
    for name, compiled in {"triton": Path.home() / ".triton/cache", "vllm": Path.home() / ".cache/vllm"}.items():
        compiled.mkdir(parents=True, exist_ok=True)
        (scratch_dir / "compiled").mkdir(parents=True, exist_ok=True)
        (scratch_dir / "compiled" / name).symlink_to(compiled)
    return scratch_dir


def scoring_datum(model_input, renderer):
    """Targets are the input's own next tokens."""
    ids = renderer.render(model_input, "prompt").token_ids_T
    item = datum(model_input, renderer)
    weights = np.zeros(len(ids), np.float32)
    return type(item)(
        model_input=model_input, loss_fn_inputs={"target_tokens": np.append(ids[1:], 0), "weights": weights}
    )


def differences(client, sampler, inputs, renderer) -> np.ndarray:
    """Absolute, nats, of all text positions."""
    futures = [sampler.compute_logprobs(sdk_input(one)) for one in inputs]
    items = [scoring_datum(one, renderer) for one in inputs]
    return np.concatenate(
        [
            of_text(item, future.result(), row, renderer)
            for item, row, future in zip(items, logprobs_of(client, items), futures, strict=True)
        ]
    )


def of_text(item, scored, row, renderer) -> np.ndarray:
    """Absolute, nats, of one datum's text positions: a sampler's prompt scores and a trainer's log probabilities."""
    is_text = np.ones(len(row), bool)
    for span in renderer.render(item.model_input, "prompt").spans:  # an image's tokens, with those around it
        is_text[span.offset : span.offset + span.num_tokens] = False
    distances: np.ndarray = np.abs(np.asarray(scored[1:]) - row[:-1])[is_text[1:]]
    return distances


def assert_close(what: str, found: np.ndarray, *, times: float = 1) -> None:
    """Check distances of trainer and sampler, absolute, nats. Rounding sends a token of a mixture to another expert:
    not wrong, but far. `times`: so many times the bounds."""
    print(f"{what}: mean {found.mean():.4f}, max {found.max():.4f} nats over {len(found)} tokens")
    assert found.mean() < times * MEAN
    assert np.quantile(found, 0.95) < times * LARGEST


def on_cuda(source: Path, dtype: Literal["float32", "bfloat16"], **others: Any) -> TrainerRank:
    return trainer(source, device="cuda", dtype=dtype, **others)


def drawn_datum(text: ModelInput, sequence: SampledSequence) -> Datum:
    """A text and what was drawn after it."""
    ids = np.concatenate([as_text(text.chunks[0]).tokens, sequence.tokens])
    targets = {"target_tokens": ids[1:].astype(np.int64), "weights": np.ones(len(ids) - 1, np.float32)}
    return Datum(model_input=prompt(EncodedTextChunk(tokens=ids[:-1].astype(np.int32))), loss_fn_inputs=targets)
