"""Gemma 3 with images; inside vLLM (`engine`) the head of Gemma 2.

An image's features see each other in both directions, in layers with a window too; all else is causal.

S pixels of an image's side, N tokens of an image, F of them features
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from tinker_server.backends.families.family import EngineField, ImageSpan
from tinker_server.backends.families.processors import ImageProcessor
from tinker_server.backends.families.tiles import Tiled, TileTower, tiles_bytes, token_ids
from tinker_server.backends.patches import Patch
from tinker_server.backends.protocol import BackendFailed

ARCHITECTURES = ("Gemma3ForConditionalGeneration",)
BEGIN, END, FEATURE = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
GEMMA2_HEAD = Patch(
    "gemma2-head",
    "vllm.model_executor.models.gemma2:Gemma2ForCausalLM.__init__",
    "b38f2be259a0573b0c336af62dd9542ec68a3b8afb96358e7b58562857c93088",
    "Gemma 2 has no module for its head, whose weight is the embeddings', and so no adapters there.",
)


class Gemma3(Tiled):
    """`Family` of Gemma 3 with images: text and images, each image whole."""

    sees_whole_images = True
    frozen: Sequence[str] = ("model.vision_tower", "model.multi_modal_projector")

    def __init__(self, config: PretrainedConfig, source: str) -> None:
        """`source` is the model's directory. Raises BackendFailed if it has no image processor, or a processor that
        crops images, or a tower or windows with which the engine's numbers would be others."""
        ids = token_ids(source, (BEGIN, END, FEATURE), config.image_token_id)
        self.placeholders: Mapping[int, str] = {number: name for name, number in ids.items()}
        _require_windows(config, source)
        self.vision = Gemma3Vision(source, config, ids)


class Gemma3Vision:
    """`Vision`: all images have the same size, and as many features."""

    lora = None
    is_divided = True
    engine_fields: Mapping[str, EngineField] = {
        "pixel_values": EngineField(),
        "num_patches": EngineField(one_row_each=True, stays_on_cpu=True),
    }

    def __init__(self, source: str, config: PretrainedConfig, ids: Mapping[str, int]) -> None:
        self._processor = ImageProcessor(source, do_pan_and_scan=False)
        self.normalise = self._processor.normalise
        own, seen = self._processor.own, config.vision_config
        self._side: int = seen.image_size
        if own.do_pan_and_scan:
            raise BackendFailed(
                f"{source}: its image processor also cuts images into crops (do_pan_and_scan), which is not supported;"
                " set do_pan_and_scan to false in its preprocessor_config.json"
            )
        if (own.size.height, own.size.width) != (self._side, self._side):
            raise BackendFailed(
                f"{source}: its image processor makes images of {own.size.width} x {own.size.height} pixels, its vision"
                f" tower sees {self._side} x {self._side}"
            )
        if getattr(seen, "vision_use_head", True):
            raise BackendFailed(
                f"{source}: a vision tower with a head of its own (vision_use_head in its config) is not supported: the"
                " engine would take the head's output for the tower's"
            )
        side = math.isqrt(config.mm_tokens_per_image)
        if side**2 != config.mm_tokens_per_image or self._side // seen.patch_size % side:
            raise BackendFailed(
                f"{source}: {config.mm_tokens_per_image} tokens of an image (mm_tokens_per_image in its config) are no"
                f" square that divides the {(self._side // seen.patch_size) ** 2} patches of its vision tower"
            )
        self.placeholder_id, self.feature_id = ids[BEGIN], ids[FEATURE]
        # As transformers' processor writes an image.
        text = f"\n\n{BEGIN}{FEATURE * config.mm_tokens_per_image}{END}\n\n"
        self._ids_N = np.array(AutoTokenizer.from_pretrained(source).encode(text, add_special_tokens=False))

    def engine_options(self, max_images: int) -> dict[str, object]:
        """Limit images, and compute none of them in parts: its tokens see those behind them."""
        return {"limit_mm_per_prompt": {"image": max_images}, "disable_chunked_mm_input": True}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (1, 1): one image, whatever its size."""
        return 1, 1

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return the number of the features, and of the tokens around them."""
        return len(self._ids_N)

    def image_ids(self, span: ImageSpan) -> np.ndarray:
        """Implement `Vision.image_ids`."""
        return self._ids_N

    def process(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Return pixel_values [1, 3, S, S], and num_patches [1] for the engine."""
        return {"pixel_values": self._processor(rgb)["pixel_values"], "num_patches": torch.tensor([1])}

    def size_bytes(self, grid: tuple[int, int]) -> int:
        """Return the bytes of an image."""
        return tiles_bytes(1, self._side, self._side)

    def sizes_of_image(self, span: ImageSpan) -> dict[str, Tensor]:
        """Return num_patches [1]."""
        return {"num_patches": torch.tensor([1])}

    def tower(self, model: PreTrainedModel, dtype: torch.dtype) -> TileTower:
        """Return tower and projector."""
        return TileTower(model, partial(self.normalise, dtype=dtype))


def _require_windows(config: PretrainedConfig, source: str) -> None:
    """Raise BackendFailed for windows shorter than an image: transformers hides an image's tokens from each other
    beyond the window, and the engine then has the whole image causal."""
    text = config.get_text_config()
    if text.sliding_window is not None and text.sliding_window < config.mm_tokens_per_image:
        raise BackendFailed(
            f"{source}: a sliding_window of {text.sliding_window} tokens, shorter than the"
            f" {config.mm_tokens_per_image} of an image (mm_tokens_per_image), is not supported: the engine would not"
            " let an image's tokens see each other"
        )
