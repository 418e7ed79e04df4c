"""Files in bfloat16 whose matrices are quantised as they are read."""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import FAMILIES, make_tiny_moe, make_tiny_text, publish_in_fp8
from tinker_server.backends.base_weights.mapped import Files
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models, find
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.families.coverage import fp8_matrices
from tinker_server.backends.formats.block_fp8 import dequantised, packed
from tinker_server.backends.formats.fp8_at_load import Origin, find_origins, pack_at_load, quantise
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed

MACHINE = Machine(64 << 30)
DOWN, INTO = "a.experts.down_proj", "a.experts.gate_up_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (1300, 200), (5, 129)])
def test_a_block_has_the_scale_that_makes_its_largest_number_the_largest_of_fp8(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:128, :128] *= 1e-30
    weight[-1:, 128:] = 0
    before = weight.clone()
    numbers, scales = quantise(weight)
    assert weight.equal(before) and numbers.shape == weight.shape
    for row in range(0, outputs, 128):
        for column in range(0, inputs, 128):
            block = weight[row : row + 128, column : column + 128].float()
            scale = block.abs().max() / 448 if block.any() else torch.ones(())
            assert scales[row // 128, column // 128] == scale
            got = numbers[row : row + 128, column : column + 128].float()
            assert got.equal((block / scale).to(torch.float8_e4m3fn).float())
            assert got.abs().max() == (448 if block.any() else 0)
    # A number keeps three bits behind its first, or is as near as the smallest number of fp8 is.
    apart = (dequantised(numbers, scales, torch.float32) - weight.float()).abs()
    smallest = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs] * 2**-10
    assert (apart <= torch.maximum(weight.float().abs() / 16 * 1.001, smallest * 1.001)).all()


@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts_of_a_stack_are_found_in_both_forms_of_it(inputs_first: bool) -> None:
    count, hidden, inner = 3, 256, 128  # 2 I is H
    experts = torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
    stacks = [one.mT.contiguous() if inputs_first else one for one in experts]
    layouts = {name: ("BF16", [*one.shape]) for name, one in zip((INTO, DOWN), stacks, strict=True)}
    names = [f"a.experts.{number}.{kind}_proj.weight" for number in range(4) for kind in ("gate", "up", "down")]
    origins = find_origins(layouts, names)
    assert list(origins) == names[:9]
    loaded = dict(pack_at_load([(INTO, stacks[0]), (DOWN, stacks[1]), ("other", stacks[1])], origins))
    assert loaded.keys() == {*names[:9], "other"}
    for number in range(count):
        wanted = {"gate": experts[0][number, :inner], "up": experts[0][number, inner:], "down": experts[1][number]}
        for kind, matrix in wanted.items():
            name = f"a.experts.{number}.{kind}_proj.weight"
            assert origins[name].shape == matrix.shape
            assert loaded[name].equal(packed(*quantise(matrix))), name


def test_matrices_of_files_in_fp8_and_of_other_forms_have_no_origin() -> None:
    layouts = {
        "in fp8": ("F8_E4M3", [128, 128]),
        "bias": ("BF16", [128]),
        "packed": ("U8", [128, 128]),
        "mine": ("F32", [4, 6]),
        INTO: ("BF16", [2, 100, 50]),
        DOWN: ("BF16", [2, 50, 60]),
    }
    found = find_origins(layouts, [*layouts, "missing", "a.experts.0.up_proj.weight"])
    assert found == {"mine": Origin("mine", (4, 6))}


def test_what_is_held_is_compared_with_what_the_files_are_quantised_to(tmp_path: Path) -> None:
    weight = torch.randn(700, 200).bfloat16()
    save_file({"a.weight": weight}, tmp_path / "model.safetensors", {"format": "pt"})
    numbers, scales = quantise(weight)
    with Files(tmp_path, torch.bfloat16, ["a.weight"]) as files:
        assert files.tensor("a.weight").equal(packed(numbers, scales))
        files.require_same_packed("a.weight", packed(numbers, scales))
        for row in (0, 3, 696, 699):
            changed = numbers.clone().view(torch.uint8)
            changed[row, -1] ^= 1
            with pytest.raises(BackendFailed, match=r"a\.weight: the shared copy differs from the file"):
                files.require_same_packed("a.weight", packed(changed.view(torch.float8_e4m3fn), scales))
        for block in (0, 5):
            changed = scales.clone()
            changed[block, -1] *= 2
            with pytest.raises(BackendFailed, match=r"a\.weight, scales: the shared copy differs from the file"):
                files.require_same_packed("a.weight", packed(numbers, changed))


@pytest.mark.parametrize("shape", [(128, 100), (3, 7)])
def test_small_matrices_are_compared_whole(shape: tuple[int, int], tmp_path: Path) -> None:
    weight = torch.randn(shape).bfloat16()
    save_file({"a.weight": weight}, tmp_path / "model.safetensors", {"format": "pt"})
    numbers, scales = quantise(weight)
    with Files(tmp_path, torch.bfloat16, ["a.weight"]) as files:
        files.require_same_packed("a.weight", packed(numbers, scales))
        changed = numbers.clone().view(torch.uint8)
        changed[shape[0] // 2, 5] ^= 1
        with pytest.raises(BackendFailed, match=r"a\.weight: the shared copy differs from the file at every index"):
            files.require_same_packed("a.weight", packed(changed.view(torch.float8_e4m3fn), scales))


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3 MoE", "Qwen3-VL MoE", "Qwen3.5 MoE", "Qwen3-Next", "DeepSeek-V3"])
def test_the_plan_counts_what_is_quantised_at_load_as_published_files(kind: str, tmp_path: Path) -> None:
    makers = {"Qwen3": make_tiny_text, "Qwen3 MoE": make_tiny_moe, **FAMILIES}
    source = makers[kind](tmp_path / "whole")
    published = publish_in_fp8(source, tmp_path / "published")
    precise, made, found = _size(source), _size(source, "fp8"), _size(published, "fp8")
    assert made == found and made.base_bytes < precise.base_bytes
    assert _staying(source) == _staying(published)


@pytest.mark.parametrize("is_published", [True, False])
def test_packed_matrices_of_a_layer_are_listed_side_by_side(is_published: bool, tmp_path: Path) -> None:
    source = make_tiny_moe(tmp_path / "whole", dense_layers=())
    directory = publish_in_fp8(source, tmp_path / "published") if is_published else source
    with Files(directory, torch.bfloat16, set(_staying(directory))) as files:
        experts = [name.split(".mlp.")[0] for name in files.layouts() if ".experts." in name]
    layers = [layer for layer, _ in groupby(experts)]
    assert len(experts) > len(layers) == len(set(layers)) > 1


def _size(source: Path, precision: str | None = None) -> ModelSize:
    config = BackendConfig(models={"a": "source"}, device="cpu", base_precision=precision)  # type: ignore[arg-type]
    return find("a", source, config, MACHINE).size


def _staying(source: Path) -> dict[str, tuple[int, int]]:
    renderer = Renderer(str(source), image_cache_bytes=0, max_image_pixels=10**7)
    return fp8_matrices(renderer.family, renderer.config, str(source))


def test_a_base_that_is_quantised_is_another_base_and_says_so(tmp_path: Path) -> None:
    source = make_tiny_text(tmp_path / "whole")
    config = BackendConfig(models={"a": str(source)}, device="cpu")
    precise = describe_models(config, MACHINE)["a"].spec
    made = describe_models(config.model_copy(update={"base_precision": "fp8"}), MACHINE)["a"].spec
    assert made.fingerprint != precise.fingerprint and made.makes_fp8 and not precise.makes_fp8
    assert made.numerics == {**precise.numerics, "base_precision": "fp8, quantised at load"}
    published = publish_in_fp8(source, tmp_path / "published")
    config = BackendConfig(models={"a": str(published)}, device="cpu")
    kept = describe_models(config.model_copy(update={"base_precision": "fp8"}), MACHINE)["a"].spec
    assert kept.fingerprint == describe_models(config, MACHINE)["a"].spec.fingerprint and not kept.makes_fp8
    assert kept.numerics == {**precise.numerics, "base_precision": "fp8"}


@pytest.mark.parametrize(
    ("kind", "others", "reason"),
    [
        ("gpt-oss", {}, "GptOssForCausalLM has not been compared in fp8"),
        ("Nemotron-3", {}, "NemotronHForCausalLM has not been compared in fp8"),
        ("Qwen3-VL MoE", {"train_vision": True}, "it has not been compared with backend.train_vision"),
    ],
)
def test_what_cannot_be_quantised_at_load_is_refused_by_name(
    kind: str, others: Mapping[str, object], reason: str, tmp_path: Path
) -> None:
    config = BackendConfig(models={"a": str(FAMILIES[kind](tmp_path / "model"))}, device="cpu", base_precision="fp8")
    with pytest.raises(BackendFailed, match=rf"is not supported: .*{reason}"):
        describe_models(config.model_copy(update=dict(others)), MACHINE)


def test_files_whose_matrices_have_other_names_are_refused(tmp_path: Path) -> None:
    source = make_tiny_text(tmp_path / "whole")
    path = source / "model.safetensors"
    tensors: dict[str, Tensor] = {f"inner.{name}": one for name, one in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(BackendFailed, match="the files have no matrix of the decoder in a tensor of its own name"):
        _size(source, "fp8")
