"""Weights in fp8 are dequantised as vLLM reads them, by the trainer's own function: its own fp8 rounds activations too,
and has no path on the CPU."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from backends.formats.block_fp8 import in_full_precision
from backends.sampler.vllm_patches import targets

Weights = Iterator[tuple[str, Tensor]]


def _dequantising(read: Callable[..., Weights]) -> Callable[..., Weights]:
    def get_all_weights(self: DefaultModelLoader, model_config: ModelConfig, model: nn.Module) -> Weights:
        return in_full_precision(read(self, model_config, model), model_config.dtype)

    return get_all_weights


def dequantise_fp8() -> None:
    """Apply the change, once, before a model is loaded."""
    targets.READ_WEIGHTS.replace(_dequantising(DefaultModelLoader.get_all_weights))
