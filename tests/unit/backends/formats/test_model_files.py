"""Facts read from a base model's files."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig

from tests.models import make_tiny_text
from tinker_server.backends.formats.model_files import (
    fingerprint,
    kv_bytes_per_token,
    state_bytes_per_sequence,
    tensor_bytes,
)
from tinker_server.backends.protocol import BackendFailed


@pytest.fixture
def copy(tiny_text: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_text, tmp_path / "copy"))


def test_a_copy_has_the_same_fingerprint_whatever_wrote_its_config(tiny_text: Path, copy: Path) -> None:
    (copy / "README.md").write_text("A model.")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9.9", "_name_or_path": "there"}))
    assert fingerprint(copy) == fingerprint(tiny_text)
    assert len(fingerprint(copy)) == 64


def test_the_same_tensors_in_more_files_have_the_same_fingerprint(tiny_text: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, half in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in half}, copy / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(half, f"model-{number}.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint(copy) == fingerprint(tiny_text)
    assert tensor_bytes(copy) == tensor_bytes(tiny_text)


def test_other_weights_of_the_same_shapes_have_another_fingerprint(tiny_text: Path, tmp_path: Path) -> None:
    assert fingerprint(make_tiny_text(tmp_path / "other", seed=1)) != fingerprint(tiny_text)


def test_one_changed_tensor_changes_the_fingerprint(tiny_text: Path, copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.down_proj.weight"):
        changed = {**tensors, name: tensors[name] * 1.001}
        save_file(changed, copy / "model.safetensors")
        assert fingerprint(copy) != fingerprint(tiny_text)


def test_another_config_changes_the_fingerprint(tiny_text: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert fingerprint(copy) != fingerprint(tiny_text)


def test_of_a_hybrid_each_layer_keeps_what_its_kind_keeps() -> None:
    """Published sizes of Nemotron-3-Nano: 6 of its 52 layers have keys, and 23 a state."""
    layers = NemotronHConfig._pattern_to_list("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME")
    sizes = {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    config = NemotronHConfig(layers_block_type=layers, num_key_value_heads=2, head_dim=128, **sizes)
    assert kv_bytes_per_token(config, "bfloat16") == 6 * 2 * 2 * 128 * 2
    convolved, states = (64 * 64 + 2 * 8 * 128) * 3, 64 * 64 * 128
    assert state_bytes_per_sequence(config, "bfloat16") == 23 * (convolved * 2 + states * 4)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="no safetensors weights"):
        tensor_bytes(tmp_path)
