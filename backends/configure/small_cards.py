"""Engine steps that fit a GPU of 24 GiB and less. Larger GPUs have steps that keep them busy."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinker_server.backends.config import BackendConfig
from tinker_server.backends.model_spec import ENGINE_TOKENS, Device

_SMALL_BYTES = 28 << 30
"""GPUs with less memory are small: below this lie cards of 24 GiB, above it those of 32."""
LARGEST_IMAGE_TOKENS = 16384
"""Tokens of the largest image that an engine computes at its start, whatever its steps: the most of all published
image processors."""


@dataclass(frozen=True)
class EngineSteps:
    """The most that an engine computes in a step."""

    tokens: int
    sequences: int


_SMALL = EngineSteps(tokens=2048, sequences=64)


def engine_steps(config: BackendConfig, device: Device, gpu_bytes: Sequence[int]) -> EngineSteps:
    """Return the steps of engines on GPUs of this usable memory: smaller if all of the GPUs are small. A number of
    sequences that is set stays."""
    if device == "cuda" and max(gpu_bytes) < _SMALL_BYTES:
        return EngineSteps(_SMALL.tokens, config.max_concurrent_samples or _SMALL.sequences)
    return EngineSteps(ENGINE_TOKENS, config.samples_at_once)
