"""Write caltech10.zip: ten classes of CalTech101 as small JPEG files.

    python examples/data/build.py DIRECTORY_WITH_TRAIN_AND_TEST_PARQUET

The directory holds `train-*.parquet` and `test-*.parquet` with the columns `image` (a struct with
JPEG `bytes`) and `label` (a ClassLabel), as `datasets.load_dataset("dpdl-benchmark/caltech101")`
keeps them. Train images come from its train split only, test images from its test split only.
The same parquet files give the same archive. Needs pyarrow and pillow.
"""

import hashlib
import io
import json
import random
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

CLASSES = [
    "airplanes",
    "bonsai",
    "car_side",
    "chandelier",
    "faces_easy",
    "hawksbill",
    "ketch",
    "leopards",
    "motorbikes",
    "watch",
]
PER_CLASS = {"train": 30, "test": 20}
SHORT_SIDE, QUALITY, SEED = 160, 85, 10
ZIP_DATE = (2020, 1, 1, 0, 0, 0)  # fixed, so that the archive is reproducible


def images_by_class(directory: Path, split: str) -> dict[str, list[bytes]]:
    """The JPEG bytes of one split, sorted within a class so that the draw does not hang on file order."""
    by_class: dict[str, list[bytes]] = {name: [] for name in CLASSES}
    for path in sorted(directory.glob(f"{split}-*.parquet")):
        table = pq.read_table(path)
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        names = features["label"]["names"]
        for row in table.to_pylist():
            name = names[row["label"]]
            if name in by_class:
                by_class[name].append(row["image"]["bytes"])
    return {name: sorted(images) for name, images in by_class.items()}


def small_jpeg(data: bytes) -> bytes:
    """The picture with its short side at most SHORT_SIDE; its colour mode stays (L or RGB)."""
    image: Image.Image = Image.open(io.BytesIO(data))
    scale = SHORT_SIDE / min(image.size)
    if scale < 1:
        width, height = (round(side * scale) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=QUALITY, optimize=True)
    return out.getvalue()


def main(source: Path, target: Path) -> None:
    drawn: set[str] = set()  # digests: a picture that the source holds twice is drawn once
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for split, count in PER_CLASS.items():
            for name, images in images_by_class(source, split).items():
                fresh = [i for i in images if hashlib.sha256(i).hexdigest() not in drawn]
                chosen = random.Random(f"{SEED}-{split}-{name}").sample(fresh, count)
                drawn.update(hashlib.sha256(i).hexdigest() for i in chosen)
                for number, data in enumerate(chosen):
                    entry = zipfile.ZipInfo(f"{split}/{name}/{number:04d}.jpg", ZIP_DATE)
                    archive.writestr(entry, small_jpeg(data))
    print(target, f"{target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parent / "caltech10.zip")
