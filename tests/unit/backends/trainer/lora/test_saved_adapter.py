"""Adapters that are read: PEFT's names, the names of Tinker's tools, other alphas, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models import make_tiny_moe
from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, InvalidInput
from tinker_server.backends.trainer.checkpoint_files import write_adapter
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.lora.saved_adapter import read_adapter
from tinker_server.weights import export

RANK = 4


def saved(
    model: torch.nn.Module, directory: Path, *, experts: bool = False, layout: Layout = "own"
) -> dict[str, Tensor]:
    """A trained adapter in `directory`/peft, in the names of the tools in `directory`, and as the trainer saves it in
    `directory`/own; returns its tensors."""
    adapters = Adapters(model, decoder_modules(model, experts=experts), max_rank=8)  # type: ignore[arg-type]
    adapter = adapters.create(Trainable(rank=RANK, seed=1, layout=layout))
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter.parameters:
        parameter.data.normal_(0, 0.1, generator=generator)
    for folder in ("own", export.PEFT):
        (directory / folder).mkdir(parents=True)
        write_adapter(directory / folder, adapter.tensors, adapter.config, "tiny", adapter.file_metadata)
    export.write_both_forms(directory)
    return {name: tensor.clone().contiguous() for name, tensor in adapter.tensors.items()}


@pytest.fixture
def text(tiny_text: Path, tmp_path: Path) -> dict[str, Tensor]:
    return saved(AutoModelForCausalLM.from_pretrained(tiny_text), tmp_path)


def mixture(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        make_tiny_moe(directory / "moe"), experts_implementation="eager"
    )
    return model


EXPERTS = "base_model.model.model.layers.1.mlp.experts"


@pytest.fixture
def sharing(tmp_path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter whose experts share factors, saved in all forms."""
    return saved(mixture(tmp_path), tmp_path / "service", experts=True, layout="service")


def test_an_adapter_with_shared_factors_is_read_from_each_form(sharing: dict[str, Tensor], tmp_path: Path) -> None:
    """That of the tools has a shared factor once, and PEFT's for each expert."""
    directories = {name: tmp_path / "service" / name for name in ("own", "", export.PEFT)}
    for directory in directories.values():
        read = read_adapter(directory, sharing, has_tower=False)
        assert read.keys() == sharing.keys() and all(torch.equal(read[name], sharing[name]) for name in sharing)
    shapes = {name: one.shape for name, one in load_file(directories[""] / ADAPTER_FILE).items() if EXPERTS in name}
    assert shapes == {name: one.shape for name, one in sharing.items() if EXPERTS in name}
    assert set(shapes.values()) == {(1, RANK, 64), (8, 96, RANK), (8, RANK, 96), (1, 64, RANK)}
    peft = load_file(directories[export.PEFT] / ADAPTER_FILE)
    for matrix, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        for half in ("lora_A", "lora_B"):
            stack = sharing[f"{EXPERTS}.{matrix}.{half}.weight"]
            for number in range(8):
                assert torch.equal(peft[f"{EXPERTS}.{number}.{name}.{half}.weight"], stack[number % len(stack)])
    config = json.loads((directories[export.PEFT] / ADAPTER_CONFIG_FILE).read_text())
    assert {"gate_proj", "up_proj", "down_proj"} <= set(config["target_modules"])
    assert not {"w1", "w2", "w3"} & set(config["target_modules"])
    layouts = {name: export.layout_in(directory / ADAPTER_FILE, RANK) for name, directory in directories.items()}
    assert set(layouts.values()) == {"service"}


def test_shared_factors_are_repeated_for_a_model_whose_experts_have_their_own(
    sharing: dict[str, Tensor], tmp_path: Path
) -> None:
    own = saved(mixture(tmp_path), tmp_path / "saved", experts=True)
    peft = load_file(tmp_path / "service" / export.PEFT / ADAPTER_FILE)
    for directory in (tmp_path / "service", tmp_path / "service" / export.PEFT):
        read = read_adapter(directory, own, has_tower=False)
        assert read.keys() == own.keys() and all(torch.equal(read[name], peft[name]) for name in own)


def test_adapters_of_experts_that_differ_are_refused_by_a_model_that_shares_factors(
    sharing: dict[str, Tensor], tmp_path: Path
) -> None:
    saved(mixture(tmp_path), tmp_path / "saved", experts=True)
    with pytest.raises(InvalidInput, match=r"experts\.w\d\.lora_\w\.weight has shape .* of this model share it"):
        read_adapter(tmp_path / "saved", sharing, has_tower=False)
    with pytest.raises(InvalidInput, match="the experts of the file differ in it, those of this model share it"):
        read_adapter(tmp_path / "saved" / export.PEFT, sharing, has_tower=False)
    lacking = tmp_path / "service" / export.PEFT / ADAPTER_FILE
    tensors = load_file(lacking)
    save_file({name: one for name, one in tensors.items() if f"{EXPERTS}.7." not in name}, lacking)
    with pytest.raises(InvalidInput, match="the file has 7 experts of it, this model 8"):
        read_adapter(lacking.parent, sharing, has_tower=False)


def test_an_empty_tensor_for_the_gate_that_experts_have_not_is_no_tensor(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mixer.experts.{}.lora_{}.weight"
    own = {
        name.format(w, half): torch.ones(*shape)
        for w in ("w1", "w2")
        for half, shape in (("A", (1, 2, 3)), ("B", (4, 5, 2)))
    }
    gate = {name.format("w3", "A"): torch.ones(1, 2, 0), name.format("w3", "B"): torch.ones(4, 0, 2)}
    (tmp_path / ADAPTER_CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 32}))
    save_file(own | gate, tmp_path / ADAPTER_FILE)
    assert read_adapter(tmp_path, own, has_tower=False).keys() == own.keys()


@pytest.mark.parametrize("kind", ["text", "images", "experts"])
def test_both_forms_of_an_export_give_the_tensors_that_were_trained(
    kind: str, tiny_text: Path, tiny_vl: Path, tmp_path: Path
) -> None:
    make: dict[str, Callable[[], torch.nn.Module]] = {
        "text": lambda: AutoModelForCausalLM.from_pretrained(tiny_text),
        "images": lambda: AutoModelForImageTextToText.from_pretrained(tiny_vl),
        "experts": lambda: AutoModelForCausalLM.from_pretrained(
            make_tiny_moe(tmp_path / "moe"), experts_implementation="eager"
        ),
    }
    own = saved(make[kind](), tmp_path / "saved", experts=kind == "experts")
    assert len(load_file(tmp_path / "saved" / ADAPTER_FILE)) <= len(own)
    for directory in (tmp_path / "saved", tmp_path / "saved" / export.PEFT):
        read = read_adapter(directory, own, has_tower=False)
        assert read.keys() == own.keys() and all(torch.equal(read[name], own[name]) for name in own)


@pytest.mark.parametrize("alpha", [16, 64.0, 48])
def test_another_alpha_gives_the_same_product(alpha: float, text: dict[str, Tensor], tmp_path: Path) -> None:
    changed(tmp_path / export.PEFT, lora_alpha=alpha)
    read = read_adapter(tmp_path / export.PEFT, text, has_tower=False)
    for name in text:
        scale = alpha / 32 if name.endswith("lora_B.weight") else 1
        np.testing.assert_array_equal(read[name].numpy(), text[name].numpy() * np.float32(scale))


def changed(directory: Path, **fields: object) -> None:
    path = directory / ADAPTER_CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [("alora_invocation_tokens", [1, 2]), ("use_dora", True), ("rank_pattern", {"q_proj": 2}), ("r", 8)],
)
def test_a_config_that_asks_for_more_than_a_product_is_refused_by_field(
    field: str, value: object, text: dict[str, Tensor], tmp_path: Path
) -> None:
    changed(tmp_path / export.PEFT, **{field: value})
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json: {field} "):
        read_adapter(tmp_path / export.PEFT, text, has_tower=False)


def test_the_weight_of_a_head_that_peft_adds_is_refused_with_the_remedy(tiny_text: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_text)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="save_embedding_layers"):
        peft.save_pretrained(tmp_path / "as-it-is")
    peft.save_pretrained(tmp_path / "without", save_embedding_layers=False)
    own = load_file(tmp_path / "without" / ADAPTER_FILE)
    with pytest.raises(InvalidInput, match=r"lm_head\.base_layer\.weight, which .*save_embedding_layers=False"):
        read_adapter(tmp_path / "as-it-is", own, has_tower=False)
    assert read_adapter(tmp_path / "without", own, has_tower=False).keys() == own.keys()


def test_a_tensor_that_is_missing_or_unknown_is_named(text: dict[str, Tensor], tmp_path: Path) -> None:
    for directory, form in ((tmp_path / export.PEFT, "PEFT"), (tmp_path, "Tinker's tools")):
        tensors = load_file(directory / ADAPTER_FILE)
        first = sorted(tensors)[0]
        save_file({name: one for name, one in tensors.items() if name != first}, directory / ADAPTER_FILE)
        with pytest.raises(InvalidInput, match=rf"which has {first} in the names of {form}"):
            read_adapter(directory, text, has_tower=False)
        save_file({**tensors, "base_model.model.visual.q.lora_A.weight": torch.ones(1)}, directory / ADAPTER_FILE)
        with pytest.raises(
            InvalidInput, match=rf"has no base_model\.model\.visual\.q\.lora_A\.weight in the .* {form}"
        ):
            read_adapter(directory, text, has_tower=False)


def test_tensors_that_are_unknown_and_missing_are_both_named(text: dict[str, Tensor], tmp_path: Path) -> None:
    first, *others = sorted(text)
    renamed = {"of.another.model.lora_A.weight": text[first], **{name: text[name] for name in others}}
    save_file(renamed, tmp_path / export.PEFT / ADAPTER_FILE)
    with pytest.raises(
        InvalidInput, match=rf"which has {first} and which has no of\.another\.model\.lora_A\.weight in"
    ):
        read_adapter(tmp_path / export.PEFT, text, has_tower=False)


def test_the_tools_names_are_not_taken_for_a_model_with_a_tower(text: dict[str, Tensor], tmp_path: Path) -> None:
    """A tower's tensors would all have the head's name."""
    read_adapter(tmp_path / export.PEFT, text, has_tower=True)
    with pytest.raises(InvalidInput, match="in the names of PEFT"):
        read_adapter(tmp_path, text, has_tower=True)


def test_a_stack_of_fewer_experts_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_moe(tmp_path / "moe"), experts_implementation="eager")
    own = saved(model, tmp_path / "saved", experts=True)
    tensors = load_file(tmp_path / "saved" / ADAPTER_FILE)
    stack = next(name for name in tensors if ".experts.w1." in name)
    save_file({**tensors, stack: tensors[stack][1:].contiguous()}, tmp_path / "saved" / ADAPTER_FILE)
    with pytest.raises(InvalidInput, match=rf"{stack} has shape .*a stack of {len(tensors[stack])} experts"):
        read_adapter(tmp_path / "saved", own, has_tower=False)


def test_a_stack_of_many_experts_is_read_in_the_order_of_their_numbers(text: dict[str, Tensor], tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.experts.{}.gate_proj.lora_A.weight"
    own = {name.format(i): torch.zeros(2, 3) for i in range(12)}  # as text, 10 comes before 2
    stack = "base_model.model.model.layers.0.mlp.experts.w1.lora_A.weight"
    changed(tmp_path, r=2)
    save_file({stack: torch.arange(12.0).reshape(12, 1, 1).expand(12, 2, 3).contiguous()}, tmp_path / ADAPTER_FILE)
    read = read_adapter(tmp_path, own, has_tower=False)
    assert [float(read[one][0, 0]) for one in own] == list(range(12))


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"{}"])
def test_what_is_no_safetensors_file_is_refused(content: bytes, text: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / export.PEFT / ADAPTER_FILE).write_bytes(content)
    with pytest.raises(InvalidInput, match="no safetensors file"):
        read_adapter(tmp_path / export.PEFT, text, has_tower=False)


def test_integers_are_refused(text: dict[str, Tensor], tmp_path: Path) -> None:
    name = next(iter(text))
    save_file({**text, name: text[name].to(torch.int32)}, tmp_path / export.PEFT / ADAPTER_FILE)
    with pytest.raises(InvalidInput, match=f"{name} is of type I32; F32, F16, BF16 are taken"):
        read_adapter(tmp_path / export.PEFT, text, has_tower=False)
