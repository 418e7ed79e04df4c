"""A rank's process runs each command on its rank."""

from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file

from tests.models import make_tiny_moe
from tests.trainers import LORA, config, trainer
from tinker_server.api_schemas.training import Layout
from tinker_server.backends.protocol import ADAPTER_FILE, SavedForm
from tinker_server.backends.trainer import commands
from tinker_server.backends.trainer.distributed import World, files_s, sampling_s
from tinker_server.backends.trainer.process import run
from tinker_server.backends.trainer.rank import TrainerRank


def test_time_is_asked_for_in_which_a_model_is_sampled_or_loaded(tmp_path: Path) -> None:
    """By the size of the model that is made: weights of another layout make another."""
    asked: list[float] = []
    rank = TrainerRank(config(make_tiny_moe(tmp_path / "model")), World(0, 1, torch.device("cpu")), asked.append)
    own = LORA.model_copy(update={"train_attn": False, "train_unembed": False})
    sizes = []
    for layout in get_args(Layout):
        asked.clear()
        rank.create_model(layout, own.model_copy(update={"layout": layout}))
        sizes.append(rank.models[layout].size_bytes)
        assert asked == [sampling_s(sizes[-1])]
    rank.save_state("own", tmp_path / "state")
    asked.clear()
    rank.load_state("service", tmp_path / "state", with_optimizer=True)
    assert sizes[0] != sizes[1] and asked == [sampling_s(sizes[0]), 4 * files_s(sizes[0])]


def test_a_model_is_saved_in_the_form_that_was_asked_for(tiny_text: Path, tmp_path: Path) -> None:
    """Only a state has the optimizer, and only the sampler's form holds all layers in one tensor."""
    rank = trainer(tiny_text)
    rank.create_model("m", LORA)
    forms, found = get_args(SavedForm), {}
    for form in forms:
        run(rank, commands.Save("m", tmp_path / form, form))
        by_layer = any(".layers.1." in name for name in load_file(tmp_path / form / ADAPTER_FILE))
        found[form] = (by_layer, (tmp_path / form / "optimizer.safetensors").exists())
    assert found == {"state": (True, True), "export": (True, False), "sampler": (False, False)}
