"""Files that clients send as images: read, or refused with the reason, and within bounds."""

import io
import random
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from tests.factories import cross_entropy, datum, image, photo, prompt, text
from tinker_server.api_schemas.inputs import ImageChunk
from tinker_server.backends.inputs.images import BadImage, decode, open_image, size_of
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.step.decoding import decode_batch
from tinker_server.backends.trainer.step.validation import check_forward_backward

MANY = 10**8


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def saved(picture: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def late_colour_profile() -> bytes:
    """A PNG with an empty colour profile behind its pixels, which Pillow reads only while it decodes."""
    whole = photo(64, 64)
    return whole[:-12] + png_chunk(b"iCCP", b"") + whole[-12:]


def test_a_png_that_fails_inside_pillow_is_refused_with_its_position(renderer: Renderer) -> None:
    chunk = ImageChunk(data=late_colour_profile(), format="png")
    with pytest.raises(InvalidInput, match="datum 3, chunk 1: the image does not decode: "):
        renderer.render(prompt(text(1), chunk), "datum 3")


def deep_png(colour_type: int, channels: int) -> bytes:
    """A PNG of 4 x 4 pixels with 16 bits for each channel, of which the upper 8 are 0x12."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, colour_type, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress((b"\0" + b"\x12\x34" * 4 * channels) * 4))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + png_chunk(b"IEND", b"")


def test_of_16_bits_a_channel_the_upper_8_count_and_grey_alone_is_refused() -> None:
    for colour_type, channels in ((2, 3), (4, 2), (6, 4)):
        assert np.asarray(decode(deep_png(colour_type, channels), MANY)).tolist() == [[[0x12] * 3] * 4] * 4
    with pytest.raises(BadImage, match="more than 8 bits a channel"):
        decode(deep_png(0, 1), MANY)


def test_a_png_whose_pixels_have_a_wrong_checksum_is_refused() -> None:
    whole = photo(64, 64)
    at = whole.index(b"IDAT")
    end = at + 4 + int.from_bytes(whole[at - 4 : at])
    damaged = whole[:end] + bytes(4) + whole[end + 4 :]
    with pytest.raises(BadImage, match="does not decode: the checksum of its pixels is wrong"):
        decode(damaged, MANY)
    assert decode(whole, MANY).size == (64, 64)


@pytest.mark.parametrize("error", [IndexError("one"), RuntimeError(), MemoryError(), ZeroDivisionError("by 0")])
def test_whatever_a_parser_raises_is_the_files_fault(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_end", fail)
    with pytest.raises(BadImage, match=r"does not decode: .+"):
        decode(photo(64, 64), MANY)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "_open", fail)
    with pytest.raises(BadImage, match="not a readable PNG or JPEG"):
        open_image(photo(64, 64), MANY)


def mutations(data: bytes, generator: random.Random) -> bytes:
    """A few bytes changed, cut out, repeated or swapped; a PNG's checksums are corrected half of the time."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 6)):
        at = generator.randrange(len(changed))
        end = min(len(changed), at + generator.randint(1, 20))
        match generator.randrange(4):
            case 0:
                changed[at] = generator.choice([0, 1, 127, 128, 255, generator.randrange(256)])
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end]
            case 3:
                changed[at:end] = generator.randbytes(end - at)
        if len(changed) < 20:
            return bytes(changed)
    if data.startswith(b"\x89PNG") and generator.random() < 0.5:
        return with_right_checksums(bytes(changed))
    return bytes(changed)


def with_right_checksums(data: bytes) -> bytes:
    parts, at = [data[:8]], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        parts.append(png_chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return b"".join(parts)


SEEDS = {
    "png": photo(48, 40, 1),
    "palette": photo(48, 40, 2, mode="P"),
    "alpha": photo(48, 40, 3, mode="LA"),
    "interlaced profile": saved(Image.new("RGB", (40, 40), (9, 8, 7)), "PNG", icc_profile=b"profile", dpi=(70, 70)),
    "jpeg": photo(48, 40, 4, format="jpeg"),
    "cmyk": photo(48, 40, 5, mode="CMYK", format="jpeg"),
    "progressive": saved(Image.new("RGB", (40, 40), (9, 8, 7)), "JPEG", progressive=True, exif=b"Exif\0\0MM"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEDS)
def test_damaged_files_are_read_or_refused_and_nothing_else(renderer: Renderer, name: str) -> None:
    generator = random.Random(name)
    refused = 0
    for _ in range(300):
        chunk = ImageChunk(data=mutations(SEEDS[name], generator), format="png")
        try:
            renderer.render(prompt(chunk), "datum 0")
        except InvalidInput as error:
            assert str(error).startswith("datum 0, chunk 0: ")
            refused += 1
    assert refused > 30


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_scans_of_a_progressive_jpeg_are_bounded_by_its_pixels() -> None:
    ordinary = saved(Image.new("RGB", (2000, 2000), (10, 20, 30)), "JPEG", progressive=True)
    decode(ordinary, 4_000_000)
    last = ordinary[ordinary.rfind(b"\xff\xc4", 0, ordinary.rfind(b"\xff\xda")) : -2]  # a scan and its tables
    flood = ordinary[:-2] + last * 4000 + ordinary[-2:]
    assert len(flood) < 300_000
    began = time.monotonic()
    with pytest.raises(BadImage, match="the JPEG has 4010 scans; at its size, 100 are allowed"):
        decode(flood, 4_000_000)
    assert time.monotonic() - began < 0.5
    small = saved(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    decode(small[:-2] + last * 10 + small[-2:], 4_000_000)


def with_scans(count: int, seed: int = 0) -> bytes:
    """A progressive JPEG of 200 x 100 pixels with so many scans."""
    ordinary = saved(Image.new("RGB", (200, 100), (10, 20, seed)), "JPEG", progressive=True)
    last = ordinary[ordinary.rfind(b"\xff\xc4", 0, ordinary.rfind(b"\xff\xda")) : -2]
    return ordinary[:-2] + last * (count - ordinary.count(b"\xff\xda")) + ordinary[-2:]


def test_scans_of_all_jpegs_of_one_request_are_bounded_by_their_pixels(tiny_vl) -> None:
    """Those of the largest size with twelve scans weigh no more than others."""
    renderer = Renderer(str(tiny_vl), image_cache_bytes=0, max_image_pixels=20_000)
    usual, many = ([ImageChunk(data=with_scans(n, seed), format="jpeg") for seed in range(10)] for n in (12, 60))
    renderer.layout(prompt(*usual), "prompt")
    renderer.layout(prompt(*many[:2]), "prompt")
    allowed = "images of 300000 pixels in all; 200000 are allowed in one request .* more than 12 scans"
    with pytest.raises(InvalidInput, match=f"prompt: {allowed}"):
        renderer.layout(prompt(*many[:3]), "prompt")
    data = [datum(prompt(chunk, text(1)), renderer, seed) for seed, chunk in enumerate(many)]
    with pytest.raises(InvalidInput, match=f"datums 0 to 2: {allowed}"):
        check_forward_backward(renderer, decode_batch(cross_entropy(data)), 64)


def test_an_image_of_more_pixels_than_pillows_own_limit_is_measured_by_the_operators() -> None:
    size = struct.pack(">IIBBBBB", 20_000, 10_000, 8, 0, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", size) + png_chunk(b"IDAT", b"")
    with pytest.raises(BadImage, match="the image has 20000x10000 pixels; 100000000 are allowed"):
        open_image(header, MANY)
    with open_image(header, 2 * MANY) as opened:
        assert size_of(opened) == (20_000, 10_000)


def many_chunks() -> bytes:
    whole = photo(64, 64)
    return whole[:33] + png_chunk(b"abCd", b"") * 400_000 + whole[33:]


def many_segments() -> bytes:
    whole = photo(64, 64, format="jpeg")
    return whole[:2] + b"\xff\xe5\x00\x02" * 1_200_000 + whole[2:]


def many_fill_bytes() -> bytes:
    whole = photo(64, 64, format="jpeg")
    return whole[:2] + b"\xff" * 5_000_000 + whole[2:]


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
@pytest.mark.parametrize("make", [many_chunks, many_segments, many_fill_bytes])
def test_a_header_of_a_million_parts_is_refused_before_it_is_read(make) -> None:
    data = make()
    began = time.monotonic()
    with pytest.raises(BadImage, match="more than 5000"):
        open_image(data, MANY)
    assert time.monotonic() - began < 0.5


MEGABYTE = zlib.compress(bytes(2**20 - 100), 9)


def between(chunks: bytes, *, behind: bool = False) -> bytes:
    """A small PNG with more chunks, before or behind its pixels."""
    whole = photo(64, 64)
    at = len(whole) - 12 if behind else 33
    return whole[:at] + chunks + whole[at:]


def jpeg_with(marker: int, content: bytes, count: int) -> bytes:
    whole = photo(64, 64, format="jpeg")
    return whole[:2] + (b"\xff" + struct.pack(">BH", marker, len(content) + 2) + content) * count + whole[2:]


def entries(count: int) -> bytes:
    """EXIF of as many entries, all of which are larger than the file."""
    found = b"".join(struct.pack(">HHLL", number, 1, 10**6, 8) for number in range(1, count + 1))
    return b"MM\0*\0\0\0\x08" + struct.pack(">H", count) + found + bytes(4)


def profiles_where_no_depth_is_known() -> bytes:
    """A PNG whose header has no known depth: Pillow then reads the first frame's pixels as a note, four bytes too far,
    and what it finds from there on is no chunk for other readers."""
    profile = png_chunk(b"iCCP", b"p\0\0" + MEGABYTE)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 7, 2, 0, 0, 0))
    control = png_chunk(b"fcTL", bytes(26))
    for_pillow = bytes(4)  # which it reads beyond the length; then the checksum
    hidden = for_pillow + struct.pack(">I", zlib.crc32(b"fdAT" + bytes(4))) + profile * 2000
    frame = struct.pack(">I", 4) + b"fdAT" + struct.pack(">I", 1) + hidden
    return b"\x89PNG\r\n\x1a\n" + header + control + frame


BOMBS = {
    "profiles": (between(png_chunk(b"iCCP", b"p\0\0" + MEGABYTE) * 4900), "more than 16 chunks iCCP, zTXt and iTXt"),
    "profiles behind the pixels": (
        between(png_chunk(b"iCCP", b"p\0\0" + MEGABYTE) * 4900, behind=True),
        "more than 16 chunks iCCP, zTXt and iTXt",
    ),
    "texts": (between(png_chunk(b"zTXt", b"k\0\0" + MEGABYTE) * 60), "more than 16 chunks iCCP, zTXt and iTXt"),
    "international texts": (
        between(png_chunk(b"iTXt", b"k\0\1\0\0\0" + MEGABYTE) * 60, behind=True),
        "more than 16 chunks iCCP, zTXt and iTXt",
    ),
    "profiles that only Pillow sees": (profiles_where_no_depth_is_known(), "not a readable PNG"),
    "chunks behind the pixels": (between(png_chunk(b"abCd", b"") * 400_000, behind=True), "more than 5000 chunks"),
    "empty pixels": (between(png_chunk(b"IDAT", b"") * 400_000), "more than 5000 chunks"),
    "entries of a PNG": (between(png_chunk(b"eXIf", entries(65_535))), "more than 262144 bytes of EXIF"),
    "EXIF of a JPEG in pieces": (jpeg_with(0xE1, b"Exif\0\0" + bytes(1000), 4900), "more than 262144 bytes of EXIF"),
}


@pytest.mark.flaky(reruns=1)  # holds a limit of processor time
@pytest.mark.filterwarnings("ignore:Tag data larger than file")
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_would_take_long_to_read_is_refused_before_it_is_read(renderer: Renderer, name: str) -> None:
    data, reason = BOMBS[name]
    began = time.process_time()
    with pytest.raises(InvalidInput, match=f"datum 3, chunk 1: .*{reason}"):
        renderer.render(prompt(text(1), ImageChunk(data=data, format="png")), "datum 3")
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize("behind", [False, True])
def test_a_profile_and_some_texts_leave_the_pixels_as_they_are(behind: bool) -> None:
    texts = b"".join(png_chunk(b"zTXt", b"k%d\0\0" % number + zlib.compress(b"a text")) for number in range(10))
    more = b"".join(png_chunk(b"tEXt", b"k%d\0a text" % number) for number in range(100))
    notes = png_chunk(b"iCCP", b"p\0\0" + MEGABYTE) + texts + more + png_chunk(b"iTXt", b"k\0\1\0\0\0" + MEGABYTE)
    found = decode(between(notes, behind=behind), MANY)
    assert np.array_equal(np.asarray(found), np.asarray(Image.open(io.BytesIO(photo(64, 64)))))


def test_a_png_may_have_its_pixels_in_many_pieces() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    whole = saved(Image.fromarray(picture), "PNG", compress_level=0)
    pixels, at = b"", 33
    while whole[at + 4 : at + 8] != b"IEND":
        length = int.from_bytes(whole[at : at + 4])
        pixels += whole[at + 8 : at + 8 + length]
        at += 12 + length
    pieces = b"".join(png_chunk(b"IDAT", pixels[at : at + 1024]) for at in range(0, len(pixels), 1024))
    assert len(pixels) > 6000 * 1024
    assert np.array_equal(np.asarray(decode(whole[:33] + pieces + whole[-12:], MANY)), picture)


def test_ordinary_metadata_is_no_flood() -> None:
    profile = np.random.default_rng(0).bytes(3_000_000)
    assert decode(saved(Image.new("RGB", (64, 64)), "JPEG", icc_profile=profile), MANY).size == (64, 64)
    assert decode(saved(Image.new("RGB", (64, 64)), "PNG", icc_profile=profile[:900_000]), MANY).size == (64, 64)


def test_pixels_of_all_images_of_one_input_are_bounded(tiny_vl) -> None:
    renderer = Renderer(str(tiny_vl), image_cache_bytes=0, max_image_pixels=10_000)
    chunks = [image(100, 100, seed) for seed in range(11)]
    renderer.layout(prompt(*chunks[:10]), "prompt")
    with pytest.raises(InvalidInput, match=r"prompt: images of 110000 pixels in all; 100000 are allowed"):
        renderer.layout(prompt(*chunks), "prompt")


def test_pixels_of_all_datums_of_one_request_are_bounded(tiny_vl) -> None:
    renderer = Renderer(str(tiny_vl), image_cache_bytes=0, max_image_pixels=10_000)
    data = [datum(prompt(image(100, 100, seed), text(1)), renderer, seed) for seed in range(11)]
    check_forward_backward(renderer, decode_batch(cross_entropy(data[:10])), 64)
    with pytest.raises(InvalidInput, match="datums 0 to 10: images of 110000 pixels in all; 100000 are allowed"):
        check_forward_backward(renderer, decode_batch(cross_entropy(data)), 64)


@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 99])
@pytest.mark.parametrize("format", ["jpeg", "png"])
def test_an_image_is_turned_as_its_exif_says_and_measured_so_by_its_header(orientation, format):
    """Images are rotated as in transformers' and vLLM's loaders. Quarters of four colours stay distinct in a JPEG."""
    quarters = np.zeros((40, 96, 3), np.uint8)
    quarters[:20, :48], quarters[:20, 48:], quarters[20:, :48] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    stored, exif, buffer = Image.fromarray(quarters), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(buffer, format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue()))).convert("RGB")
    found = decode(buffer.getvalue(), 10**6)
    assert found.size == expected.size == ((40, 96) if orientation in (5, 6, 7, 8) else (96, 40))
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    with open_image(buffer.getvalue(), 10**6) as opened:
        assert size_of(opened) == found.size


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("format", ["jpeg", "png"])
def test_an_image_without_exif_is_turned_as_its_xmp_says(orientation, format):
    note, buffer = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>', io.BytesIO()
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), np.uint8))
    if format == "jpeg":
        stored.save(buffer, format, xmp=note.encode())
    else:
        info = PngImagePlugin.PngInfo()
        info.add_itxt("XML:com.adobe.xmp", note)
        stored.save(buffer, format, pnginfo=info)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue()))).convert("RGB")
    assert expected.size == ((30, 50) if orientation == 6 else (50, 30))
    assert np.array_equal(np.asarray(decode(buffer.getvalue(), 10**6)), np.asarray(expected))
    with open_image(buffer.getvalue(), 10**6) as opened:
        assert size_of(opened) == expected.size


def test_the_orientation_of_a_png_is_found_without_its_pixels():
    buffer = io.BytesIO()
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    Image.new("RGB", (50, 30)).save(buffer, "png", pnginfo=info)
    header = buffer.getvalue()[: buffer.getvalue().index(b"IDAT") + 6]
    with open_image(header, 10**6) as opened:
        assert size_of(opened) == (30, 50)


BROKEN = [b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0XX"]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", *BROKEN])
def test_empty_or_broken_exif_changes_nothing(exif):
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(buffer, "jpeg", exif=exif)
    assert decode(buffer.getvalue(), 10**6).size == (30, 20)
    with open_image(buffer.getvalue(), 10**6) as opened:
        assert size_of(opened) == (30, 20)
