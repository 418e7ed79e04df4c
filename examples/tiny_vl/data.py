"""CalTech101 as two small archives, the images of an archive as one tensor, and photographs held out.

    python data.py PARQUET_DIR OUT_DIR

Independent of the model. The parquet files hold the columns `image` (JPEG bytes) and `label`.
The train archive keeps the JPEG bytes; the test archive may be re-encoded, for it has to travel with the rest.
Needs pyarrow for the conversion only.
"""

import argparse
import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

DEMO_CLASSES = (
    "airplanes",
    "motorbikes",
    "faces easy",
    "watch",
    "leopards",
    "bonsai",
    "car side",
    "ketch",
    "chandelier",
    "hawksbill",
)
"""Classes that the demo teaches. The model is trained on their photographs, never on their labels."""
CANVAS = 256  # every image is stored as a square of this side; crops undo the distortion
TEST_QUALITY = 60  # WebP
UNNAMED = -1  # label of a picture without one
HELD_OUT_EVERY = 10  # of the photographs of a class: 3 of 30


@dataclass(frozen=True)
class Photos:
    encoded: list[bytes]
    labels: list[int]
    names: list[str]
    """The class names as they are spoken, by label."""

    def label_tensor(self) -> torch.Tensor:
        return torch.tensor(self.labels)

    def chosen(self, indices: list[int]) -> "Photos":
        return Photos([self.encoded[i] for i in indices], [self.labels[i] for i in indices], self.names)


@dataclass(frozen=True)
class Canvases:
    """Decoded photographs, squeezed to squares. Legend: N photographs."""

    pixels_N3HW: torch.Tensor
    """uint8."""
    sizes_N2: torch.Tensor
    """Height and width before the squeeze."""


def open_image(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def load_photos(archive: Path, limit: int | None = None) -> Photos:
    """The photographs of one archive; `limit` takes the first of its shuffled rows."""
    with zipfile.ZipFile(archive) as source:
        names = json.loads(source.read("classes.json"))
        members = sorted(name for name in source.namelist() if name != "classes.json")[:limit]
        encoded = [source.read(name) for name in members]
    return Photos(encoded, [int(Path(name).stem.split("-", 1)[1]) for name in members], names)


def hold_out(photos: Photos, every: int = HELD_OUT_EVERY) -> tuple[Photos, Photos]:
    """Split train photographs into those to train on and those to judge by, as `through_server.py` does."""
    seen: dict[int, int] = {}
    parts: tuple[list[int], list[int]] = [], []
    for i, label in enumerate(photos.labels):
        seen[label] = seen.get(label, 0) + 1
        parts[seen[label] % every == 0].append(i)
    kept, aside = (photos.chosen(part) for part in parts)
    return kept, aside


def load_canvases(photos: Photos, device: torch.device) -> Canvases:
    def decode(encoded: bytes) -> tuple[np.ndarray, tuple[int, int]]:
        image = open_image(encoded)
        square = image.resize((CANVAS, CANVAS), Image.Resampling.BICUBIC)
        return np.asarray(square), (image.height, image.width)

    with ThreadPoolExecutor() as pool:
        decoded = list(pool.map(decode, photos.encoded))
    pixels = torch.from_numpy(np.stack([pixels for pixels, _ in decoded])).permute(0, 3, 1, 2).contiguous()
    return Canvases(pixels.to(device), torch.tensor([size for _, size in decoded], device=device))


def joined(first: Canvases, second: Canvases) -> Canvases:
    pixels = torch.cat([first.pixels_N3HW, second.pixels_N3HW])
    return Canvases(pixels, torch.cat([first.sizes_N2, second.sizes_N2]))


def write_classes(archive: zipfile.ZipFile, names: list[str]) -> None:
    archive.writestr("classes.json", json.dumps(names))


def write_archive(parquet: Path, target: Path, webp_quality: int | None) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(parquet)
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    names = [name.lower().replace("_", " ") for name in features["label"]["names"]]
    with zipfile.ZipFile(target, "w") as out:
        write_classes(out, names)
        for i, (image, label) in enumerate(zip(table["image"].to_pylist(), table["label"].to_pylist(), strict=True)):
            encoded, suffix = image["bytes"], "jpg"
            if webp_quality is not None:
                buffer = io.BytesIO()
                open_image(encoded).save(buffer, "WEBP", quality=webp_quality, method=6)
                encoded, suffix = buffer.getvalue(), "webp"
            out.writestr(f"{i:05}-{label}.{suffix}", encoded)
    print(f"{target}: {table.num_rows} photographs, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--test-quality", type=int, default=TEST_QUALITY)
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    write_archive(args.parquet_dir / "train-00000-of-00001.parquet", args.out_dir / "train.zip", None)
    write_archive(args.parquet_dir / "test-00000-of-00001.parquet", args.out_dir / "test.zip", args.test_quality)
