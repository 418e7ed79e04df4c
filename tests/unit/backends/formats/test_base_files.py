"""The rule which files of a directory are a model, on the layouts that are published and those that have two
meanings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.layouts import INDEX, SHARDS, add_mistrals_layout, split
from tests.models import make_tiny_text
from tinker_server.backends.base_weights.mapped import Files
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.formats.base_files import find_needed_files, link_files, weight_files
from tinker_server.backends.formats.model_files import check_tokenizer, fingerprint, tensor_bytes
from tinker_server.backends.protocol import BackendFailed


@pytest.fixture
def copy(tiny_text: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_text, tmp_path / "copy"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shapes with other weights."""
    return make_tiny_text(tmp_path_factory.mktemp("other") / "model", seed=1)


def test_a_second_layout_of_the_same_model_is_read_by_nobody(tiny_text: Path, copy: Path, other: Path) -> None:
    add_mistrals_layout(copy, other)
    shutil.copyfile(other / "model.safetensors", copy / "model.fp16.safetensors")
    (copy / "pytorch_model.bin").write_bytes(b"")
    (copy / "original").mkdir()
    (copy / "original/params.json").write_text("{}")
    assert weight_files(copy) == [copy / shard for shard in SHARDS]
    assert fingerprint(copy) == fingerprint(tiny_text)
    with Files(copy, torch.float32) as files:
        assert sorted(files.names()) == sorted(tensor_bytes(tiny_text))
    assert (
        not {"consolidated.safetensors", "params.json", "tekken.json", "tokenizer.model.v3"}
        & find_needed_files(copy).keys()
    )


def test_links_have_all_that_config_tokenizer_and_processor_consist_of(tiny_vl: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_vl, tmp_path / "source"))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    (source / "README.md").write_text("A model.")
    links = link_files(find_needed_files(source), tmp_path / "links")
    found = {path.relative_to(links).as_posix() for path in links.rglob("*") if path.is_file()}
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert found == wanted - {"README.md"}
    (links / "stale.json").touch()
    assert link_files(find_needed_files(links), tmp_path / "again") and fingerprint(links) == fingerprint(source)
    assert link_files(find_needed_files(source), links) and not (links / "stale.json").exists()


def test_a_snapshot_of_the_hub_is_linked_through_its_own_links(tiny_text: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots/main"
    snapshot.mkdir(parents=True)
    for file in tiny_text.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
        (snapshot / file.name).symlink_to(f"../../{file.name}")
    links = link_files(find_needed_files(snapshot), tmp_path / "elsewhere/links")
    assert fingerprint(links) == fingerprint(tiny_text)
    check_tokenizer(links)


def add_shards(copy: Path, other: Path) -> None:
    split(copy)
    shutil.copyfile(other / "model.safetensors", copy / "model.safetensors")


def lose_a_shard(copy: Path, other: Path) -> None:
    split(copy)
    (copy / SHARDS[1]).unlink()


def repeat_a_tensor(copy: Path, other: Path) -> None:
    split(copy)
    tensors = load_file(other / "model.safetensors")
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    for shard in SHARDS:
        save_file(load_file(copy / shard) | norm, copy / shard, {"format": "pt"})


def name_a_file_outside(copy: Path, other: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))


def leave_shards_alone(copy: Path, other: Path) -> None:
    split(copy)
    (copy / INDEX).unlink()


def leave_an_adapter(copy: Path, other: Path) -> None:
    (copy / "adapter_config.json").write_text("{}")


def name_other_weights(copy: Path, other: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_weights": "ema.safetensors"}))


def quantise_beside(copy: Path, other: Path) -> None:
    (copy / "hf_quant_config.json").write_text("{}")


REFUSED: dict[Callable[[Path, Path], None], str] = {
    add_shards: f"two sets of weights: model.safetensors, and {SHARDS[0]}, {SHARDS[1]}, which {INDEX} names",
    lose_a_shard: f"lacks {SHARDS[1]}, which {INDEX} names",
    repeat_a_tensor: f"has model.norm.weight twice: in {SHARDS[0]} and in {SHARDS[1]}",
    name_a_file_outside: "names ../other.safetensors, which is not a file beside it",
    leave_shards_alone: f"no safetensors weights: neither model.safetensors nor {INDEX}; it has {SHARDS[0]}",
    leave_an_adapter: "has adapter_config.json: transformers would load an adapter upon the weights",
    name_other_weights: "transformers_weights ema.safetensors, which the engine does not read",
    quantise_beside: "has hf_quant_config.json: the engine would take the weights for quantised ones",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_a_directory_with_two_meanings_is_refused_at_start_by_the_names_of_files(
    spoil: Callable[[Path, Path], None], copy: Path, other: Path
) -> None:
    spoil(copy, other)
    config = BackendConfig(models={"m": str(copy)}, device="cpu", max_context_length=256)
    with pytest.raises(BackendFailed) as refused:
        describe_models(config, Machine(main_bytes=16 << 30))
    assert str(copy) in str(refused.value) and REFUSED[spoil] in str(refused.value)
    with pytest.raises(BackendFailed):
        fingerprint(copy)


def test_an_index_that_is_left_over_from_removed_shards_is_no_second_set(
    tiny_text: Path, copy: Path, tmp_path: Path
) -> None:
    shards = {"model.norm.weight": SHARDS[0]}
    (copy / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert weight_files(copy) == [copy / "model.safetensors"]
    assert INDEX not in find_needed_files(copy)  # by which vLLM would leave the weights out
    assert fingerprint(copy) == fingerprint(tiny_text)
