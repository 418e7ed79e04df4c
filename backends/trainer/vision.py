"""The frozen vision tower, run once per image: what it makes of one depends on nothing else, and is kept by content.

Kept in host memory, which is larger than a GPU's and near enough: an image's features are copied in a fraction
of the time that computing them takes.

N tokens of an image, H hidden width of the language model, P patches, D values of a patch
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from backends.lru import LRU
from backends.protocol import BackendFailed
from backends.rendering import RenderedImage


@dataclass(frozen=True)
class ImageFeatures:
    """One image as the language model takes it."""

    tokens_NH: Tensor
    deepstack_NH: list[Tensor]
    """What is added to the tokens after the first decoder layers."""

    def to(self, device: torch.device | str) -> "ImageFeatures":
        return ImageFeatures(self.tokens_NH.to(device), [part.to(device) for part in self.deepstack_NH])

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.tokens_NH, *self.deepstack_NH))


class FrozenVision:
    """Stands between a model and its vision tower. Never more than one forward at a time."""

    def __init__(self, model: PreTrainedModel, max_bytes: int) -> None:
        """`model` is the one whose forward calls its own get_image_features."""
        self._tower = model.get_image_features
        # The pixels of kept images are left out of what waits to be shown, so none may go meanwhile.
        self._kept: LRU[object, ImageFeatures] = LRU(max_bytes, lambda kept: kept.size_bytes, trims_itself=False)
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
        # The pixels only say that there are images; `_give` has what the tower makes of the real ones.
        yield {
            "pixel_values": torch.empty(0, device=device),
            "image_grid_thw": torch.tensor([image.grid_thw for image in images], device=device),
        }
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
        features = {name: one.to(device) for name, one in kept.items() if one is not None}
        computed = self._compute(list(new.values()), device) if new else {}
        features |= computed
        parts = [features[image.hash] for image in images]
        for name, one in computed.items():
            self._kept.put(name, one.to("cpu"))
        taps = [list(tap) for tap in zip(*(part.deepstack_NH for part in parts), strict=True)]
        return self._output(
            pooler_output=tuple(part.tokens_NH for part in parts),
            deepstack_features=taps if self._splits_taps else [torch.cat(tap) for tap in taps],
        )

    def _compute(self, images: list[RenderedImage], device: torch.device) -> dict[str, ImageFeatures]:
        pixels_PD = torch.cat([image.pixel_values_PD for image in images]).to(device)
        grids = torch.tensor([image.grid_thw for image in images], device=device)
        with torch.no_grad():
            output = self._tower(pixels_PD, grids, return_dict=True)
        self._output = type(output)
        # transformers splits the taps by image since 5.18; before, it leaves them in one.
        counts = [len(tokens) for tokens in output.pooler_output]
        self._splits_taps = not any(isinstance(tap, Tensor) for tap in output.deepstack_features)
        parts = [tap.split(counts) if isinstance(tap, Tensor) else tap for tap in output.deepstack_features]
        taps = list(zip(*parts, strict=True)) or [()] * len(images)
        # Clones: slices would keep the whole batch's memory alive.
        return {
            image.hash: ImageFeatures(tokens.clone(), [tap.clone() for tap in of_image])
            for image, tokens, of_image in zip(images, output.pooler_output, taps, strict=True)
        }
