"""Small forms of the images in samples: each made once, in its owner's turn, when somebody first looks at it.

Most samples are never looked at, and large images take half a second each.
"""

import io

from PIL import Image

from tinker_server.backends.lru import LRU
from tinker_server.offload import LARGE, off_loop

SIDE_PIXELS, LARGEST_PIXELS = 160, 16_000_000
"""Side of a thumbnail; and pixels beyond which an image is shown as it is: decoding it takes too long."""
_KEPT_BYTES, _ENTRY_BYTES = 16 << 20, 256
_AS_IT_IS = b""
_MADE: LRU[tuple[str, int], bytes] = LRU(_KEPT_BYTES, lambda made: _ENTRY_BYTES + len(made))
"""By sample and number of the image."""


async def thumbnail(owner: str, sample_id: str, number: int, data: bytes) -> bytes | None:
    """Return a small JPEG of an image of a sample; None where it is too large for that."""
    key = (sample_id, number)
    made = _MADE.get(key)
    if made is None:
        made = await off_loop(owner, LARGE, _made_once, key, data)
    return made or None


def _made_once(key: tuple[str, int], data: bytes) -> bytes:
    """Make a thumbnail unless it was made while this call waited: an owner's calls run one after the other."""
    made = _MADE.get(key)
    if made is None:
        made = make(data)
        _MADE.put(key, made)
    return made


def make(data: bytes) -> bytes:
    """Return a small JPEG, or nothing for an image that is too large for that."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(data)) as image:
        if image.width * image.height > LARGEST_PIXELS:
            return _AS_IT_IS
        image.draft("RGB", (SIDE_PIXELS, SIDE_PIXELS))
        image.thumbnail((SIDE_PIXELS, SIDE_PIXELS))
        image.convert("RGB").save(file, "JPEG", quality=80)
    return file.getvalue()
