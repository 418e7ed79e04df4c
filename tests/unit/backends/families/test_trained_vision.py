"""Training the vision tower: the setting, a model's own request, and the modules of a tower that train.

pytest tests/unit/backends/families/test_trained_vision.py
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.factories import present
from tests.fakes import FakeBaseModel
from tests.models import make_tiny_qwen2_5_vl, make_tiny_qwen3_5
from tests.submitting import server
from tinker_server.backends.families.coverage import check_coverage, find_untrained
from tinker_server.backends.families.lora_names import find_trained_modules, tower_modules
from tinker_server.backends.families.qwen import Qwen3VLVision
from tinker_server.backends.families.registry import find_family
from tinker_server.backends.protocol import BackendFailed
from tinker_server.command_line import parse, read_settings


def test_the_command_line_and_the_environment_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ["serve", "--model", "a=org/name"]
    assert not read_settings(parse(serve)).backend.train_vision
    assert read_settings(parse([*serve, "--train-vision"])).backend.train_vision
    monkeypatch.setenv("TINKER_SERVER_BACKEND__TRAIN_VISION", "true")
    assert read_settings(parse(serve)).backend.train_vision


@pytest.mark.parametrize(
    ("server_does", "said", "trained"),
    [
        (True, None, True),
        (True, {"other": "x"}, True),
        (True, {"train_vision": "true"}, True),
        (True, {"train_vision": "false"}, False),
        (False, None, False),
        (False, {"train_vision": "false"}, False),
        (True, {"train_vision": "no"}, "user_metadata.train_vision is 'no': it must be 'true' or 'false'"),
        (False, {"train_vision": "true"}, "this server trains no vision tower of tiny (setting backend.train_vision)"),
    ],
)
async def test_a_model_trains_the_tower_if_the_server_does_and_the_model_does_not_refuse(
    tmp_path: Path, server_does: bool, said: dict[str, str] | None, trained: bool | str
) -> None:
    async with server(tmp_path) as client:
        base = client.services.models.base("tiny")
        assert isinstance(base, FakeBaseModel)
        base.info = replace(base.info, trains_vision=server_does)
        result = await client.result(await client.create_model(user_metadata=said))
        if isinstance(trained, str):
            assert result.failed and trained in json.loads(result.body)["error"]
        else:
            assert (await client.services.runs.get(client.model_id)).trainable.train_vision is trained


@pytest.mark.parametrize("kind", ["Qwen3-VL", "Qwen2.5-VL", "Qwen3.5"])
def test_every_linear_of_a_trained_tower_has_one_flag_and_its_patch_embedding_none(
    kind: str, tiny_vl: Path, tmp_path: Path
) -> None:
    makers = {"Qwen2.5-VL": make_tiny_qwen2_5_vl, "Qwen3.5": make_tiny_qwen3_5}
    source = makers[kind](tmp_path / "model") if kind in makers else tiny_vl
    config = AutoConfig.from_pretrained(source)
    family = find_family(config, str(source))
    frozen, trained = (check_coverage(family, config, "dir", train_vision=one) for one in (False, True))
    assert trained.adapter > frozen.adapter
    with torch.device("meta"):
        model = family.model_class.from_config(config)
    groups = find_trained_modules(family, model, train_vision=True)
    assert groups["train_vision"] == tower_modules(model, present(present(family.vision).lora))
    everything = [name for names in groups.values() for name in names]
    assert list(find_untrained(model, everything, [])) == ["model.visual.patch_embed.proj.weight"]
    assert "train_vision" not in find_trained_modules(family, model, train_vision=False)


def test_a_tower_that_cannot_be_trained_is_refused_by_name(tiny_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(tiny_vl)
    family = find_family(config, str(tiny_vl))
    assert isinstance(family.vision, Qwen3VLVision)
    monkeypatch.setattr(family.vision, "lora", None)
    check_coverage(family, config, "dir")
    with pytest.raises(BackendFailed, match=r"dir: LoRA on this kind of vision tower .* backend\.train_vision off"):
        check_coverage(family, config, "dir", train_vision=True)
