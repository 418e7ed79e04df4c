"""The pictures of the documentation: which there are, and how they are written as small files."""

import io
from pathlib import Path

from PIL import Image

DOCUMENTED = ("answers", "playground", "run", "runs", "samples", "scrubbing")
"""Files of `docs/pictures`."""
COLOURS, MOST_BYTES = (256, 128, 64, 32), 150_000


def write(screenshot: bytes, path: Path) -> None:
    """Write a PNG of few colours, which takes a third of the bytes; of fewer if it is still large."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    for colours in COLOURS:
        image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= MOST_BYTES:
            return
    raise ValueError(f"{path.name} has {path.stat().st_size} bytes; allowed are {MOST_BYTES}: show less of the page")
