"""What a family reads of a model's directory."""

from typing import Any

from transformers import AutoImageProcessor

from backends.protocol import BackendFailed


def image_processor(source: str) -> Any:
    """The one in the model's directory. Raises BackendFailed where there is none."""
    try:
        # Trainer and sampler must see the same pixels: those of the torchvision backend.
        return AutoImageProcessor.from_pretrained(source, backend="torchvision")
    except (OSError, ValueError) as error:
        raise BackendFailed(f"{source}: the model takes images but has no image processor: {error}") from None
