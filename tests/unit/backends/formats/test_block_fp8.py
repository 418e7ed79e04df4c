"""Weights in block fp8: dequantised as their definition says, and refused where a half is missing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.factories import present
from tests.models import make_tiny_moe, make_tiny_text, make_tiny_vl, quantise_in_blocks
from tests.shapes import shape
from tinker_server.backends.base_weights.mapped import Files
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models, find
from tinker_server.backends.configure.memory_plan import Machine, engine_parts, trainer_parts
from tinker_server.backends.configure.placement import make_plan
from tinker_server.backends.formats.block_fp8 import (
    check_files,
    dequantised,
    halves,
    packed,
    packed_bytes,
    unpack,
)
from tinker_server.backends.formats.model_files import fingerprint
from tinker_server.backends.formats.packed import joined
from tinker_server.backends.model_spec import BasePrecision
from tinker_server.backends.protocol import BackendFailed

QUERIES = "model.layers.1.self_attn.q_proj.weight"


def made(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and its scales."""
    generator = torch.Generator().manual_seed(seed)
    *stacked, rows, columns = shape
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(*stacked, -(-rows // 128), -(-columns // 128), generator=generator) + 0.01
    return weight, scale


def by_definition(weight: Tensor, scale: Tensor) -> Tensor:
    """Number by number, in float64, which no product of the two exceeds, rounded to float32."""
    rows, columns = (np.arange(size) // 128 for size in weight.shape[-2:])
    each = scale.double().numpy()[..., rows[:, None], columns]
    return torch.from_numpy((weight.double().numpy() * each).astype(np.float32))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (129, 127), (300, 200), (3, 160, 290)])
def test_every_number_has_the_scale_of_its_block_also_at_edges(shape: tuple[int, ...]) -> None:
    weight, scale = made(*shape)
    wanted = by_definition(weight, scale)
    assert dequantised(weight, scale, torch.float32).equal(wanted)
    assert dequantised(weight, scale, torch.bfloat16).equal(wanted.bfloat16())
    halved = scale.bfloat16()
    assert dequantised(weight, halved, torch.float32).equal(by_definition(weight, halved))


@pytest.mark.parametrize("shape", [(300, 200), (3, 300, 200)])
def test_rows_of_a_file_are_those_of_the_whole(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = made(*shape)
    save_file({"w": weight, "w_scale_inv": scale, "other": torch.ones(3)}, tmp_path / "model.safetensors")
    with Files(tmp_path, torch.bfloat16) as files:
        assert files.names() == ["other", "w"]
        assert files.layouts() == {"other": ((3,), torch.float32), "w": (shape, torch.bfloat16)}
        whole = files.tensor("w")
        assert whole.equal(dequantised(weight, scale, torch.bfloat16))
        for begin in (0, 126, 130, 255, 296):
            index = (*(slice(1, 2) for _ in shape[:-2]), slice(begin, begin + 4))
            assert files.slice("w")[index].equal(whole[index]), begin


@pytest.mark.parametrize("shape", [(128, 128), (130, 140), (7, 300), (257, 16), (2100, 140)])
def test_a_packed_matrix_has_its_numbers_and_scales(shape: tuple[int, int]) -> None:
    weight, scale = made(*shape)
    weight_B = packed(weight, scale)
    assert weight_B.dtype == torch.uint8 and weight_B.nbytes == packed_bytes(*shape)
    numbers, scales = halves(weight_B, *shape)
    assert numbers.view(torch.uint8).equal(weight.view(torch.uint8)) and scales.equal(scale.float())
    assert unpack(weight_B, torch.empty(shape)).equal(by_definition(weight, scale))


def test_tensors_that_stay_in_fp8_are_read_packed() -> None:
    weight, scale = made(130, 140)
    pairs = [("a", weight), ("b", weight), ("a_scale_inv", scale), ("b_scale_inv", scale)]
    read = dict(joined(pairs, torch.float32, {"b"}))
    assert read["a"].equal(by_definition(weight, scale)) and read["b"].equal(packed(weight, scale))


def test_scales_may_come_before_or_long_after_their_tensors() -> None:
    weight, scale = made(130, 140)
    other = torch.ones(2)
    pairs = [("a", weight), ("b_scale_inv", scale), ("other", other), ("b", weight), ("a_scale_inv", scale)]
    read = dict(joined(pairs, torch.float32))
    assert list(read) == ["other", "b", "a"] and read["other"] is other
    assert read["a"].equal(by_definition(weight, scale)) and read["b"].equal(read["a"])
    for half in pairs[:2]:
        with pytest.raises(ValueError, match=r"tensors in fp8 or mxfp4, or their scales, are missing: [ab]$"):
            list(joined([half], torch.float32))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({f"{QUERIES}_scale_inv": None}, "is in F8_E4M3, and .*_scale_inv is missing"),
        ({QUERIES: torch.ones(64, 64)}, "is the scale of no tensor in F8_E4M3"),
        ({QUERIES: torch.ones(64, 64).to(torch.float8_e5m2)}, "is in F8_E5M2, and of fp8 only F8_E4M3 is supported"),
        ({f"{QUERIES}_scale_inv": torch.ones(1)}, r"has a scale F32 \[1\] in place of \[1, 1\]"),
        ({f"{QUERIES}_scale_inv": torch.ones(1, 1, dtype=torch.uint8)}, r"has a scale U8 \[1, 1\] in place of"),
    ],
)
def test_files_whose_scales_do_not_fit_are_refused_by_the_tensors_name(
    changes: dict[str, Tensor | None], fault: str, tmp_path: Path
) -> None:
    directory = quantise_in_blocks(make_tiny_text(tmp_path / "whole"), tmp_path / "quantised")
    check_files(directory, "source")
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: one for name, one in tensors.items() if one is not None}, path, {"format": "pt"})
    with pytest.raises(BackendFailed, match=rf"source: {QUERIES}(_scale_inv)? {fault}"):
        check_files(directory, "source")
    with pytest.raises(BackendFailed, match=rf"source: {QUERIES}(_scale_inv)? {fault}"):
        find("a", directory, BackendConfig(models={"a": "source"}, device="cpu"), Machine(64 << 30))


def test_the_plan_counts_a_base_in_fp8_as_it_is_in_memory(tmp_path: Path) -> None:
    whole = make_tiny_text(tmp_path / "whole")
    quantised = quantise_in_blocks(whole, tmp_path / "quantised")
    config, machine = BackendConfig(models={"a": "source"}, device="cpu"), Machine(64 << 30)
    wanted, found = (find("a", directory, config, machine) for directory in (whole, quantised))
    assert found.size == wanted.size and found.spec.weight_bytes == wanted.spec.weight_bytes
    assert found.spec.is_quantised and not wanted.spec.is_quantised


def test_the_plan_counts_linears_that_stay_in_fp8_by_their_bytes(tmp_path: Path) -> None:
    quantised = quantise_in_blocks(make_tiny_text(tmp_path / "whole"), tmp_path / "quantised")
    config = BackendConfig(models={"a": str(quantised)}, device="cpu")
    whole, found = (
        describe_models(config.model_copy(update={"base_precision": one}), Machine(64 << 30))["a"]
        for one in (None, "fp8")
    )
    weights = load_file(quantised / "model.safetensors")
    matrices = [tensor for tensor in weights.values() if tensor.dtype == torch.float8_e4m3fn]
    saved = sum((4 - 1) * tensor.numel() - 16 for tensor in matrices)  # each is one block
    assert found.spec.base_precision == "fp8" and found.spec.base_copies == 2
    demands = [(one.size, present(one.demand)) for one in (whole, found)]
    for in_bfloat16, in_fp8 in (
        [trainer_parts(*one, 1, True, "cpu")["base"] for one in demands],
        [engine_parts(*one, 1, "cpu")["base"] for one in demands],
    ):
        assert in_bfloat16 - in_fp8 == saved > 0
    divided = [engine_parts(*one, 2, "cpu")["base"] for one in demands]
    assert divided[0] - divided[1] == saved // 2
    sharded = [trainer_parts(*one, 2, False, "cpu")["base"] for one in demands]
    assert sharded[0] - sharded[1] > saved // 2, "ranks all-gather bytes"


def test_the_plan_counts_experts_that_stay_in_fp8_by_their_bytes(tmp_path: Path) -> None:
    quantised = quantise_in_blocks(make_tiny_moe(tmp_path / "whole"), tmp_path / "quantised")
    config = BackendConfig(models={"a": str(quantised)}, device="cpu")
    whole, found = (
        describe_models(config.model_copy(update={"base_precision": precision}), Machine(64 << 30))["a"].size.base_bytes
        for precision in (None, "fp8")
    )
    weights = load_file(quantised / "model.safetensors")
    matrices = {name: tensor for name, tensor in weights.items() if tensor.dtype == torch.float8_e4m3fn}
    assert any(".experts.0.gate_proj" in name for name in matrices)
    assert whole - found == sum(4 * matrix.numel() - packed_bytes(*matrix.shape) for matrix in matrices.values())


@pytest.mark.parametrize("name", ["30b-a3b", "Qwen/Qwen3.5-35B-A3B"])
def test_a_large_mixture_in_fp8_fits_one_gpu_of_80_gb(name: str) -> None:
    def plan(precision: BasePrecision | None) -> object:
        memory = Machine(0, [int(79.1 * 2**30)], ["H100"])
        return make_plan([shape(name, precision=precision)], BackendConfig(), memory, "cuda")

    with pytest.raises(BackendFailed):
        plan(None)
    assert plan("fp8")
    assert shape(name, precision="fp8").base_bytes < 0.55 * shape(name).base_bytes


def test_fp8_is_refused_beside_a_trained_tower_where_it_was_not_compared(tmp_path: Path) -> None:
    source = quantise_in_blocks(make_tiny_vl(tmp_path / "whole"), tmp_path / "quantised")
    config = BackendConfig(models={"a": str(source)}, device="cpu", base_precision="fp8", train_vision=True)
    with pytest.raises(BackendFailed, match=r"base_precision .*it has not been compared with backend\.train_vision"):
        describe_models(config, Machine(64 << 30))


def test_a_base_in_fp8_shares_one_copy_on_a_gpu(tmp_path: Path) -> None:
    whole = make_tiny_text(tmp_path / "whole")
    quantised = quantise_in_blocks(whole, tmp_path / "quantised")

    def is_shared(source: Path, **settings: object) -> bool:
        config = BackendConfig(models={"a": str(source)}, device="cuda", **settings)  # type: ignore[arg-type]
        return find("a", source, config, Machine(0, [80 << 30], ["H100"])).size.can_be_shared

    assert is_shared(whole) and is_shared(quantised) and is_shared(quantised, base_precision="fp8")
    assert not is_shared(quantised, dtype="float32") and is_shared(quantised, dtype="float32", base_copies=1)


def test_another_scale_is_another_base(tmp_path: Path) -> None:
    directory = quantise_in_blocks(make_tiny_text(tmp_path / "whole"), tmp_path / "quantised")
    before, path = fingerprint(directory), directory / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{QUERIES}_scale_inv"] *= 2
    save_file(tensors, path, {"format": "pt"})
    assert fingerprint(directory) != before
