"""Pictures without labels, from freely licensed packages, as one archive beside the photographs.

    python pictures.py PACKAGES_DIR OUT/more.zip

PACKAGES_DIR holds one unpacked package a folder, named as in SOURCES (README.md says how they are fetched). The
pictures only widen what teacher and student are shown together: the more subjects, the better the student does on
photographs that it has not seen. Cut-out subjects get a plain ground, and wallpapers are cut into tiles.
"""

import argparse
import io
import random
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data import UNNAMED, write_classes
from PIL import Image, ImageStat

QUALITY, SIDE = 60, 208  # WebP; the longer side
LEAST_SIDE = 48
LEAST_SPREAD = 8.0  # of grey values: below it a picture shows nothing
WHITE_GROUNDS = 0.6  # share of cut-out subjects that stand on white
TILES, TILE_SHARES = 6, (0.35, 0.9)  # tiles of a wallpaper, and their sides as shares of its shorter side
IMAGE_STARTS = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff[\xe0\xe1\xdb]|RIFF....WEBP", re.DOTALL)


@dataclass(frozen=True)
class Source:
    package: str
    licence: str
    members: re.Pattern[str]
    """Of paths in the package: the pictures, or the Qt resource files that hold them."""
    without: str = "(?!)"
    """Paths to leave out: letters, signs, patterns and repetitions."""
    tiled: bool = False


def images(under: str, suffixes: str = "png|jpg|jpeg|webp") -> re.Pattern[str]:
    return re.compile(rf"/{under}/.*\.(?:{suffixes})$")


SOURCES = (
    Source("tuxpaint-stamps-default", "GPL-2", images("stamps", "png"), "/symbols/|/roadsigns/"),
    Source("pysiogame", "public domain (says Debian)", images("res/images/(?:art4apps|fc)")),
    Source(
        "openclipart-png",
        "public domain",
        images(
            "png/(?:animals|food|people|recreation|transportation|tools|buildings|plants|electronics|office"
            "|containers|education|science|decorations|unsorted|computer/hardware)"
        ),
        "/aiga|roadsigns|/games/|/stickmen/|/smilies/|/bulb/|/battery/",
    ),
    Source(
        "gcompris-qt-data",
        "CC BY-SA, CC BY, CC0, public domain",
        re.compile(r"/(?:categorization|explore_\w+|clickgame|erase|babyshapes|solar_system|paintings)\.rcc$"),
    ),
    # Left out: flags, and people again in five colours of skin.
    Source("fluent-emoji-3d", "MIT", images("assets"), "1f1[ef][0-9a-f]-|-1f3f[b-f]|/1f9d1-|/1f46[89]-"),
    Source("gnome-backgrounds", "CC BY-SA 3.0", images("backgrounds"), "-d\\.", tiled=True),
    Source("mate-backgrounds", "GPL-2+, CC BY-SA 4.0", images("backgrounds", "jpg"), tiled=True),
    Source("lomiri-wallpapers-16.04", "CC BY, CC BY-SA, CC0", images("share"), tiled=True),
    Source("lomiri-wallpapers-20.04", "CC BY, CC BY-SA, CC0", images("share"), tiled=True),
    Source("ukui-wallpapers", "CC BY-SA 3.0", images("share"), tiled=True),
)


def members(source: Source, packages: Path) -> Iterator[bytes]:
    root = packages / source.package
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = f"/{path.relative_to(root)}"
        if not source.members.search(name) or re.search(source.without, name):
            continue
        content = path.read_bytes()
        if path.suffix == ".rcc":
            yield from embedded(content)
        else:
            yield content


def embedded(resources: bytes) -> Iterator[bytes]:
    """The pictures in a Qt resource file: each stands behind its length."""
    end = 0
    for match in IMAGE_STARTS.finditer(resources):
        start = match.start()
        if start < max(end, 4):
            continue
        (length,) = struct.unpack(">I", resources[start - 4 : start])
        if start + length <= len(resources):
            end = start + length
            yield resources[start:end]


def flattened(image: Image.Image, chance: random.Random) -> Image.Image:
    """A cut-out subject on white or on a plain light ground, with a margin; other pictures as they are."""
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    subject = image.convert("RGBA")
    box = subject.getchannel("A").getbbox()
    subject = subject.crop(box) if box else subject
    margin = round(max(subject.size) * chance.uniform(0.03, 0.15))
    white = chance.random() < WHITE_GROUNDS
    colour = (255, 255, 255) if white else tuple(chance.randint(120, 255) for _ in range(3))
    ground = Image.new("RGB", (subject.width + 2 * margin, subject.height + 2 * margin), colour)
    ground.paste(subject, (margin, margin), subject)
    return ground


def tiles(image: Image.Image, chance: random.Random) -> Iterator[Image.Image]:
    """Square parts of a large photograph."""
    for _ in range(TILES):
        side = round(min(image.size) * chance.uniform(*TILE_SHARES))
        left, top = chance.randint(0, image.width - side), chance.randint(0, image.height - side)
        yield image.crop((left, top, left + side, top + side))


def fingerprint(image: Image.Image) -> bytes:
    """Equal for pictures that look the same at a glance."""
    small = image.resize((8, 8), Image.Resampling.BOX)
    return bytes(value // 24 for value in small.tobytes())


def pictures(source: Source, packages: Path, chance: random.Random) -> Iterator[Image.Image]:
    for content in members(source, packages):
        image = Image.open(io.BytesIO(content))
        if min(image.size) < LEAST_SIDE or max(image.size) > 4 * min(image.size):
            continue
        whole = flattened(image, chance)
        for part in tiles(whole, chance) if source.tiled else [whole]:
            if ImageStat.Stat(part.convert("L")).stddev[0] >= LEAST_SPREAD:
                part.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
                yield part


def write_pictures(packages: Path, target: Path) -> None:
    chance, seen = random.Random(0), set[bytes]()
    with zipfile.ZipFile(target, "w") as out:
        write_classes(out, [])
        for source in SOURCES:
            before = len(seen)
            for picture in pictures(source, packages, chance):
                mark = fingerprint(picture)
                if mark in seen:
                    continue
                seen.add(mark)
                buffer = io.BytesIO()
                picture.save(buffer, "WEBP", quality=QUALITY, method=6)
                out.writestr(f"{len(seen):05}-{UNNAMED}.webp", buffer.getvalue())
            print(f"{source.package} ({source.licence}): {len(seen) - before} pictures", flush=True)
    print(f"{target}: {len(seen)} pictures, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages_dir", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    write_pictures(args.packages_dir, args.target)
