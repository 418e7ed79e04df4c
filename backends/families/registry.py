"""Find a model's family by its config alone, and its parser of tool calls by its chat template."""

from collections.abc import Callable

from transformers import PretrainedConfig

from tinker_server.backends.families import deepseek_v3, gemma, gpt_oss, internvl, nemotron_h, qwen, smolvlm, text
from tinker_server.backends.families.family import Family
from tinker_server.backends.formats import block_fp8
from tinker_server.backends.formats.model_files import quantisation
from tinker_server.backends.protocol import BackendFailed

WITH_IMAGES: dict[str, Callable[[PretrainedConfig, str], Family]] = {
    **dict.fromkeys(qwen.ARCHITECTURES, qwen.Qwen3VL),
    **dict.fromkeys(internvl.ARCHITECTURES, internvl.InternVL),
    **dict.fromkeys(smolvlm.ARCHITECTURES, smolvlm.SmolVLM),
    **dict.fromkeys(gemma.ARCHITECTURES, gemma.Gemma3),
}
"""Families that take images, by the architecture named in a model's config."""
PATCHES = (gpt_oss.EXPERTS, nemotron_h.MIXER)
"""What families change in transformers, or rely on."""
ENGINE_PATCHES = (gemma.GEMMA2_HEAD, gpt_oss.ENGINE_EXPERTS, gpt_oss.ENGINE_WEIGHTS, deepseek_v3.LATENT_NORMS)
"""What families change in vLLM, or rely on."""
_TOOL_PARSERS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
}
"""Text that a template tells its model to write, and vLLM's name of the parser of it; the first that fits."""


def find_family(config: PretrainedConfig, source: str) -> Family:
    """Return the family of the model in the directory `source`. Raises BackendFailed for a model that none covers."""
    (architecture, *_) = config.architectures or [""]
    if (quantised := quantisation(config)) is not None and architecture != gpt_oss.ARCHITECTURE:
        block_fp8.require_known(quantised, source)
    _require_known_windows(config, architecture, source)
    if architecture in WITH_IMAGES:
        return WITH_IMAGES[architecture](config, source)
    if any("vision" in key or "audio" in key for key in config.sub_configs):
        raise BackendFailed(
            f"{source}: {architecture} is not supported; models that take images: {', '.join(WITH_IMAGES)}"
        )
    for kind in (gpt_oss, deepseek_v3, nemotron_h):
        if architecture == kind.ARCHITECTURE:
            kind.require_known(config, source)
    return text.Text(architecture)


def _require_known_windows(config: PretrainedConfig, architecture: str, source: str) -> None:
    """Raise BackendFailed if some layers have a window and the engine is not known to tell layers apart."""
    text_config = config.get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if len(kinds) > 1 and "sliding_attention" in kinds and text_config.model_type not in text.WITH_MIXED_WINDOWS:
        raise BackendFailed(
            f"{source}: {architecture} with sliding windows in some of its layers (layer_types, use_sliding_window and"
            " max_window_layers in its config) is not supported: the engine has one window for all layers, or none, of"
            f" {text_config.model_type}; it tells layers apart of {', '.join(text.WITH_MIXED_WINDOWS)}"
        )


def tool_parser(chat_template: str | None) -> str | None:
    """Return vLLM's name of the parser of tool calls; None if the template teaches no calls that any of them reads."""
    fitting = [name for mark, name in _TOOL_PARSERS.items() if mark in (chat_template or "")]
    return next(iter(fitting), None)
