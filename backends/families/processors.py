"""A model's own image processor, in two steps: pixels in bytes, then normalised as the model takes them.

Bytes are a fourth of the normalised pixels to compute, to cache and to copy to a GPU, which normalises them in no time.

P patches or tiles, C channels
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.protocol import BackendFailed

_VALUES_AT_ONCE = 1 << 24
"""Values normalised at once, which are float32 for a moment."""
_TESTED = ((64, 96), (100, 77))
"""Heights and widths: first a size that most models keep, then a size that they must change."""


class ImageProcessor:
    """The processor of the model in a directory; resizes, cuts and normalises as its file says."""

    def __init__(self, source: str, **options: bool) -> None:
        """`options` go to every call. Raises BackendFailed if there is no processor, or a processor that does more
        than that."""
        try:
            # Trainer and sampler must see the same pixels: those of the torchvision backend.
            self.own = AutoImageProcessor.from_pretrained(source, backend="torchvision")
        except (OSError, ValueError) as error:
            raise BackendFailed(f"{source}: the model takes images but has no image processor: {error}") from None
        self._options = options
        # As transformers' `TorchvisionBackend` has it, in a single step for rescaling and normalising.
        self._affine_C = [torch.tensor(part) * (1 / self.own.rescale_factor) for part in self._statistics(source)]
        self._affine_on: dict[torch.device, list[Tensor]] = {}
        self._test(source)

    def __call__(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Return the processor's tensors, pixel_values [P, ...] in bytes, a third of them per channel."""
        features = dict(self.own([rgb], do_rescale=False, do_normalize=False, return_tensors="pt", **self._options))
        return features | {"pixel_values": _of_one(features["pixel_values"])}

    def normalise(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [P, ...] of `dtype`, rounded from the processor's own values in float32, on the device of `pixels`
        [P, ...]."""
        if pixels.device not in self._affine_on:
            self._affine_on[pixels.device] = [to_device(part_C[:, None], pixels.device) for part_C in self._affine_C]
        mean_C1, std_C1 = self._affine_on[pixels.device]
        result = torch.empty_like(pixels, dtype=dtype)
        shape, at_once = (len(pixels), len(mean_C1), -1), max(1, _VALUES_AT_ONCE // pixels[:1].numel())
        parts = zip(pixels.view(shape).split(at_once), result.view(shape).split(at_once), strict=True)
        for part, into in parts:
            torch.div(part - mean_C1, std_C1, out=into)
        return result

    def _statistics(self, source: str) -> tuple[Sequence[float], Sequence[float]]:
        own = self.own
        if not (own.do_rescale and own.do_normalize):
            raise BackendFailed(f"{source}: its image processor does not rescale and normalise; none such is supported")
        return own.image_mean, own.image_std

    def _test(self, source: str) -> None:
        """Raise BackendFailed unless the two steps give what the processor gives at once."""
        for size in _TESTED:
            noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
            pixels = self(noise)["pixel_values"]
            wanted = _of_one(self.own([noise], return_tensors="pt", **self._options)["pixel_values"])
            if pixels.dtype != torch.uint8 or not torch.equal(self.normalise(pixels, torch.float32), wanted):
                raise BackendFailed(
                    f"{source}: its image processor does more to pixels than to rescale and normalise them"
                )


def _of_one(pixels: Tensor) -> Tensor:
    """Return [P, ...]: some processors give [images, P, 3, height, width]."""
    return pixels[0] if pixels.dim() == 5 else pixels
