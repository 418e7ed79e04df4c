"""Common code of models that cut an image into square tiles.

P tiles, S pixels of a tile's side, N tokens of an image, T of an input, F features of a tile, H hidden width of the
language model
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from tinker_server.backends.families.family import ImageFeatures, ImageSpan, LoraFlag, RenderedImage
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.kernels.pinned_copy import to_device
from tinker_server.backends.protocol import BackendFailed

_AT_ONCE = 128
"""Tiles in a call of the tower."""


class Tiled:
    """Base of a `Family` of such models, without its image processor and its names; their decoders are dense."""

    model_class: type[_BaseAutoModelClass] = AutoModelForImageTextToText
    has_linear_attention = needs_bfloat16_on_cpu = sees_whole_images = has_state_space = has_latent_attention = False
    repeats_key_heads, unshared = True, None

    def attention(self, decoder: str) -> dict[str, str]:
        """Tiles are short sequences without a mask: the vision tower always uses SDPA."""
        return {"text_config": decoder, "vision_config": "sdpa"}

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """Return [1, T] int64: an image's tokens count like any others."""
        return np.arange(length)[None]

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """Return the decoder's attention and MLP, and the head; the vision tower and its connector are frozen."""
        return decoder_modules(model)


class TileTower:
    """`VisionTower` that computes every tile alone and gives as many features of each."""

    def __init__(
        self, model: PreTrainedModel, normalised: Callable[[Tensor], Tensor], *, has_samples: bool = False
    ) -> None:
        """`has_samples`: forward takes pixels as [samples, P, 3, S, S], not [P, 3, S, S]."""
        self._run = model.get_image_features
        self._normalised = normalised
        self._has_samples = has_samples

    def compute(self, images: Sequence[RenderedImage], device: torch.device) -> list[ImageFeatures]:
        """Compute all images' tiles side by side."""
        bytes_P3SS = torch.cat([to_device(image.tensors["pixel_values"], device) for image in images])
        features_PFH = torch.cat([self._features(part) for part in bytes_P3SS.split(_AT_ONCE)])
        parts = features_PFH.split([len(image.tensors["pixel_values"]) for image in images])
        # Clones: slices would keep the whole batch's memory alive.
        return [(part_PFH.clone(),) for part_PFH in parts]

    def _features(self, bytes_P3SS: Tensor) -> Tensor:
        tiles_P3SS = self._normalised(bytes_P3SS)
        output = self._run(tiles_P3SS[None] if self._has_samples else tiles_P3SS, return_dict=True)
        return cast(Tensor, output.pooler_output)

    def announce(self, images: Sequence[RenderedImage], device: torch.device) -> dict[str, Tensor]:
        """Return empty pixels, which only say that there are images."""
        return {"pixel_values": torch.empty(0, device=device)}

    def output(self, features: Sequence[ImageFeatures]) -> object:
        """Return all images' tiles [P, F, H], in order."""
        return BaseModelOutputWithPooling(pooler_output=torch.cat([feature[0] for feature in features]))


def tiles_bytes(num_tiles: int, height: int, width: int) -> int:
    """Return the bytes of tiles with three channels."""
    return num_tiles * 3 * height * width


def token_ids(source: str, names: Sequence[str], image_token_id: int) -> Mapping[str, int]:
    """Return ids of tokens by their texts; the last is that of an image's features. Raises BackendFailed for a token
    that the model's tokenizer lacks, and if the model's config has another `image_token_id`."""
    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(source).get_vocab()
    missing = [name for name in names if name not in vocabulary]
    if missing:
        raise BackendFailed(f"{source}: the tokenizer has no {', '.join(missing)}, which stand around images")
    found = vocabulary[names[-1]]
    if found != image_token_id:
        raise BackendFailed(
            f"{source}: {names[-1]} is token {found} of the tokenizer, and {image_token_id} in the config"
        )
    return {name: vocabulary[name] for name in names}
