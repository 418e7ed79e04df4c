"""The map from tensors of files to those of an engine, found by watching it load them."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from tinker_server.backends.base_weights.name_map import View, trace_loading

Load = Callable[[dict[str, Tensor], Iterable[tuple[str, Tensor]]], None]
E, I, H = 3, 4, 5  # noqa: E741
"""Experts, inner and hidden width."""


def qkv(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
    begins = {"q": (0, 8), "k": (8, 2), "v": (10, 2)}
    for name, tensor in files:
        own["qkv"].narrow(0, *begins[name]).copy_(tensor)


def single_experts(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in files:
        expert, part = name.split(".")
        own["w13"].data[int(expert)].chunk(2)[("gate", "up").index(part)].copy_(tensor)


def transposed_stack(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
    for _, tensor in files:
        for expert, one in enumerate(tensor.transpose(1, 2)):
            for part, half in enumerate(one.chunk(2)):
                own["w13"][expert].chunk(2)[part].copy_(half)


def padded(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
    for _, tensor in files:
        own["vocabulary"][: len(tensor)].data.copy_(tensor)


def flattened(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
    for _, tensor in files:
        own["patches"].copy_(tensor.view(6, -1))


CASES: dict[str, tuple[Load, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "rows": (qkv, {"qkv": (12, H)}, {"q": (8, H), "k": (2, H), "v": (2, H)}),
    "experts one by one": (
        single_experts,
        {"w13": (E, 2 * I, H)},
        {f"{expert}.{part}": (I, H) for expert in range(E) for part in ("gate", "up")},
    ),
    "a stack of experts, inputs first": (transposed_stack, {"w13": (E, 2 * I, H)}, {"stack": (E, H, 2 * I)}),
    "a padded vocabulary": (padded, {"vocabulary": (16, H)}, {"embeddings": (11, H)}),
    "another number of dimensions": (flattened, {"patches": (6, 24)}, {"patches.file": (6, 2, 3, 4)}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_the_files_is_a_view_that_has_its_numbers(case: str) -> None:
    load, own_shapes, file_shapes = CASES[case]
    views = traced(load, own_shapes, file_shapes)
    assert views.keys() == file_shapes.keys()
    own = {name: torch.full(shape, torch.nan) for name, shape in own_shapes.items()}
    files = {name: torch.randn(shape) for name, shape in file_shapes.items()}
    load(own, files.items())
    for name, tensor in files.items():
        view = views[name].of(own[views[name].tensor])
        assert view.equal(tensor) and view.untyped_storage().data_ptr() == own[views[name].tensor].data_ptr()


def traced(load: Load, own_shapes: dict[str, tuple[int, ...]], files: dict[str, tuple[int, ...]]) -> dict[str, View]:
    own = {name: torch.empty(shape, device="meta") for name, shape in own_shapes.items()}
    return trace_loading(
        lambda read: load(own, read), own, {name: (shape, torch.float32) for name, shape in files.items()}
    )


def test_a_tensor_whose_copy_was_computed_with_is_no_view() -> None:
    def exponential(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in files:
            own[name].copy_(tensor)
        own["a"].copy_(-own["a"].exp())

    assert traced(exponential, {"a": (4,), "d": (4,)}, {"a": (4,), "d": (4,)}).keys() == {"d"}


def test_a_tensor_that_was_computed_with_is_no_view() -> None:
    assert traced(lambda own, files: own["a"].copy_(-dict(files)["a"]), {"a": (4,)}, {"a": (4,)}) == {}  # type: ignore[arg-type, func-returns-value]


def test_a_tensor_that_is_loaded_in_part_or_repeated_is_no_view() -> None:
    def load(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in files:
            own[name].copy_(tensor[:2] if name == "part" else tensor)

    assert traced(load, {"part": (2,), "repeated": (3, 4)}, {"part": (4,), "repeated": (4,)}) == {}


def test_parts_that_lie_in_another_order_are_no_view() -> None:
    def load(own: dict[str, Tensor], files: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in files:
            first, second, third = tensor.chunk(3)
            for place, part in enumerate((first, third, second)):
                own["a"][2 * place : 2 * place + 2].copy_(part)

    assert traced(load, {"a": (6, 2)}, {"a": (6, 2)}) == {}


def test_a_view_does_not_fit_a_tensor_that_was_laid_out_anew() -> None:
    (view,) = traced(padded, {"vocabulary": (16, H)}, {"embeddings": (11, H)}).values()
    assert view.fits(torch.empty(16, H))
    assert not view.fits(torch.empty(H, 16).T) and not view.fits(torch.empty(0))
