"""Image features of a microbatch from the vision tower.

The frozen tower runs once per image: its features depend on nothing else, and are cached by content. The cache is in
host memory, which is larger than a GPU's and near enough: copying an image's features takes a fraction of the time of
computing them. A thread copies them there, while the GPU computes on.

For a model that trains the tower it runs in every microbatch, with that model's adapters, and nothing is cached.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tinker_server.backends.families.family import ImageFeatures, RenderedImage, VisionTower
from tinker_server.backends.families.tower_patches import tower_patch
from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.lru import LRU
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.model.packing import Microbatch

_FIRST = 8
"""Images that a GPU begins with while the next are still decoded; then twice as many, and so on. Launching a tower's
kernels takes 11 to 19 ms, for 8 images or for 48."""
FROZEN_VALUES, TRAINED_VALUES = 3 << 23, 1 << 20
"""Values of pixels in one call of the tower on a GPU, if it is frozen, and if it trains: backward then holds all of the
call's activations. An image with more is alone."""


class _CachedFeatures:
    """One image's features: on the device until they have been copied to host memory."""

    def __init__(self, features: ImageFeatures) -> None:
        self._features = features
        self._shapes = [part.shape for part in features]
        self._host: Tensor | None = None
        self.size_bytes = sum(part.nbytes for part in features)

    def to_host(self, side: torch.cuda.Stream) -> None:
        """Copy through pinned memory, which is then freed: allocating more of it holds up the thread that launches
        kernels."""
        num_values = sum(part.numel() for part in self._features)
        pinned = torch.empty(num_values, dtype=self._features[0].dtype, pin_memory=True)
        with torch.cuda.stream(side):
            for target, part in zip(self._parts(pinned), self._features, strict=True):
                target.copy_(part, non_blocking=True)
        side.synchronize()
        self._host, self._features = pinned.clone(), ()

    def on(self, device: torch.device) -> ImageFeatures:
        """Return the features on a device, in one copy."""
        features, host = self._features, self._host  # in this order: a thread may be moving them
        return features if host is None else self._parts(to_device(host, device))

    def _parts(self, flat: Tensor) -> ImageFeatures:
        parts = flat.split([shape.numel() for shape in self._shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))


class ImageEncoder:
    """Gives a model its image features in place of its vision tower. One forward at a time."""

    def __init__(self, tower: VisionTower, model: PreTrainedModel, max_bytes: int, weights: Adapters) -> None:
        """`model` is the one whose forward calls its own get_image_features; `tower` is its tower."""
        self._tower = tower
        self._weights = weights
        # Cached images wait for their forward without pixels, so none may be evicted meanwhile.
        self._cache: LRU[object, _CachedFeatures] = LRU(max_bytes, lambda one: one.size_bytes, evicts=False)
        self._waiting: dict[str, RenderedImage] = {}
        """Images of the next forward by hash, too few yet to begin."""
        self._enough = _FIRST
        self._on_device: list[_CachedFeatures] = []
        self._copying = ThreadPoolExecutor(1, "image-features")
        self._next: object = None
        tower_patch(model, "get_image_features").replace(self._give, on=model)

    def warm_up(self, image: RenderedImage, device: torch.device) -> None:
        """Run the tower once: kernels are compiled and loaded when they first run."""
        self._compute([image], device)
        self.trim()

    def __contains__(self, image_hash: object) -> bool:
        """Return whether the image's features are cached, until `trim`: the frozen tower then needs no pixels."""
        return self._cache.get(image_hash) is not None

    def begin(self, images: Sequence[RenderedImage], device: torch.device) -> None:
        """Compute some of the next forward's images with the frozen tower, before all of them are there."""
        self._waiting |= {image.hash: image for image in images if image.hash not in self}
        if len(self._waiting) >= self._enough:
            self._enough *= 2
            with suppress(torch.OutOfMemoryError):  # `shown` tries again, and can free memory there
                self._compute(list(self._waiting.values()), device)
            self._waiting = {}

    @contextmanager
    def shown(self, batch: Microbatch, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of one forward that takes the microbatch's images, in order. Raises BackendFailed if it did
        not ask for their features."""
        images = batch.images
        if not images:
            yield {}
            return
        self._next = self._features(batch, device)
        # The forward gets the features from `_give`.
        yield self._tower.announce(images, device)
        if self._next is not None:
            self._next = None
            raise BackendFailed("the model's forward did not ask for its image features")

    def trim(self) -> None:
        """Evict the least recently used features. Not while rendered images without pixels wait."""
        self._waiting, self._enough = {}, _FIRST
        if self._on_device:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            for features in self._on_device:
                self._copying.submit(features.to_host, side)
            self._on_device = []
        self._cache.trim()

    def _give(self, *_: object, **__: object) -> object:
        given, self._next = self._next, None
        return given

    def _features(self, batch: Microbatch, device: torch.device) -> object:
        """Return the features as the model's own get_image_features returns them."""
        images = batch.images
        scales = batch.tower_scales or [None] * len(images)
        found: dict[tuple[str, int], ImageFeatures] = {}
        for own in {id(scales_R): scales_R for scales_R in scales}.values():
            distinct = {image.hash: image for image, of in zip(images, scales, strict=True) if of is own}
            features = self._frozen(distinct, device) if own is None else self._trained(distinct, own, device)
            found |= {(name, id(own)): one for name, one in features.items()}
        shown = [found[image.hash, id(of)] for image, of in zip(images, scales, strict=True)]
        if batch.feature_parts is not None:
            shown = [_cut(one, part) for one, part in zip(shown, batch.feature_parts, strict=True)]
        return self._tower.output(shown)

    def _frozen(self, images: Mapping[str, RenderedImage], device: torch.device) -> dict[str, ImageFeatures]:
        self._compute([image for name, image in images.items() if name not in self], device)
        cached = {name: self._cache.get(name) for name in images}
        return {name: one.on(device) for name, one in cached.items() if one is not None}

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _compute(self, images: list[RenderedImage], device: torch.device) -> None:
        """Compute and cache features. On the CPU one by one: the last bits of several at once depend on which they are,
        and a restored model's results would depend on the cache."""
        for group in _groups(images, FROZEN_VALUES, device):
            for image, features in zip(group, self._tower.compute(group, device), strict=True):
                cached = _CachedFeatures(features)
                self._cache.put(image.hash, cached)
                if device.type == "cuda":
                    self._on_device.append(cached)

    def _trained(
        self, images: Mapping[str, RenderedImage], scales_R: Tensor, device: torch.device
    ) -> dict[str, ImageFeatures]:
        """Compute with the adapters of the model of these scales. Backward recomputes each group: only one group's
        activations are held at once, and no linear runs twice before its gradients are accumulated."""
        run = partial(checkpoint, self._adapted, use_reentrant=False, preserve_rng_state=False)
        groups = _groups(images.values(), TRAINED_VALUES, device)
        return {
            image.hash: one for group in groups for image, one in zip(group, run(group, scales_R, device), strict=True)
        }

    def _adapted(self, images: Sequence[RenderedImage], scales_R: Tensor, device: torch.device) -> list[ImageFeatures]:
        with self._weights.in_tower(scales_R):
            return self._tower.compute(images, device)


def _cut(features: ImageFeatures, tokens: slice) -> ImageFeatures:
    """Return some of an image's features; where they are tiles of several tokens, as tiles of one."""
    return tuple(part.flatten(0, -2)[tokens].view(-1, *(1,) * (part.ndim - 2), part.shape[-1]) for part in features)


def _groups(images: Iterable[RenderedImage], most_values: int, device: torch.device) -> list[list[RenderedImage]]:
    """Group images that fit into one call of the tower; a larger one is alone, and on the CPU each."""
    groups: list[list[RenderedImage]] = []
    room = 0
    for image in images:
        size = sum(tensor.numel() for tensor in image.tensors.values())
        if size > room or device.type == "cpu":
            groups.append([])
            room = most_values
        groups[-1].append(image)
        room -= size
    return groups
