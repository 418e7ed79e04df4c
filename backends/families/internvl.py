"""InternVL in transformers' own form.

P tiles, S pixels of a tile's side, N tokens of an image
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

from tinker_server.backends.families.family import EngineField, ImageSpan
from tinker_server.backends.families.processors import ImageProcessor
from tinker_server.backends.families.tiles import Tiled, TileTower, tiles_bytes, token_ids
from tinker_server.backends.protocol import BackendFailed

ARCHITECTURES = ("InternVLForConditionalGeneration",)
BEGIN, END, CONTEXT = "<img>", "</img>", "<IMG_CONTEXT>"


class InternVL(Tiled):
    """`Family` of InternVL with a dense decoder: text and images; no video."""

    frozen: Sequence[str] = ("model.vision_tower", "model.multi_modal_projector")

    def __init__(self, config: PretrainedConfig, source: str) -> None:
        """`source` is the model's directory. Raises BackendFailed if it has no image processor, or another tower than
        the engine's."""
        taken = config.vision_feature_layer, config.vision_feature_select_strategy
        if taken != (-1, "default"):
            raise BackendFailed(
                f"{source}: the engine takes an image's features from the tower's last layer, not {taken}"
            )
        ids = token_ids(source, (BEGIN, END, CONTEXT), config.image_token_id)
        self.vision = InternVLVision(source, ids, config.image_seq_length)
        self.placeholders: Mapping[int, str] = {number: name for name, number in ids.items()}


class InternVLVision:
    """`Vision`: tiles of the image, then the whole image as a tile, between marks of begin and end."""

    lora = None
    is_divided = False
    engine_fields: Mapping[str, EngineField] = {
        "pixel_values": EngineField(),
        "image_num_patches": EngineField(one_row_each=True, stays_on_cpu=True),
        "image_token_id": EngineField(one_row_each=True, stays_on_cpu=True),
    }

    def __init__(self, source: str, ids: Mapping[str, int], tile_tokens: int) -> None:
        # The model's own processor asks for tiles, whatever the image processor's file says.
        self._processor = ImageProcessor(source, crop_to_patches=True)
        self.normalise = self._processor.normalise
        self._begin, self._end = ids[BEGIN], ids[END]
        self.placeholder_id = self.feature_id = ids[CONTEXT]
        self._tile_tokens = tile_tokens

    def engine_options(self, max_images: int) -> dict[str, object]:
        """Limit images, and allow no video."""
        return {"limit_mm_per_prompt": {"image": max_images, "video": 0}}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles, by the processor's own rule."""
        own = self._processor.own
        sides = own.size["height"], own.size["width"]
        columns, rows = get_optimal_tiled_canvas((height, width), sides, own.min_patches, own.max_patches)
        return rows, columns

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return the tokens of all tiles, and the two marks."""
        return self._num_tiles(grid) * self._tile_tokens + 2

    def _num_tiles(self, grid: tuple[int, int]) -> int:
        """Count the tiles; if there are several, the whole image is a further tile."""
        num_tiles = grid[0] * grid[1]
        return num_tiles + 1 if num_tiles > 1 else 1

    def image_ids(self, span: ImageSpan) -> np.ndarray:
        """Implement `Vision.image_ids`."""
        return np.array([self._begin, *[self.feature_id] * (span.num_tokens - 2), self._end])

    def process(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Return pixel_values [P, 3, S, S], and the engine's description of them."""
        tiles_P3SS = self._processor(rgb)["pixel_values"]
        return {"pixel_values": tiles_P3SS, **self._describe_tiles(len(tiles_P3SS))}

    def size_bytes(self, grid: tuple[int, int]) -> int:
        """Return the bytes of all tiles."""
        size = self._processor.own.size
        return tiles_bytes(self._num_tiles(grid), size["height"], size["width"])

    def sizes_of_image(self, span: ImageSpan) -> dict[str, Tensor]:
        """Return the engine's description of the tiles."""
        return self._describe_tiles(self._num_tiles(span.grid))

    def _describe_tiles(self, num_tiles: int) -> dict[str, Tensor]:
        return {"image_num_patches": torch.tensor([num_tiles]), "image_token_id": torch.tensor([self.feature_id])}

    def tower(self, model: PreTrainedModel, dtype: torch.dtype) -> TileTower:
        """Return tower and projector."""
        return TileTower(model, partial(self.normalise, dtype=dtype))
