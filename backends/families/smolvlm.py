"""SmolVLM, SmolVLM2 and Idefics3, which take images alike.

P tiles, S pixels of a tile's side, N tokens of an image
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.models.idefics3.image_processing_idefics3 import get_resize_output_image_size

from tinker_server.backends.families.family import EngineField, ImageSpan
from tinker_server.backends.families.processors import ImageProcessor
from tinker_server.backends.families.tiles import Tiled, TileTower, tiles_bytes, token_ids
from tinker_server.backends.protocol import BackendFailed

ARCHITECTURES = ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")
AROUND, WHOLE, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


class SmolVLM(Tiled):
    """`Family` of SmolVLM, SmolVLM2 and Idefics3: text and images; no video."""

    frozen: Sequence[str] = ("model.vision_model", "model.connector")

    def __init__(self, config: PretrainedConfig, source: str) -> None:
        """`source` is the model's directory. Raises BackendFailed if it has no image processor."""
        self.vision = SmolVLMVision(source, config)
        ids = token_ids(source, (AROUND, WHOLE, IMAGE), config.image_token_id)
        self.placeholders: Mapping[int, str] = {number: name for name, number in ids.items()}


class SmolVLMVision:
    """`Vision`: rows of tiles, each with its row and column in text, then the whole image as a tile."""

    lora = None
    is_divided = True
    engine_fields: Mapping[str, EngineField] = {
        "pixel_values": EngineField(),
        "pixel_attention_mask": EngineField(),
        "num_patches": EngineField(one_row_each=True, stays_on_cpu=True),
    }

    def __init__(self, source: str, config: PretrainedConfig) -> None:
        # All tiles have the same size: there is nothing to pad.
        self._processor = ImageProcessor(source, do_pad=False)
        self.normalise = self._processor.normalise
        self._tokenizer = AutoTokenizer.from_pretrained(source)
        self.placeholder_id = self.feature_id = config.image_token_id
        seen = config.vision_config
        self._tile_tokens = (seen.image_size // seen.patch_size) ** 2 // config.scale_factor**2
        self._side: int = self._processor.own.max_image_size["longest_edge"]
        if self._side != seen.image_size:
            raise BackendFailed(
                f"{source}: its image processor makes tiles of {self._side} pixels, its vision tower sees"
                f" {seen.image_size}"
            )
        self._layouts: dict[tuple[int, int], np.ndarray] = {}
        self._lock = Lock()

    def engine_options(self, max_images: int) -> dict[str, object]:
        """Limit images."""
        return {"limit_mm_per_prompt": {"image": max_images}}

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tiles beside the whole image, by the processor's own rule; (0, 0): there are
        none."""
        own = self._processor.own
        if not own.do_image_splitting:
            return 0, 0
        if own.do_resize:
            # It reads only an image's shape.
            height, width = get_resize_output_image_size(
                torch.empty(height, width, device="meta"), own.size["longest_edge"]
            )
        ratio = width / height
        if width >= height:
            width = self._round(width)
            height = self._round(int(width / ratio))
        else:
            height = self._round(height)
            width = self._round(int(height * ratio))
        rows, columns = height // self._side, width // self._side
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def _round(self, length: int) -> int:
        return math.ceil(length / self._side) * self._side

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return the tokens of all tiles, and those around them."""
        return len(self._layout(grid))

    def image_ids(self, span: ImageSpan) -> np.ndarray:
        """Implement `Vision.image_ids`."""
        return self._layout(span.grid)

    def _layout(self, grid: tuple[int, int]) -> np.ndarray:
        """Return [N] int64, from the model's own processor's text by its tokenizer."""
        with self._lock:  # encoding changes a tokenizer's settings
            if grid not in self._layouts:
                text = self._text(grid)
                self._layouts[grid] = np.array(self._tokenizer.encode(text, add_special_tokens=False))
            return self._layouts[grid]

    def _text(self, grid: tuple[int, int]) -> str:
        rows, columns = grid
        tile: str = IMAGE * self._tile_tokens
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        return "".join(f"{line}\n" for line in lines) + ("\n" if lines else "") + AROUND + WHOLE + tile + AROUND

    def process(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Return pixel_values [P, 3, S, S], and for the engine pixel_attention_mask [P, S, S], all true, and
        num_patches [1]."""
        tiles_P3SS = self._processor(rgb)["pixel_values"]
        mask_PSS = torch.ones(len(tiles_P3SS), *tiles_P3SS.shape[2:], dtype=torch.bool)
        return {
            "pixel_values": tiles_P3SS,
            "pixel_attention_mask": mask_PSS,
            "num_patches": torch.tensor([len(tiles_P3SS)]),
        }

    def size_bytes(self, grid: tuple[int, int]) -> int:
        """Return the bytes of all tiles."""
        return tiles_bytes(self._num_tiles(grid), self._side, self._side)

    def _num_tiles(self, grid: tuple[int, int]) -> int:
        """Count the tiles; the last is the whole image."""
        return grid[0] * grid[1] + 1

    def sizes_of_image(self, span: ImageSpan) -> dict[str, Tensor]:
        """Return num_patches [1]."""
        return {"num_patches": torch.tensor([self._num_tiles(span.grid)])}

    def tower(self, model: PreTrainedModel, dtype: torch.dtype) -> TileTower:
        """Return tower and connector."""
        return TileTower(model, partial(self.normalise, dtype=dtype), has_samples=True)
