"""Bytes that the plan counts for a vision tower are those that it takes, to 10 %, and not fewer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, PreTrainedModel

from tests.factories import present
from tests.models import (
    make_tiny_internvl,
    make_tiny_qwen2_5_vl,
    make_tiny_qwen3_5,
    make_tiny_smolvlm,
    make_tiny_vl,
)
from tests.shapes import shape
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.configure.memory_plan import Demand, trainer_parts
from tinker_server.backends.families.coverage import ImageToken, image_token
from tinker_server.backends.families.family import Family, RenderedImage
from tinker_server.backends.families.lora_names import find_trained_modules
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.trainer.distributed import ALONE
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.model import vision
from tinker_server.backends.trainer.model.vision import FROZEN_VALUES, TRAINED_VALUES

SIZES = {"hidden_size": 288, "intermediate_size": 1076, "num_heads": 4, "num_attention_heads": 4}
"""A quarter of the published towers' widths."""
QWEN: dict[str, Callable[[Path], Path]] = {
    "qwen3-vl": make_tiny_vl,
    "qwen3.5": make_tiny_qwen3_5,
    "qwen2.5-vl": make_tiny_qwen2_5_vl,
}
FAMILIES = QWEN | {"internvl": make_tiny_internvl, "smolvlm": make_tiny_smolvlm}


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return made


def wide_model(kind: str, directory: Path, dtype: torch.dtype) -> tuple[Family, PreTrainedModel, ImageToken]:
    """Return a model without weights of its own whose tower has the published towers' proportions."""
    source = FAMILIES[kind](directory / "model")
    config = AutoConfig.from_pretrained(source)
    for name, value in SIZES.items():
        setattr(config.vision_config, name, value)
    if kind == "internvl":  # 257 positions of a tile, as the published models' 1,025, not 17
        config.vision_config.image_size = [128, 128]
    family = find_family(config, str(source))
    model = family.model_class.from_config(config, dtype=dtype, attn_implementation=family.attention("sdpa"))
    return family, model, present(image_token(config, dtype.itemsize))


def images(kind: str, count: int) -> list[RenderedImage]:
    """Return images of 256 patches, or of four tiles."""
    if kind in QWEN:
        side = 14 if kind == "qwen2.5-vl" else 16
        tensors = {
            "pixel_values": torch.zeros(16 * side, 16 * side, 3, dtype=torch.uint8),
            "image_grid_thw": torch.tensor([[1, 16, 16]]),
        }
    else:
        side = 128 if kind == "internvl" else 32
        tensors = {"pixel_values": torch.zeros(4, 3, side, side, dtype=torch.uint8)}
    return [RenderedImage(str(number), tensors) for number in range(count)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_frozen_towers_call_takes_what_is_planned(kind: str, tmp_path: Path) -> None:
    """In float32: in 16 bits on the CPU, not on a GPU, transformers rotates queries and keys in copies in float32.

    A GPU takes up to a stream more, which the plan counts."""
    family, model, token = wide_model(kind, tmp_path, torch.float32)
    tower = present(family.vision).tower(model.base_model, torch.float32)
    given = images(kind, 4)
    tower.compute(given[:1], torch.device("cpu"))  # tensors that are cached by size
    with torch.no_grad(), Live() as live:
        features = tower.compute(given, torch.device("cpu"))
    num_tokens = sum(one[0].flatten(0, -2).shape[0] for one in features)
    assert sum(part.nbytes for one in features for part in one) == num_tokens * token.features
    assert sum(one.size_bytes for one in given) == pytest.approx(num_tokens * token.pixels, rel=0.01)
    assert 0.9 < live.peak_bytes / (num_tokens * token.forward) < 1.05


@pytest.mark.parametrize("kind", QWEN)
def test_a_trained_towers_call_saves_what_is_planned(kind: str, tmp_path: Path) -> None:
    family, model, token = wide_model(kind, tmp_path, torch.bfloat16)
    modules = find_trained_modules(family, model, train_vision=True)
    adapters = Adapters(model.requires_grad_(False), modules, 8, ALONE)
    scales_R = adapters.load([adapters.create(Trainable(rank=8, seed=0, train_vision=True))])[0]
    held = [*model.parameters(), *model.buffers(), *(one for loaded in adapters._loaded for one in loaded._all())]
    own = {one.untyped_storage().data_ptr() for one in held}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in own:
            saved[where] = tensor
        return tensor

    tower = present(family.vision).tower(model.base_model, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), adapters.in_tower(scales_R):
        features = tower.compute(images(kind, 4), torch.device("cpu"))
    num_tokens = sum(len(one[0]) for one in features)
    num_bytes = sum(one.untyped_storage().nbytes() for one in saved.values())
    assert num_bytes == pytest.approx(num_tokens * token.backward, rel=0.05)


def test_a_call_of_the_tower_is_no_larger_than_planned_and_a_larger_image_is_alone() -> None:
    """Of images with 3 values each of 1,000 x 1,000 pixels, and one of 4,000 x 4,000."""
    small, large = (
        [RenderedImage(str(number), {"pixel_values": torch.empty(side, side, 3, device="meta")}) for number in range(9)]
        for side in (1000, 4000)
    )
    grouped = vision._groups([*small, *large[:1], *small[:2]], FROZEN_VALUES, torch.device("cuda"))
    assert [len(group) for group in grouped] == [8, 1, 1, 2]
    assert all(len(group) == 1 for group in vision._groups(small, TRAINED_VALUES, torch.device("cuda")))
    assert all(len(group) == 1 for group in vision._groups(small, FROZEN_VALUES, torch.device("cpu")))


def test_a_microbatch_of_images_has_room_for_their_features_and_the_largest_call_of_the_tower() -> None:
    size, demand = shape("4b"), Demand(16384, 32, 1, 1, 16384, 256, None)
    token = present(size.image_token)
    assert size.tower_bytes(16384) == 16384 * token.features + 8192 * token.forward
    step = trainer_parts(size, demand, 1, replicates=True, device="cuda")["microbatch or optim_step"]
    assert step == size.activation_bytes(16384, recomputes=True) + 16384 * token.features
    trained = shape("4b", train_vision=True)
    assert trained.tower_bytes(16384) == 2 * 16384 * token.features + 1024 * token.backward
    longest = trainer_parts(trained, Demand(2048, 8, 1, 1, 2048, 16, None), 1, replicates=True, device="cuda")
    assert longest["microbatch or optim_step"] == trained.tower_bytes(2048)
    assert shape("8b-text").tower_bytes(16384) == 0
