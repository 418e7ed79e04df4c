"""The `Family` protocol, by which all other code sees a kind of model, and the values that it exchanges.

T tokens of an input, R kinds of position ids, N tokens of an image, H hidden width of the language model
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

LoraFlag = Literal["train_attn", "train_mlp", "train_unembed", "train_vision"]
"""A field of a request's lora_config; the last is the server's to set."""
ImageFeatures = tuple[Tensor, ...]
"""A vision tower's output for an image: its tokens [N, H] first, then whatever else the decoder takes."""


@dataclass(frozen=True)
class ImageSpan:
    """An image's tokens in the expanded sequence."""

    offset: int
    num_tokens: int
    grid: tuple[int, int]
    """Rows and columns, as the model's `Vision` counts them."""
    num_pixels: int
    """Pixels of the file, before it is resized; more for a JPEG of many scans, by the time that it takes to decode."""


@dataclass(frozen=True)
class RenderedImage:
    """An image as the model's forward takes it."""

    hash: str
    """sha256 of the file's bytes."""
    tensors: Mapping[str, Tensor]
    """Tensors named as in forward, with at least a row each, except pixels in bytes: those are as `Vision.process`
    gives them. Pixels are missing if they were not asked for."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class EngineField:
    """The rule by which vLLM splits a tensor of forward into images."""

    one_row_each: bool = False
    """If false, an image has as many rows as its own tensor."""
    stays_on_cpu: bool = False


@dataclass(frozen=True)
class TowerLora:
    """The target modules in a vision tower that a server trains: all its linears except those named."""

    root: str
    """Full name of the tower, its mergers or projector within it."""
    frozen: Sequence[str]
    """As `Family.frozen`: parts that stay frozen while the tower trains."""
    engine_modules: Sequence[str]
    """Names in the engine that no decoder has: the last part of a name, or the whole if others end so too."""


class VisionTower(Protocol):
    """A model's vision tower, image by image."""

    def compute(self, images: Sequence[RenderedImage], device: torch.device) -> list[ImageFeatures]:
        """Run the tower, with a gradient if autograd is enabled; each image's features have memory of their own. Every
        image has its pixels, in bytes."""

    def announce(self, images: Sequence[RenderedImage], device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of the model's forward that describe the images, without their pixels."""

    def output(self, features: Sequence[ImageFeatures]) -> object:
        """Return features in the form of the model's own get_image_features, after a first `compute`."""


class Vision(Protocol):
    """The image side of a kind of model."""

    @property
    def engine_fields(self) -> Mapping[str, EngineField]:
        """The rule by which vLLM splits each of forward's image tensors."""

    def engine_options(self, max_images: int) -> dict[str, object]:
        """Return arguments of vLLM's engine for prompts of at most `max_images` images that we have processed
        already."""

    @property
    def is_divided(self) -> bool:
        """True if the ranks of an engine divide the tower, since vLLM cannot divide the images among them."""

    @property
    def lora(self) -> TowerLora | None:
        """The tower's target modules; None if it cannot be trained."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches or tiles of an image of this size. Raises ValueError for a shape that
        it does not take."""

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Return N of an image with this grid."""

    @property
    def placeholder_id(self) -> int:
        """The token by which a chat template marks an image; `image_ids` replace it."""

    def image_ids(self, span: ImageSpan) -> np.ndarray:
        """Return [N] int64, the image's token ids, with those that the model's own processor writes around and between
        its parts."""

    @property
    def feature_id(self) -> int:
        """The token of `image_ids` whose embeddings the image's features replace."""

    def process(self, rgb: Image.Image) -> dict[str, Tensor]:
        """Return all of forward's tensors of an image, by the model's own processor. Only the pixels are uint8, and
        not yet as forward takes them."""

    @property
    def normalise(self) -> Callable[[Tensor, torch.dtype], Tensor]:
        """Normalises those pixels as the model's own processor does: [P, ...] of the dtype, on their device."""

    def size_bytes(self, grid: tuple[int, int]) -> int:
        """Return the bytes of the pixels that `process` gives."""

    def sizes_of_image(self, span: ImageSpan) -> dict[str, Tensor]:
        """Return those tensors of `process` that depend on the image's size alone: what the engine needs of an image
        whose features it has cached."""

    def tower(self, model: PreTrainedModel, dtype: torch.dtype) -> VisionTower:
        """Return the vision tower of a model whose forward calls its own get_image_features; it takes pixels of
        `dtype`."""


class Family(Protocol):
    """A kind of model, made from a model's directory."""

    @property
    def vision(self) -> Vision | None:
        """None if the model takes no images."""

    @property
    def placeholders(self) -> Mapping[int, str]:
        """Token ids that stand for an image's contents, and their names: no text holds them, and none is ever
        sampled."""

    @property
    def model_class(self) -> type[_BaseAutoModelClass]:
        """The transformers auto class that loads the model."""

    def attention(self, decoder: str) -> str | dict[str, str]:
        """Return transformers' attn_implementation; `decoder` names the language model's."""

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """Return [1, T] or [R, 1, T] int64, an input's positions, which restart with every input of a packed
        microbatch."""

    @property
    def has_linear_attention(self) -> bool:
        """True if layers carry a state from token to token (`trainer/model/linear_attention.py`)."""

    @property
    def has_state_space(self) -> bool:
        """True if these are Mamba2's (`trainer/model/state_space.py`)."""

    @property
    def has_latent_attention(self) -> bool:
        """True if keys and values come from a token's latent."""

    @property
    def repeats_key_heads(self) -> bool:
        """True if more ranks of an engine than there are key heads can repeat them."""

    @property
    def unshared(self) -> str | None:
        """The reason why trainer and engine cannot share a copy of the base, or None."""

    @property
    def needs_bfloat16_on_cpu(self) -> bool:
        """True if the engine has the model on a CPU in bfloat16 alone."""

    @property
    def sees_whole_images(self) -> bool:
        """True if an image's features see each other, whichever comes first, in every layer. All images have as many
        features then, and no layer's window is shorter than an image's."""

    @property
    def frozen(self) -> Sequence[str]:
        """Full names of modules that no flag trains, nor anything inside them; * is the number of any layer."""

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """Return the full names of the modules that each flag trains."""
