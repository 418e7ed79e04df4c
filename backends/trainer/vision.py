"""The frozen vision tower, run once per image: what it makes of one depends on nothing else, and is kept by content.

Kept in host memory, which is larger than a GPU's and near enough: an image's features are copied in a fraction
of the time that computing them takes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.families.family import ImageFeatures, RenderedImage, Vision
from backends.lru import LRU
from backends.protocol import BackendFailed


class FrozenVision:
    """Stands between a model and its vision tower. Never more than one forward at a time."""

    def __init__(self, vision: Vision, model: PreTrainedModel, max_bytes: int) -> None:
        """`model` is the one whose forward calls its own get_image_features."""
        self._tower = vision.tower(model)
        # The pixels of kept images are left out of what waits to be shown, so none may go meanwhile.
        self._kept: LRU[object, ImageFeatures] = LRU(max_bytes, _size_bytes, trims_itself=False)
        self._next: Any = None
        model.get_image_features = self._give  # type: ignore[method-assign, unused-ignore]

    def __contains__(self, image_hash: object) -> bool:
        """Whether the image's pixels are not needed, until `trim`."""
        return self._kept.get(image_hash) is not None

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
        self._kept.trim()

    def _give(self, *_: Any, **__: Any) -> Any:
        given, self._next = self._next, None
        return given

    def _features(self, images: Sequence[RenderedImage], device: torch.device) -> Any:
        """As the model's own get_image_features returns them."""
        kept = {image.hash: self._kept.get(image.hash) for image in images}
        new = {image.hash: image for image in images if kept[image.hash] is None}
        features = {name: _to(one, device) for name, one in kept.items() if one is not None}
        computed = dict(zip(new, self._computed(list(new.values()), device), strict=True))
        features |= computed
        for name, one in computed.items():
            self._kept.put(name, _to(one, torch.device("cpu")))
        return self._tower.output([features[image.hash] for image in images])

    def _computed(self, images: list[RenderedImage], device: torch.device) -> list[ImageFeatures]:
        """On the CPU one by one: the last bits of several at once depend on which they are, and so would a restored
        model's results on what was kept."""
        groups = [[image] for image in images] if device.type == "cpu" else [images] if images else []
        return [one for group in groups for one in self._tower.compute(group, device)]


def _to(features: ImageFeatures, device: torch.device) -> ImageFeatures:
    return tuple(part.to(device) for part in features)


def _size_bytes(features: ImageFeatures) -> int:
    return sum(part.nbytes for part in features)
