"""Check that the fast training forward equals transformers' own: patches, tower, positions, logits.

python check.py MODEL_DIR ARCHIVE
"""

import sys
from pathlib import Path

import numpy as np
import torch
from conversation import Tokens, last_states, recipe_form
from data import load_photos, open_image
from model import image_grid
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration
from vision import BatchedVision


@torch.no_grad()
def largest_difference(model_dir: Path, archive: Path) -> tuple[float, float]:
    """Return the largest differences between the two, of merged vision features and of logits, in float32."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(model_dir)
    tokens = Tokens(AutoTokenizer.from_pretrained(model_dir))
    photos = load_photos(archive, 4)
    first = open_image(photos.encoded[0])
    grid = image_grid(first.height, first.width)
    size = (grid[1] * 32, grid[0] * 32)
    # Already of the processor's size, so that it does not resize and both see the same pixels.
    images = [open_image(encoded).resize(size) for encoded in photos.encoded]
    processed = processor(images=images, return_tensors="pt")
    assert processed["image_grid_thw"].tolist() == [[1, grid[0] * 2, grid[1] * 2]] * len(images)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float()
    features = BatchedVision(model.model.visual, torch.float32)(pixels)
    own = model.model.visual(processed["pixel_values"], processed["image_grid_thw"])
    vision_gap = (own.pooler_output - features.merged_BTO.flatten(0, 1)).abs().max()

    names = [photos.names[label] for label in photos.labels]
    inputs, targets = tokens.about_images([recipe_form(name) for name in names], [grid] * 4)
    fast = model.lm_head(last_states(model, inputs, features.flat(), [grid] * 4, len(tokens.before_image)))
    whole = model(
        input_ids=inputs,
        pixel_values=processed["pixel_values"],
        image_grid_thw=processed["image_grid_thw"],
        mm_token_type_ids=(inputs == tokens.image).int(),
    ).logits
    return float(vision_gap), float((fast - whole)[targets >= 0].abs().max())


if __name__ == "__main__":
    gaps = largest_difference(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"largest difference: vision {gaps[0]:.1e}, logits {gaps[1]:.1e}")
    sys.exit(max(gaps) > 1e-3)
