"""What every room may ask of a kind of model, and the values that pass between them.

T tokens of an input, R rows of position ids, N tokens of an image, H hidden width of the language model
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

LoraFlag = Literal["train_attn", "train_mlp", "train_unembed", "train_vision"]
"""A field of a request's lora_config; the last one is the server's to set."""
ImageFeatures = tuple[Tensor, ...]
"""What a vision tower makes of one image: its tokens [N, H] first, then whatever else the decoder takes of it."""


@dataclass(frozen=True)
class ImageSpan:
    """Where an image stands in the expanded sequence."""

    offset: int
    num_tokens: int
    grid: tuple[int, int]
    """As the model's `Vision` counts it."""
    num_pixels: int
    """Of the file, before it is resized."""


@dataclass(frozen=True)
class RenderedImage:
    """An image as the model's forward takes it."""

    hash: str
    """sha256 of the file's bytes."""
    tensors: Mapping[str, Tensor]
    """As forward names them, one row or more of each, but for pixels in bytes: those are as `Vision.process` gives
    them. Pixels are missing where they were not asked for."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class EngineField:
    """How vLLM splits one of forward's tensors into images."""

    one_row_each: bool = False
    """Otherwise an image has as many rows as its own tensor."""
    stays_on_cpu: bool = False


@dataclass(frozen=True)
class TowerLora:
    """Where LoRA goes in a vision tower that a server trains: into all its linears, but for those named."""

    root: str
    """Full name of the tower, its mergers or projector within it."""
    frozen: Sequence[str]
    """As `Family.frozen`, with the tower trained: its parts that are not."""
    engine_modules: Sequence[str]
    """Names in the engine that are no decoder's: the last part of a name, or the whole where others end so too."""


class VisionTower(Protocol):
    """A model's vision tower, image by image."""

    def compute(self, images: Sequence[RenderedImage], device: torch.device) -> list[ImageFeatures]:
        """Run the tower, with a gradient where autograd records one; each image's features have memory of their own.
        Every image has its pixels, in bytes."""

    def announce(self, images: Sequence[RenderedImage], device: torch.device) -> dict[str, Tensor]:
        """The arguments of the model's forward that say which images there are, without their pixels."""

    def output(self, features: Sequence[ImageFeatures]) -> Any:
        """The images' features as the model's own get_image_features returns them, after a first `compute`."""


class Vision(Protocol):
    """How a kind of model sees."""

    @property
    def engine_fields(self) -> Mapping[str, EngineField]:
        """How vLLM splits each of forward's tensors of images."""

    def engine_options(self, max_images: int) -> dict[str, Any]:
        """Arguments of vLLM's engine for prompts of at most so many images that we have processed already."""

    @property
    def lora(self) -> TowerLora | None:
        """How its tower is trained; None where it cannot be."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns that an image of so many pixels is cut into, patches or tiles. Raises ValueError for a
        shape it does not take."""

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """N of an image that is cut so."""

    @property
    def place_id(self) -> int:
        """The token by which a chat template says where an image is; `image_ids` stand in its place."""

    def image_ids(self, span: ImageSpan) -> np.ndarray:
        """[N] int64: the token ids that stand for the image, with those that the model's own processor writes around
        and between its parts."""

    @property
    def feature_id(self) -> int:
        """The one of `image_ids` in whose places the image's features go."""

    def process(self, rgb: Image.Image) -> dict[str, Tensor]:
        """All of forward's tensors of one image, by the model's own processor; of them the pixels alone are uint8, and
        not as forward takes them yet."""

    @property
    def normalised(self) -> Callable[[Tensor, torch.dtype], Tensor]:
        """What the model's own processor makes of those pixels, [P, ...] of the dtype; where they are."""

    def size_bytes(self, grid: tuple[int, int]) -> int:
        """Of the pixels that `process` gives."""

    def without_pixels(self, span: ImageSpan) -> dict[str, Tensor]:
        """Those of `process` that the image's size alone decides."""

    def tower(self, model: PreTrainedModel, dtype: torch.dtype) -> VisionTower:
        """The vision tower of the model whose forward calls its own get_image_features; it sees pixels of `dtype`."""


class Family(Protocol):
    """One kind of model, made from one model's directory."""

    @property
    def vision(self) -> Vision | None:
        """None where it takes no images."""

    @property
    def placeholders(self) -> Mapping[int, str]:
        """Token ids that stand for an image's contents, and their names: no text holds them, no sample draws them."""

    @property
    def model_class(self) -> Any:
        """The transformers auto class that loads it."""

    def attention(self, decoder: str) -> str | dict[str, str]:
        """transformers' attn_implementation where `decoder` names the language model's."""

    def position_ids(self, length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
        """[1, T] or [R, 1, T] int64: one input's positions, which restart with every input of a packed row."""

    @property
    def has_linear_attention(self) -> bool:
        """Whether layers carry a state along a row, from one sample to the next: each then has a row of its own."""

    @property
    def frozen(self) -> Sequence[str]:
        """Full names of modules that no flag trains, and nothing inside them; * is the number of any layer."""

    def lora_modules(self, model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
        """Full names of the modules that each flag trains."""
