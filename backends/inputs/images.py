"""Decode PNG and JPEG files to pixels. The files are users' own: every error names its file, and the time that
reading one may take is bounded before Pillow reads it."""

import io
import re
import zlib

from PIL import ExifTags, Image

Image.MAX_IMAGE_PIXELS = None  # else a smaller limit of Pillow's would come before the caller's
_DEEP_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})
"""Grayscale deeper than 8 bits: Pillow's conversion to RGB would clip it to white."""
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions by EXIF orientation (CIPA DC-008, tag 0x0112)."""
_METADATA = frozenset({"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"})
"""Metadata in which Pillow, and so the loaders of transformers and vLLM, look for an orientation: EXIF, else XMP."""
_ON_THEIR_SIDE = (
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
)
_MAX_PARTS = 5000
"""Most segments of a JPEG, and chunks of a PNG with no or few pixels: each costs Pillow microseconds; cameras write
some 100."""
_FEW_PIXELS_BYTES = 1024
"""Writers of PNGs split the pixels into chunks of 4 KiB or more."""
_MAX_COMPRESSED = 16
"""Most chunks of a PNG that may be compressed, beside pixels: Pillow inflates a kilobyte of each to a megabyte, in a
millisecond. Editors write one profile and a few texts."""
_COMPRESSED = frozenset({b"iCCP", b"zTXt", b"iTXt"})
_MAX_EXIF_BYTES = 1 << 18
"""Pillow reads so many bytes of entries in 0.1 s, and joins a JPEG's segments at the square of their number. Cameras
write a single segment, of 64 kB at most."""
USUAL_SCANS = 12
"""Most scans of a progressive JPEG that writers make by themselves."""
_SCANS = "scans of the file"
"""The key of a number in the notes of an opened image."""
_MAX_FULL_SCANS = 100
"""Most scans of a progressive JPEG of the largest size; smaller images may have more. Each goes over all pixels. Ten
are usual, and fifty bytes make one."""
_JPEG_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xff])")
"""Begins with one fixed byte: the search then runs at 3 GB/s, else at a twentieth of that."""
_FILL, _APP1, _STANDALONE = 0xFF, 0xE1, (0x01, 0xD8)
_PNG, _PIXELS = b"\x89PNG\r\n\x1a\n", (b"IDAT", b"fdAT")
_PNG_HEADER = re.compile(
    re.escape(_PNG)
    + rb"\x00\x00\x00\x0dIHDR.{8}"
    + rb"(?:[\x01\x02\x04\x08\x10]\x00|[\x08\x10][\x02\x04\x06]|[\x01\x02\x04\x08]\x03)",
    re.DOTALL,
)
"""A header with a depth and a colour type that exist. After another one Pillow takes pixels for a note, and can be made
to find chunks where others find none."""


class BadImage(ValueError):
    """The file is no image that we read; the text is the end of a sentence that says why."""


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """Open an image; only its header is read so far. Raises BadImage."""
    if data.startswith(_PNG):
        _check_chunks(data)
    scans = _num_scans(data) if data.startswith(b"\xff\xd8") else 1
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    except Exception:  # noqa: BLE001 - Pillow's parsers raise whatever the bytes lead them into
        raise BadImage(f"the image of {len(data)} bytes is not a readable PNG or JPEG") from None
    num_pixels = image.width * image.height
    if num_pixels > max_pixels:
        raise BadImage(f"the image has {image.width}x{image.height} pixels; {max_pixels} are allowed")
    if scans * num_pixels > _MAX_FULL_SCANS * max_pixels:
        raise BadImage(
            f"the JPEG has {scans} scans; at its size, {_MAX_FULL_SCANS * max_pixels // num_pixels} are allowed"
        )
    if image.mode in _DEEP_MODES:
        raise BadImage("the image has more than 8 bits a channel; convert it to 8 bits")
    _check_exif(max(len(image.info.get("exif", b"")), len(image.info.get("Raw profile type exif", "")) // 2))
    image.info[_SCANS] = scans
    return image


def cost_of(image: Image.Image) -> int:
    """Return the pixels of an opened image, as many times more as it has more scans than usual."""
    scans: int = image.info[_SCANS]
    return image.width * image.height * max(USUAL_SCANS, scans) // USUAL_SCANS


def size_of(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an opened image as it is shown."""
    width, height = image.size
    return (height, width) if _transpose(image) in _ON_THEIR_SIDE else (width, height)


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Decode to RGB, turned by the EXIF orientation: a camera stores what its sensor saw. Raises BadImage."""
    if data.startswith(_PNG):
        _check_pixels(data)
    with open_image(data, max_pixels) as image:
        transpose = _transpose(image)
        try:
            image.load()
            shown = image if image.mode == "RGB" else image.convert("RGB")
            return shown if transpose is None else shown.transpose(transpose)
        except Exception as error:  # noqa: BLE001 - as above
            raise BadImage(f"the image does not decode: {str(error) or type(error).__name__}") from None


def _transpose(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that shows an image upright, from its header; None if it is upright or that is
    unreadable."""
    if _METADATA.isdisjoint(image.info):
        return None
    try:
        # The base class's method: a PNG's own would read all pixels, to look behind them.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001 - as above: a broken note of a camera is no reason to refuse its image
        return None
    return _TRANSPOSES.get(orientation) if isinstance(orientation, int) else None


def _check_chunks(data: bytes) -> None:
    """Refuse a PNG of chunks with which Pillow would be busy for seconds. It reads those behind the pixels too."""
    if _PNG_HEADER.match(data) is None:
        raise BadImage(f"the image of {len(data)} bytes is not a readable PNG or JPEG")
    at, parts, compressed = len(_PNG), 0, 0
    while at + 8 <= len(data) and (kind := data[at + 4 : at + 8]) != b"IEND":
        length = int.from_bytes(data[at : at + 4])
        at += 12 + length
        parts += kind not in _PIXELS or length < _FEW_PIXELS_BYTES
        compressed += kind in _COMPRESSED
        if parts > _MAX_PARTS:
            raise BadImage(
                f"the PNG has more than {_MAX_PARTS} chunks that hold less than {_FEW_PIXELS_BYTES} bytes of pixels"
            )
        if compressed > _MAX_COMPRESSED:
            raise BadImage(f"the PNG has more than {_MAX_COMPRESSED} chunks iCCP, zTXt and iTXt in all")


def _check_pixels(data: bytes) -> None:
    """Refuse a PNG whose pixels are not those that were written: Pillow checks the other chunks alone."""
    at = len(_PNG)
    while at + 8 <= len(data) and (kind := data[at + 4 : at + 8]) != b"IEND":
        end = at + 8 + int.from_bytes(data[at : at + 4])
        if kind == b"IDAT" and zlib.crc32(memoryview(data)[at + 4 : end]) != int.from_bytes(data[end : end + 4]):
            raise BadImage("the image does not decode: the checksum of its pixels is wrong")
        at = end + 4


def _check_exif(num_bytes: int) -> None:
    if num_bytes > _MAX_EXIF_BYTES:
        raise BadImage(f"the image has more than {_MAX_EXIF_BYTES} bytes of EXIF")


def _num_scans(data: bytes) -> int:
    """Count the scans of a JPEG; markers are read as a decoder reads them (ITU-T T.81, annex B)."""
    at, parts, scans, exif_bytes = 2, 0, 0, 0
    while found := _JPEG_MARKER.search(data, at):
        marker, at = found[1][0], found.end()
        if marker == 0xD9:
            break
        parts += 1  # Pillow reads repeated fill bytes one by one
        if marker == _FILL:
            at -= 1  # the byte after a marker's first may begin another
        elif marker not in _STANDALONE:
            length = int.from_bytes(data[at : at + 2])
            if marker == _APP1 and data.startswith(b"Exif\0\0", at + 2):
                exif_bytes += length
                _check_exif(exif_bytes)
            at += length
        scans += marker == 0xDA
        if parts - scans > _MAX_PARTS:
            raise BadImage(f"the JPEG has more than {_MAX_PARTS} segments")
    return scans
