"""Check that rotary embeddings depend on a token's own position alone: microbatches hold samples of many models.

For some rope types transformers rotates all tokens of a microbatch with other frequencies once its longest sample is
beyond the model's original length. The engine goes by the served context instead.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from tinker_server.backends.protocol import BackendFailed


def check_rotation(text_config: PretrainedConfig, context: int, source: str) -> None:
    """Raise BackendFailed if a sample within `context` tokens may change the rotation of others in its microbatch."""
    for parameters in _by_layer_type(text_config):
        rope_type = str(parameters.get("rope_type", "default"))
        original = _original_length(rope_type, parameters, text_config)
        if original is not None and context > original:
            raise BackendFailed(
                f"{source}: rope type {rope_type} is supported within the model's original length of {original} tokens"
                f" alone, and the context served would be {context}: beyond, one long datum would change the log"
                " probabilities of all others in its microbatch, and engine and trainer would differ on short texts;"
                f" set backend.max_context_length to {original} or less"
            )


def _by_layer_type(text_config: PretrainedConfig) -> list[Mapping[str, object]]:
    """Return the parameters of every kind of layer that has its own, or of all layers."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return [parameter for parameter in parameters.values() if isinstance(parameter, Mapping)] or [parameters]


def _original_length(rope_type: str, parameters: Mapping[str, Any], text_config: PretrainedConfig) -> int | None:
    """Return the tokens up to which all samples are rotated alike; None if they always are. As in transformers'
    `dynamic_rope_update`, dynamic types start from the config's own length, whatever else is named."""
    if rope_type == "longrope":
        return int(parameters.get("original_max_position_embeddings") or text_config.max_position_embeddings)
    return int(text_config.max_position_embeddings) if "dynamic" in rope_type else None
