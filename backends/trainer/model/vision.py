"""What a vision tower makes of a row's images.

The frozen tower runs once per image: what it makes of one depends on nothing else, and is kept by content. Kept in host
memory, which is larger than a GPU's and near enough: an image's features are copied in a fraction of the time that
computing them takes. They go there on a thread, while the GPU computes what follows.

For a model that trains the tower it runs in every row, with that model's adapters, and nothing of it is kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from backends.families.family import ImageFeatures, RenderedImage, VisionTower
from backends.families.tower_patches import tower_patch
from backends.kernels.pinned_copy import to_device
from backends.lru import LRU
from backends.protocol import BackendFailed
from backends.trainer.model.packing import Microbatch
from backends.trainer.trained_weights import TrainedWeights

_FIRST = 8
"""Images that a GPU begins with while the next are still decoded; then twice as many, and so on. To launch a tower's
kernels takes 11 to 19 ms, for 8 images or for 48."""
_CELLS_AT_ONCE = 1 << 20
"""Of pixel tensors in one pass of a tower that is trained, whose activations are all there in its backward."""


class _Kept:
    """One image's features: where they were made, until they have been copied to host memory."""

    def __init__(self, features: ImageFeatures) -> None:
        self._features = features
        self._shapes = [part.shape for part in features]
        self._host: Tensor | None = None
        self.size_bytes = sum(part.nbytes for part in features)

    def to_host(self, side: torch.cuda.Stream) -> None:
        """By way of pinned memory, which is not kept: to make more of it holds up whoever launches kernels."""
        num_values = sum(part.numel() for part in self._features)
        pinned = torch.empty(num_values, dtype=self._features[0].dtype, pin_memory=True)
        with torch.cuda.stream(side):
            for place, part in zip(self._parts(pinned), self._features, strict=True):
                place.copy_(part, non_blocking=True)
        side.synchronize()
        self._host, self._features = pinned.clone(), ()

    def on(self, device: torch.device) -> ImageFeatures:
        """The features there, in one copy."""
        features, host = self._features, self._host  # in this order: they are on their way to the host
        return features if host is None else self._parts(to_device(host, device))

    def _parts(self, flat: Tensor) -> ImageFeatures:
        parts = flat.split([shape.numel() for shape in self._shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))


class ImageEncoder:
    """Stands between a model and its vision tower. Never more than one forward at a time."""

    def __init__(self, tower: VisionTower, model: PreTrainedModel, max_bytes: int, adapters: TrainedWeights) -> None:
        """`model` is the one whose forward calls its own get_image_features, `tower` its own."""
        self._tower = tower
        self._adapters = adapters
        # The pixels of kept images are left out of what waits to be shown, so none may go meanwhile.
        self._kept: LRU[object, _Kept] = LRU(max_bytes, lambda kept: kept.size_bytes, trims_itself=False)
        self._waiting: dict[str, RenderedImage] = {}
        """By hash, images of the next forward: too few yet to begin with."""
        self._enough = _FIRST
        self._on_device: list[_Kept] = []
        self._copying = ThreadPoolExecutor(1, "image-features")
        self._next: Any = None
        tower_patch(model, "get_image_features").replace(self._give, on=model)

    def warm_up(self, image: RenderedImage, device: torch.device) -> None:
        """Kernels are compiled and loaded when they first run: let it be now."""
        self._compute([image], device)
        self.trim()

    def __contains__(self, image_hash: object) -> bool:
        """Whether the frozen tower does not need the image's pixels, until `trim`."""
        return self._kept.get(image_hash) is not None

    def begin(self, images: Sequence[RenderedImage], device: torch.device) -> None:
        """Compute some of the next forward's images, which has not got all of them yet, by the frozen tower."""
        self._waiting |= {image.hash: image for image in images if image.hash not in self}
        if len(self._waiting) >= self._enough:
            self._enough *= 2
            with suppress(torch.OutOfMemoryError):  # `shown` tries again, and there room can be made
                self._compute(list(self._waiting.values()), device)
            self._waiting = {}

    @contextmanager
    def shown(self, batch: Microbatch, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The inputs of one forward that sees the row's images, in order. Raises BackendFailed if it did not look."""
        images = batch.images
        if not images:
            yield {}
            return
        self._next = self._features(images, batch.tower_scales or [None] * len(images), device)
        # `_give` has what the tower makes of them.
        yield self._tower.announce(images, device)
        if self._next is not None:
            self._next = None
            raise BackendFailed("the model's forward did not ask for its image features")

    def trim(self) -> None:
        """Let the least recently used go. Not while rendered images wait whose pixels were left out."""
        self._waiting, self._enough = {}, _FIRST
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

    def _features(self, images: Sequence[RenderedImage], scales: Sequence[Tensor | None], device: torch.device) -> Any:
        """As the model's own get_image_features returns them. `scales` as `Microbatch.tower_scales`."""
        found: dict[tuple[str, int], ImageFeatures] = {}
        for own in {id(scales_R): scales_R for scales_R in scales}.values():
            distinct = {image.hash: image for image, of in zip(images, scales, strict=True) if of is own}
            features = self._frozen(distinct, device) if own is None else self._trained(distinct, own, device)
            found |= {(name, id(own)): one for name, one in features.items()}
        return self._tower.output([found[image.hash, id(of)] for image, of in zip(images, scales, strict=True)])

    def _frozen(self, images: Mapping[str, RenderedImage], device: torch.device) -> dict[str, ImageFeatures]:
        self._compute([image for name, image in images.items() if name not in self], device)
        kept = {name: self._kept.get(name) for name in images}
        return {name: one.on(device) for name, one in kept.items() if one is not None}

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
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

    def _trained(
        self, images: Mapping[str, RenderedImage], scales_R: Tensor, device: torch.device
    ) -> dict[str, ImageFeatures]:
        """With the adapters of the model of these scales. Backward computes each group again: no more than one's
        activations are there at once, and no linear runs twice before its gradients have been added to."""
        run = partial(checkpoint, self._adapted, use_reentrant=False, preserve_rng_state=False)
        groups = [[image] for image in images.values()] if device.type == "cpu" else _groups(images.values())
        return {
            image.hash: one for group in groups for image, one in zip(group, run(group, scales_R, device), strict=True)
        }

    def _adapted(self, images: Sequence[RenderedImage], scales_R: Tensor, device: torch.device) -> list[ImageFeatures]:
        with self._adapters.in_tower(scales_R):
            return self._tower.compute(images, device)


def _groups(images: Iterable[RenderedImage]) -> list[list[RenderedImage]]:
    """Of images that are few enough for one pass; a larger one is alone."""
    groups: list[list[RenderedImage]] = []
    room = 0
    for image in images:
        size = sum(tensor.numel() for tensor in image.tensors.values())
        if size > room:
            groups.append([])
            room = _CELLS_AT_ONCE
        groups[-1].append(image)
        room -= size
    return groups
