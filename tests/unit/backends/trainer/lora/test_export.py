"""Exported adapters: the names of the tinker weight tools, the tensors of the trainer."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models import (
    make_tiny_gemma3,
    make_tiny_internvl,
    make_tiny_qwen2_5_vl,
    make_tiny_qwen3_5,
    make_tiny_smolvlm,
    make_tiny_text,
    make_tiny_vl,
)
from tinker_server.api_schemas.adapter_names import tinker_name
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.lora_names import decoder_modules
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinker_server.backends.trainer import checkpoint_files
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.weights import export

RANK = 4


@pytest.mark.parametrize(
    ("peft", "exported"),
    [
        ("model.language_model.layers.11.self_attn.q_proj", "layers.11.self_attn.q_proj"),
        ("model.layers.0.mlp.gate_proj", "layers.0.mlp.gate_proj"),
        ("layers.2.self_attn.o_proj", "layers.2.self_attn.o_proj"),
        ("lm_head", "unembed_tokens"),
        ("language_model.lm_head", "unembed_tokens"),
    ],
)
def test_names_are_those_of_a_text_decoder(peft: str, exported: str) -> None:
    for half in ("lora_A", "lora_B"):
        name = tinker_name(f"base_model.model.{peft}.{half}.weight")
        assert name == (f"base_model.model.model.{exported}.{half}.weight", None)


@pytest.mark.parametrize(("peft", "exported"), [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")])
def test_matrices_of_experts_have_the_vendors_names_and_an_index_in_their_stack(peft: str, exported: str) -> None:
    name = tinker_name(f"base_model.model.language_model.model.layers.3.mlp.experts.11.{peft}.lora_B.weight")
    assert name == (f"base_model.model.model.layers.3.mlp.experts.{exported}.lora_B.weight", 11)


@pytest.mark.parametrize(("peft", "exported"), [("up_proj", "w1"), ("down_proj", "w2")])
def test_matrices_of_experts_without_a_gate_have_the_tools_names(peft: str, exported: str) -> None:
    """As `tinker_cookbook.weights` maps them for Nemotron-3."""
    name = tinker_name(f"base_model.model.model.layers.3.mixer.experts.11.{peft}.lora_B.weight")
    assert name == (f"base_model.model.model.layers.3.mixer.experts.{exported}.lora_B.weight", 11)


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_experts_under_the_names_of_mixtrals_files_are_exported_like_all_others(matrix: str) -> None:
    name = tinker_name(f"base_model.model.model.layers.3.block_sparse_moe.experts.11.{matrix}.lora_A.weight")
    assert name == (f"base_model.model.model.layers.3.mlp.experts.{matrix}.lora_A.weight", 11)


def test_experts_become_one_stack_in_their_order(tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.model.layers.0.mlp.experts.{i}.{matrix}_proj.lora_{half}.weight": np.full(shape, value + i)
        for i in range(12)  # as text, 10 comes before 2
        for value, matrix in ((0.0, "gate"), (100.0, "up"), (200.0, "down"))
        for half, shape in (("A", (2, 3)), ("B", (5, 2)))
    }
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = np.arange(6.0).reshape(2, 3)
    save_file(tensors, tmp_path / "a")
    export.rename_tensors(tmp_path / "a", tmp_path / "b")
    stacks = load_file(tmp_path / "b")
    assert len(stacks) == 7
    for value, matrix in ((0.0, "w1"), (100.0, "w3"), (200.0, "w2")):
        for half, shape in (("A", (12, 2, 3)), ("B", (12, 5, 2))):
            stack = stacks[f"base_model.model.model.layers.0.mlp.experts.{matrix}.lora_{half}.weight"]
            assert stack.shape == shape and stack[:, 0, 0].tolist() == [value + i for i in range(12)]
    assert np.array_equal(stacks["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][1], [3.0, 4.0, 5.0])


def test_a_stack_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.experts.{}.gate_proj.lora_A.weight"
    save_file({name.format(i): np.ones((2, 3)) for i in (0, 2)}, tmp_path / "a")
    with pytest.raises(ValueError, match="an expert of the layer has no tensor"):
        export.rename_tensors(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ["model.layers.0.q_proj.lora_A.weight", "base_model.model.lm_head.weight", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a tensor of an adapter"):
        tinker_name(name)


@pytest.mark.parametrize("kind", ["vl", "text"])
def test_every_tensor_of_a_trained_adapter_is_there_once(
    kind: str, tiny_vl: Path, tiny_text: Path, tmp_path: Path
) -> None:
    source, auto = (tiny_vl, AutoModelForImageTextToText) if kind == "vl" else (tiny_text, AutoModelForCausalLM)
    model = auto.from_pretrained(source)
    text = model.config.get_text_config()
    adapter = Adapters(model, decoder_modules(model), max_rank=8).create(Trainable(rank=RANK, seed=1))
    with torch.no_grad():
        for number, tensor in enumerate(adapter.parameters):
            tensor.add_(number)
    peft, exported = tmp_path / "peft", tmp_path / "exported"
    checkpoint_files.write_directory(
        peft, lambda aside: checkpoint_files.write_adapter(aside, adapter.tensors, adapter.config, kind)
    )
    exported.mkdir()
    export.write_tinker_form(peft, exported)

    trained, renamed = load_file(peft / ADAPTER_FILE), load_file(exported / ADAPTER_FILE)
    assert trained.keys() == adapter.tensors.keys()
    for name, parameter in adapter.tensors.items():
        assert np.array_equal(trained[name], parameter.detach().numpy())
        assert np.array_equal(renamed[tinker_name(name)[0]], trained[name])

    # The expected names and shapes, from the model's config alone.
    hidden, heads, inner = text.hidden_size, text.num_attention_heads * text.head_dim, text.intermediate_size
    keys = text.num_key_value_heads * text.head_dim
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
    }
    sizes |= {"self_attn.o_proj": (heads, hidden), "mlp.gate_proj": (hidden, inner)}
    sizes |= {"mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    modules = {f"layers.{i}.{name}": size for i in range(text.num_hidden_layers) for name, size in sizes.items()}
    modules["unembed_tokens"] = (hidden, text.vocab_size)
    expected = {}
    for module, (inputs, outputs) in modules.items():
        expected[f"base_model.model.model.{module}.lora_A.weight"] = (RANK, inputs)
        expected[f"base_model.model.model.{module}.lora_B.weight"] = (outputs, RANK)
    assert {name: tensor.shape for name, tensor in renamed.items()} == expected

    config = json.loads((exported / ADAPTER_CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, 32)
    assert config["target_modules"] == sorted({module.split(".")[-1] for module in modules})


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    "make",
    [
        make_tiny_vl,
        make_tiny_qwen2_5_vl,
        make_tiny_internvl,
        make_tiny_smolvlm,
        make_tiny_gemma3,
        make_tiny_qwen3_5,
        make_tiny_text,
    ],
)
def test_peft_adapts_the_modules_of_the_file_and_no_others(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """The linears of a frozen tower stay, though their names may end as the decoder's."""
    source = make(tmp_path / "model")
    auto = AutoModelForCausalLM if make is make_tiny_text else AutoModelForImageTextToText
    model = auto.from_pretrained(source)
    modules = decoder_modules(model, linear_attention=True)
    adapter = Adapters(model, modules, max_rank=8).create(Trainable(rank=RANK, seed=1))
    checkpoint_files.write_directory(
        tmp_path / "peft", lambda aside: checkpoint_files.write_adapter(aside, adapter.tensors, adapter.config, "m")
    )
    loaded = PeftModel.from_pretrained(auto.from_pretrained(source), tmp_path / "peft")
    adapted = {name.partition(".lora_A.")[0] for name, _ in loaded.named_parameters() if ".lora_A." in name}
    assert adapted == {f"base_model.model.{name}" for names in modules.values() for name in names}


def exported(tmp_path: Path, *modules: str) -> Path:
    """The exported directory of an adapter of these modules."""
    peft = tmp_path / "peft"
    peft.mkdir()
    shapes = {"A": (RANK, 3), "B": (5, RANK)}
    tensors = {
        f"base_model.model.{module}.lora_{half}.weight": torch.ones(shape)
        for module in modules
        for half, shape in shapes.items()
    }
    checkpoint_files.write_adapter(peft, tensors, Trainable(rank=RANK, seed=1), "m")
    export.write_tinker_form(peft, tmp_path)
    return tmp_path


def test_peft_refuses_the_tools_form_and_says_where_its_own_is(tmp_path: Path) -> None:
    """For a model with a tower PEFT would load it without an error, and ignore the modules that it names
    differently."""
    directory = exported(tmp_path, "model.language_model.layers.0.self_attn.q_proj", "lm_head")
    for load in (PeftConfig.from_pretrained, PeftLoraConfig.from_pretrained):
        with pytest.raises(KeyError, match=r"names of Tinker's tools; PEFT's form is in the directory peft/ beside"):
            load(directory)
    with pytest.raises(KeyError, match="PEFT's form is in the directory peft/"):
        PeftModel.from_pretrained(torch.nn.Linear(1, 1), directory)
    assert PeftConfig.from_pretrained(directory / "peft").peft_type == "LORA"
    readme = (directory / "README.txt").read_text()
    assert "tinker_cookbook.weights alone" in readme and 'PeftModel.from_pretrained(model, ".../peft")' in readme


def test_an_export_with_a_tower_says_that_only_peft_loads_it(tmp_path: Path) -> None:
    directory = exported(tmp_path, "model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2")
    assert {path.name for path in directory.iterdir()} == {"peft", "README.txt"}
    readme = (directory / "README.txt").read_text()
    assert "There is no other form" in readme and "adapter_config.json" not in readme


def test_tensors_keep_their_type_and_the_file_its_metadata(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors: dict[str, np.ndarray] = {
        name: np.arange(3, dtype=np.float16)[None],
        name.replace("_A", "_B"): np.ones((5, 1), np.float64),
    }
    save_file(tensors, tmp_path / "a", {"format": "pt"})
    assert sorted(export.rename_tensors(tmp_path / "a", tmp_path / "b")) == sorted(tensors)
    with safe_open(tmp_path / "b", "np") as file:
        assert file.metadata() == {"format": "pt"}
        for key, tensor in tensors.items():
            assert file.get_tensor(key).dtype == tensor.dtype and np.array_equal(file.get_tensor(key), tensor)


def test_two_tensors_of_one_exported_name_are_refused(tmp_path: Path) -> None:
    tensors = {f"base_model.model.{head}.lora_A.weight": np.ones((1, 2), np.float32) for head in ("a_head", "b_head")}
    save_file(tensors, tmp_path / "a")
    with pytest.raises(ValueError, match="same exported name"):
        export.rename_tensors(tmp_path / "a", tmp_path / "b")
