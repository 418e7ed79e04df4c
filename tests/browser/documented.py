"""The pictures of the documentation: which there are, and how they are written as small files."""

import io
from pathlib import Path

from PIL import Image

DOCUMENTED = ("answers", "playground", "run", "runs", "samples", "scrubbing")
"""Files of `docs/pictures`."""
MOST_COLOURS, MOST_BYTES = 256, 150_000


def write(screenshot: bytes, path: Path) -> None:
    """Write a PNG of few colours, which takes a third of the bytes."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(MOST_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
