"""Files of adapters of the hosted service's target modules: each form gives the same numbers, PEFT loads its own, and
what is of no form is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.models import make_tiny_deepseek_v3, make_tiny_nemotron_h, make_tiny_qwen3_5, make_tiny_qwen3_next
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.coverage import check_coverage
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.formats.stacked_adapters import open_adapter
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from tinker_server.backends.trainer.checkpoint_files import write_adapter
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.lora.linear import ALPHA
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.lora.saved_adapter import read_adapter
from tinker_server.weights import export

RANK = 3
KINDS: dict[str, Callable[[Path], Path]] = {
    "Qwen3.5": make_tiny_qwen3_5,
    "Qwen3.5 with experts": lambda path: make_tiny_qwen3_5(path, moe=True),
    "Qwen3-Next": make_tiny_qwen3_next,
    "Nemotron-H": make_tiny_nemotron_h,
    "DeepSeek-V3": make_tiny_deepseek_v3,
}
WHOLES = {
    "Qwen3.5": {"in_proj_qkv": 3},
    "Qwen3.5 with experts": {"in_proj_qkv": 3},
    "Qwen3-Next": {"in_proj_qkvz": 4},
    "Nemotron-H": {"in_proj": 2},
    "DeepSeek-V3": {},
}
"""Linears that have several adapters, and how many."""
FORMS = ("own", "", export.PEFT)


class Saved(NamedTuple):
    """An adapter that was saved in all forms."""

    base: PreTrainedModel
    model: LoraModel
    tensors: dict[str, Tensor]
    directory: Path

    def read(self, form: str) -> dict[str, Tensor]:
        return read_adapter(self.directory / form, self.tensors, has_tower=False, divided=self.model.divided_linears)


def load_base(source: Path) -> PreTrainedModel:
    is_for_images = "vision_config" in json.loads((source / "config.json").read_text())
    auto = AutoModelForImageTextToText if is_for_images else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    return model


def save(kind: str, directory: Path, trainable: Trainable) -> Saved:
    source = KINDS[kind](directory / "model")
    base = load_base(source)
    modules = decoder_modules(base, experts=True, linear_attention=True, latent_attention=True)
    model = Adapters(base, modules, max_rank=8).create(trainable)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters:
        parameter.data.normal_(0, 0.1, generator=generator)
    for folder in ("own", export.PEFT):
        (directory / folder).mkdir(parents=True)
        write_adapter(directory / folder, model.tensors, model.config, "tiny", model.file_metadata)
    export.write_both_forms(directory)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.tensors.items()}
    return Saved(load_base(source), model, tensors, directory)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def saved(kind: str, tmp_path: Path) -> Saved:
    return save(kind, tmp_path, Trainable(rank=RANK, seed=1, layout="service"))


def test_each_form_gives_the_same_tensors_and_tells_its_layout(saved: Saved, kind: str) -> None:
    for form in FORMS:
        read = saved.read(form)
        assert read.keys() == saved.tensors.keys()
        assert all(torch.equal(read[name], saved.tensors[name]) for name in read)
        assert export.layout_in(saved.directory / form / ADAPTER_FILE, RANK) == "service"
    config = json.loads((saved.directory / export.PEFT / ADAPTER_CONFIG_FILE).read_text())
    assert config.get("rank_pattern", {}) == {name: count * RANK for name, count in WHOLES[kind].items()}


def test_no_form_has_more_numbers_than_an_upload_may_have(saved: Saved, kind: str) -> None:
    config = saved.base.config
    numbers = check_coverage(find_family(config, str(saved.directory / "model")), config, kind)
    for form in FORMS:
        tensors = load_file(saved.directory / form / ADAPTER_FILE).values()
        assert sum(tensor.numel() for tensor in tensors) <= RANK * numbers.largest_file
    assert sum(tensor.numel() for tensor in saved.tensors.values()) == RANK * numbers.of_layout("service")
    assert (numbers.largest_file > numbers.adapter) == bool(WHOLES[kind])


def test_the_engine_finds_the_parts_in_each_form(saved: Saved) -> None:
    for form in ("own", export.PEFT):
        with open_adapter(str(saved.directory / form / ADAPTER_FILE), "pt") as file:
            for name, tensor in saved.tensors.items():
                if ".experts." not in name:
                    assert torch.equal(file.get_tensor(name), tensor)
            assert {name for name in file.keys() if "in_proj" in name} == {  # noqa: SIM118 - it is no mapping
                name for name in saved.tensors if "in_proj" in name
            }


def added(base: PreTrainedModel, saved: Saved, name: str) -> Tensor:
    """What the parts of a divided linear add to its weight, by the sizes of transformers' layers."""
    parent, _, last = name.rpartition(".")
    total = torch.zeros_like(base.get_parameter(f"{name}.weight"))
    for part, (begin, end, num_runs) in saved.model.divided_linears[last].parts.items():
        halves = (saved.tensors[f"base_model.model.{parent}.{part}.lora_{half}.weight"] for half in "BA")
        by_run = total.unflatten(0, (num_runs, -1))
        by_run[:, begin:end] += (ALPHA / RANK * next(halves) @ next(halves)).unflatten(0, (num_runs, -1))
    return total


def test_peft_adds_the_products_of_all_parts_in_their_rows(kind: str, tmp_path: Path) -> None:
    saved = save(kind, tmp_path, Trainable(rank=RANK, seed=1, train_mlp=False, layout="service"))
    before = {name: parameter.clone() for name, parameter in saved.base.named_parameters()}
    # By this name PEFT refuses Mamba's out_proj, whose weight some kernels read beside its module.
    vars(saved.base.config)["model_type"] = "of linears alone"
    merged = PeftModel.from_pretrained(saved.base, saved.directory / export.PEFT).merge_and_unload()
    differing = [name for name, parameter in merged.named_parameters() if not parameter.equal(before[name])]
    changed = {name.removesuffix(".weight") for name in differing}
    divided = {name for name in changed if name.rpartition(".")[2] in WHOLES[kind]}
    parts = {part for linear in saved.model.divided_linears.values() for part in linear.parts}
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in saved.tensors}
    assert {name for name in modules if name.rpartition(".")[2] not in parts} | divided == changed
    assert bool(divided) == bool(WHOLES[kind])
    for name in divided:
        expected = before[f"{name}.weight"] + added(saved.base, saved, name)
        torch.testing.assert_close(merged.get_parameter(f"{name}.weight"), expected)


def test_an_adapter_of_the_own_layout_is_told_from_it_by_its_linears(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path, Trainable(rank=RANK, seed=1, train_mlp=False))
    assert {export.layout_in(tmp_path / form / ADAPTER_FILE, RANK) for form in FORMS} == {"own"}


@pytest.fixture
def divided(tmp_path: Path) -> Saved:
    return save("Qwen3.5", tmp_path, Trainable(rank=RANK, seed=1, layout="service"))


def change_config(saved: Saved, **fields: object) -> None:
    path = saved.directory / export.PEFT / ADAPTER_CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(saved: Saved, tensors: dict[str, Tensor]) -> None:
    path = saved.directory / export.PEFT / ADAPTER_FILE
    save_file(load_file(path) | tensors, path)


def whole_b(saved: Saved) -> tuple[str, Tensor]:
    tensors = load_file(saved.directory / export.PEFT / ADAPTER_FILE)
    return next((name, one) for name, one in tensors.items() if name.endswith("in_proj_qkv.lora_B.weight"))


def test_a_number_outside_the_blocks_is_refused(divided: Saved) -> None:
    name, tensor = whole_b(divided)
    tensor[0, RANK] = 1e-6
    change_tensors(divided, {name: tensor})
    with pytest.raises(InvalidInput, match=rf"{name} is not zero .*in_proj_q, in_proj_k, in_proj_v"):
        divided.read(export.PEFT)


def test_a_whole_linear_of_other_rows_is_refused(divided: Saved) -> None:
    name, tensor = whole_b(divided)
    change_tensors(divided, {name: tensor[1:].contiguous()})
    with pytest.raises(InvalidInput, match=rf"has {len(tensor) - 1} rows; this model's linear has {len(tensor)}"):
        divided.read(export.PEFT)


def test_a_part_that_is_there_alone_and_in_a_whole_is_refused(divided: Saved) -> None:
    part = next(name for name in divided.tensors if "in_proj_q." in name)
    change_tensors(divided, {part: divided.tensors[part]})
    with pytest.raises(InvalidInput, match=rf"has {part} twice"):
        divided.read(export.PEFT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_pattern": {}}, "rank_pattern and r 3 give .*in_proj_qkv.* the rank 3; it must have 3 times r"),
        ({"rank_pattern": {"in_proj_qkv": 6}}, ".*give .*in_proj_qkv.* the rank 6; it must have 3 times r"),
        ({"rank_pattern": {"in_proj_qkv": 9, "o_proj": 4}}, ".*o_proj.* the rank 4; it must have r"),
        ({"rank_pattern": {"(a+)+": 9}}, r"rank_pattern '\(a\+\)\+' is not supported: only a name"),
        ({"rank_pattern": [1]}, "rank_pattern is no object"),
        ({"rank_pattern": {"in_proj_qkv": True}}, "rank_pattern of in_proj_qkv True is not an integer"),
        ({"alpha_pattern": {"in_proj_qkv": 0}}, "alpha_pattern of in_proj_qkv 0 is not a number above 0"),
    ],
)
def test_patterns_that_give_no_parts_are_refused(fields: dict[str, object], message: str, divided: Saved) -> None:
    change_config(divided, **fields)
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json: {message}"):
        divided.read(export.PEFT)


def test_an_alpha_of_some_modules_scales_these_as_in_peft(divided: Saved) -> None:
    change_config(divided, alpha_pattern={"in_proj_qkv": 3 * ALPHA, "layers.0.mlp.up_proj": ALPHA / 4})
    read = divided.read(export.PEFT)
    scaled = [name for name in read if not torch.equal(read[name], divided.tensors[name])]
    (name,) = scaled
    assert name.endswith("layers.0.mlp.up_proj.lora_B.weight")
    torch.testing.assert_close(read[name], divided.tensors[name] / 4)
