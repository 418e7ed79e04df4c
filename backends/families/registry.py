"""Which family a model belongs to, by its config alone."""

from collections.abc import Callable

from transformers import PretrainedConfig

from backends.families import internvl, qwen3_vl, smolvlm, text
from backends.families.family import Family
from backends.protocol import BackendFailed

SEEING: dict[str, Callable[[PretrainedConfig, str], Family]] = {
    **dict.fromkeys(qwen3_vl.ARCHITECTURES, qwen3_vl.Qwen3VL),
    **dict.fromkeys(internvl.ARCHITECTURES, internvl.InternVL),
    **dict.fromkeys(smolvlm.ARCHITECTURES, smolvlm.SmolVLM),
}
"""Families that take images, by the architecture that a model's config names."""
_REASONS = {
    "Gemma3ForConditionalGeneration": "tokens of one image attend to each other in both directions, which vLLM on the"
    " CPU and the trainer's attention on CUDA would leave out without an error",
}
"""Why others that take images are not among them."""


def find_family(config: PretrainedConfig, source: str) -> Family:
    """The family of the model in the directory `source`. Raises BackendFailed for one that none of ours covers."""
    if getattr(config, "quantization_config", None) is not None:
        raise BackendFailed(f"{source}: quantised weights are not supported; serve the model in bfloat16 or float32")
    (architecture, *_) = config.architectures or [""]
    if architecture in SEEING:
        return SEEING[architecture](config, source)
    if architecture in _REASONS:
        raise BackendFailed(f"{source}: {architecture} is not supported: {_REASONS[architecture]}")
    if any("vision" in key or "audio" in key for key in config.sub_configs):
        raise BackendFailed(f"{source}: {architecture} is not supported; models that take images: {', '.join(SEEING)}")
    if architecture in text.REFUSED:
        raise BackendFailed(f"{source}: {architecture} is not supported: {text.REFUSED[architecture]}")
    if architecture in text.WITHOUT_MIXED_WINDOWS and len(set(config.layer_types)) > 1:
        raise BackendFailed(
            f"{source}: {architecture} with sliding windows in some of its layers (use_sliding_window in its config) is"
            " not supported: the engine would leave the windows out"
        )
    return text.Text(architecture)
