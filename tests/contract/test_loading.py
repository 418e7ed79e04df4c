"""The base's weights as ranks load them: together what the files hold, and no rank ever has the whole.

pytest tests/contract/test_loading.py
"""

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from tests.factories import make_renderer
from tests.models import FAMILIES, make_tiny_of, make_tiny_vl
from tests.ranks import on_two_ranks
from tests.trainers import config
from tinker_server.backends.families.gpt_oss.experts import lay_out_experts
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model.loading import load

ALONE = World(0, 1, torch.device("cpu"))


@dataclass
class Loaded:
    """One rank's shard of one model."""

    peak_bytes: int
    """Bytes of all tensors while it loaded."""
    share_bytes: int
    """Bytes of its part of the parameters, and of buffers."""
    largest_bytes: int
    """Bytes of the largest parameter."""
    whole_bytes: int
    different: list[str]
    """Names of tensors that transformers loads otherwise, and that the files hold otherwise under the same name.

    But for prefixes."""
    num_from_files: int
    """Tensors that the files hold under such a name, and as they are used."""


@contextmanager
def counted(counts: list[int]) -> Iterator[None]:
    """Count the bytes of all tensors made since, whenever one is set in a module."""

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            counts.append(live_bytes())

    gc.collect()
    gc.freeze()  # what is there already is not looked at
    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
        gc.unfreeze()


def live_bytes() -> int:
    sizes: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and not one.is_meta:
            sizes[one.data_ptr()] = max(sizes.get(one.data_ptr(), 0), one.nbytes)
    return sum(sizes.values())


def on_rank(world: World, configs: list[ModelSpec]) -> list[Loaded]:
    return [loaded(world, one) for one in configs]


def loaded(world: World, config: ModelSpec) -> Loaded:
    family = make_renderer(Path(config.directory)).family
    counts: list[int] = []
    with counted(counts):
        model = load(config, family, world, is_sharded=world.size > 1).model
    reference = family.model_class.from_pretrained(config.directory, dtype=getattr(torch, config.dtype))
    parameters = [tensor for _, tensor in reference.named_parameters()]
    buffers = [tensor for _, tensor in reference.named_buffers()]
    wanted: dict[str, Tensor] = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    lay_out_experts(reference, wanted, getattr(torch, config.dtype))
    got = {name: whole(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    files = [load_file(path).items() for path in Path(config.directory).glob("*.safetensors")]
    of_files = {_without_prefixes(name): tensor for file in files for name, tensor in file}
    found = {name: of_files.get(_without_prefixes(name)) for name in got}
    for name, tensor in wanted.items():
        if "A_log" in name or "linear_attn.norm" in name:  # in float32, whatever the model has, as the engine
            wanted[name] = of_files.get(_without_prefixes(name), tensor).float()
    # Tensors that transformers transposes when it loads have another shape.
    own = {name: tensor for name, tensor in found.items() if tensor is not None and got[name].shape == tensor.shape}
    different = [name for name, tensor in wanted.items() if not same(got.get(name), tensor)]
    different += [name for name, tensor in own.items() if not same(got[name], tensor.to(got[name].dtype))]
    return Loaded(
        peak_bytes=max(counts),
        share_bytes=sum(-(-len(one) // world.size) * one[:1].nbytes for one in parameters) + total(buffers),
        largest_bytes=max(tensor.nbytes for tensor in parameters),
        whole_bytes=total([*parameters, *buffers]),
        different=different + sorted(got.keys() - wanted.keys()),
        num_from_files=len(own),
    )


def _without_prefixes(name: str) -> str:
    """Files of some models have `language_model.model.` where transformers has `model.language_model.`, or nothing."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def total(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def check(of_ranks: list[list[Loaded]]) -> None:
    for one in chain.from_iterable(of_ranks):
        assert one.different == []
        assert one.num_from_files > 0
        allowed = one.share_bytes + one.largest_bytes + 4096  # some scalars
        assert one.peak_bytes <= allowed < one.whole_bytes, one


def test_two_ranks_hold_the_files_between_them_and_neither_ever_holds_them_whole(tmp_path: Path) -> None:
    """A tied head, a vision tower."""
    check(on_two_ranks(on_rank, [config(make_tiny_vl(tmp_path / "model", tie=True))]))


@pytest.mark.slow
def test_two_ranks_hold_the_files_between_them_in_every_family(tmp_path: Path) -> None:
    """Experts in stacks and one by one; rows that two ranks cannot share evenly, and one row; other precisions."""
    sources = [make(tmp_path / str(number)) for number, make in enumerate(FAMILIES.values())]
    uneven = make_tiny_of("llama", tmp_path / "uneven", intermediate_size=129)
    configs = [config(source) for source in [*sources, uneven]]
    check(on_two_ranks(on_rank, [*configs, *(replace(one, dtype="bfloat16") for one in configs[-2:])]))


def test_one_rank_holds_what_transformers_loads(tiny_vl: Path) -> None:
    one = loaded(ALONE, config(tiny_vl))
    assert one.different == [] and one.num_from_files > 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.pop("model.layers.1.mlp.up_proj.weight"), r"lacks model\.layers\.1\.mlp\.up_proj\.weight$"),
        (
            lambda file: [file.pop(name) for name in list(file) if "self_attn" in name],
            r"lacks model\.layers\.0\.self_attn\.k_norm\.weight, .* and 7 others$",
        ),
        (
            lambda file: file.update({"model.layers.2.extra.weight": torch.zeros(2)}),
            r"has tensors that the model has not: model\.layers\.2\.extra\.weight$",
        ),
        (
            lambda file: file.update({"model.norm.weight": torch.zeros(3)}),
            r"has other shapes than the model: model\.norm\.weight \(3,\) instead of \(64,\)$",
        ),
    ],
    ids=["one missing", "many missing", "one too many", "another shape"],
)
def test_files_that_are_not_the_models_are_refused_by_the_tensors_names(tiny_text, tmp_path, change, said) -> None:
    source = shutil.copytree(tiny_text, tmp_path / "model")
    file = load_file(source / "model.safetensors")
    change(file)
    save_file(file, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BackendFailed, match=said):
        load(config(source), make_renderer(source).family, ALONE, is_sharded=False)
