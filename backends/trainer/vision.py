"""The frozen vision tower, run once per image: what it makes of one depends on nothing else, and is kept by content.

Kept in host memory, which is larger than a GPU's and near enough: an image's features are copied in a fraction
of the time that computing them takes. They go there on a thread, while the GPU computes what follows.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.families.family import ImageFeatures, RenderedImage, Vision
from backends.lru import LRU
from backends.protocol import BackendFailed

_AT_ONCE = 8
"""Images that a GPU begins with while the next are still decoded."""


class _Kept:
    """One image's features: where they were made, until they have been copied to host memory."""

    def __init__(self, features: ImageFeatures) -> None:
        self.features = features
        self.size_bytes = sum(part.nbytes for part in features)

    def to_host(self, side: torch.cuda.Stream) -> None:
        with torch.cuda.stream(side):
            self.features = _to(self.features, torch.device("cpu"))


class FrozenVision:
    """Stands between a model and its vision tower. Never more than one forward at a time."""

    def __init__(self, vision: Vision, model: PreTrainedModel, max_bytes: int) -> None:
        """`model` is the one whose forward calls its own get_image_features."""
        self._tower = vision.tower(model)
        # The pixels of kept images are left out of what waits to be shown, so none may go meanwhile.
        self._kept: LRU[object, _Kept] = LRU(max_bytes, lambda kept: kept.size_bytes, trims_itself=False)
        self._waiting: dict[str, RenderedImage] = {}
        """By hash, images of the next forward: too few yet to begin with."""
        self._on_device: list[_Kept] = []
        self._copying = ThreadPoolExecutor(1, "image-features")
        self._next: Any = None
        model.get_image_features = self._give  # type: ignore[method-assign, unused-ignore]

    def __contains__(self, image_hash: object) -> bool:
        """Whether the image's pixels are not needed, until `trim`."""
        return self._kept.get(image_hash) is not None

    def begin(self, images: Sequence[RenderedImage], device: torch.device) -> None:
        """Compute some of the next forward's images, which has not got all of them yet."""
        self._waiting |= {image.hash: image for image in images if image.hash not in self}
        if len(self._waiting) >= _AT_ONCE:
            with suppress(torch.OutOfMemoryError):  # `shown` tries again, and there room can be made
                self._compute(list(self._waiting.values()), device)
            self._waiting = {}

    @contextmanager
    def shown(self, images: Sequence[RenderedImage], device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The inputs of one forward that sees these images, in order. Raises BackendFailed if it did not look."""
        if not images:
            yield {}
            return
        self._next = self._features(images, device)
        # `_give` has what the tower makes of them.
        yield self._tower.announce(images, device)
        if self._next is not None:
            self._next = None
            raise BackendFailed("the model's forward did not ask for its image features")

    def trim(self) -> None:
        """Let the least recently used go. Not while rendered images wait whose pixels were left out."""
        self._waiting = {}
        if self._on_device:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            for kept in self._on_device:
                self._copying.submit(kept.to_host, side)
            self._on_device = []
        self._kept.trim()

    def _give(self, *_: Any, **__: Any) -> Any:
        given, self._next = self._next, None
        return given

    def _features(self, images: Sequence[RenderedImage], device: torch.device) -> Any:
        """As the model's own get_image_features returns them."""
        self._compute(list({image.hash: image for image in images if image.hash not in self}.values()), device)
        kept = {image.hash: self._kept.get(image.hash) for image in images}
        features = {name: _to(one.features, device) for name, one in kept.items() if one is not None}
        return self._tower.output([features[image.hash] for image in images])

    def _compute(self, images: list[RenderedImage], device: torch.device) -> None:
        """On the CPU one by one: the last bits of several at once depend on which they are, and so would a restored
        model's results on what was kept."""
        groups = [[image] for image in images] if device.type == "cpu" else [images] if images else []
        for group in groups:
            for image, features in zip(group, self._tower.compute(group, device), strict=True):
                kept = _Kept(features)
                self._kept.put(image.hash, kept)
                if device.type == "cuda":
                    self._on_device.append(kept)


def _to(features: ImageFeatures, device: torch.device) -> ImageFeatures:
    return tuple(part.to(device) for part in features)
