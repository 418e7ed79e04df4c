"""A rank's process runs each command on its rank."""

from pathlib import Path
from typing import get_args

from safetensors.torch import load_file

from tests.trainers import LORA, trainer
from tinker_server.backends.protocol import ADAPTER_FILE, SavedForm
from tinker_server.backends.trainer import commands
from tinker_server.backends.trainer.process import run


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
