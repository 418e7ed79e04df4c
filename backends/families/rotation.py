"""Whether a token is turned by its own position alone: rows hold samples of many lengths, of many models.

transformers turns all tokens of a row by other frequencies once the row's longest sample is beyond the length that the
model was first trained for, where the config's rope type says so. The engine goes by the context it serves instead.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from backends.protocol import BackendFailed


def check_rotation(text_config: PretrainedConfig, context: int, source: str) -> None:
    """Raises BackendFailed where a sample within `context` tokens may change how others of its row are turned."""
    for parameters in _of_layers(text_config):
        rope_type = str(parameters.get("rope_type", "default"))
        original = _original_length(rope_type, parameters, text_config)
        if original is not None and context > original:
            raise BackendFailed(
                f"{source}: rope type {rope_type} is supported within the model's original length of {original} tokens"
                f" alone, and the context served would be {context}: beyond, one long datum would change the log"
                " probabilities of all others in its row, and of short texts engine and trainer would differ; set"
                f" backend.max_context_length to {original} or less"
            )


def _of_layers(text_config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """The parameters of every kind of layer that has its own, or of all layers."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    return [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]


def _original_length(rope_type: str, parameters: Mapping[str, Any], text_config: PretrainedConfig) -> int | None:
    """Tokens up to which all samples are turned alike; None where they always are. As transformers'
    `dynamic_rope_update` has it: dynamic types start from the config's own length, whatever else is named."""
    if rope_type == "longrope":
        return int(parameters.get("original_max_position_embeddings") or text_config.max_position_embeddings)
    return int(text_config.max_position_embeddings) if "dynamic" in rope_type else None
