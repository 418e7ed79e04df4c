"""The cookbook merges exports of every kind with the hosted service's target modules, unchanged."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.acceptance.recipes import PYTHON
from tests.factories import datum, make_renderer, prompt, words
from tests.models import FAMILIES
from tests.trainers import logprobs, reference_logprobs, trained, trainer
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from tinker_server.weights import export

KINDS = ("Qwen3 MoE", "Qwen3.5", "Qwen3.5 MoE", "Nemotron-3", "DeepSeek-V3", "gpt-oss")
LORA = Trainable(rank=4, seed=1, layout="service")


def call_weights(function: str, directory: Path, output: str) -> None:
    paths = {"base_model": "model", "adapter_path": "export", "output_path": output}
    arguments = ", ".join(f"{name}={str(directory / path)!r}" for name, path in paths.items())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    code = f"from tinker_cookbook import weights; weights.{function}({arguments})"
    subprocess.run([PYTHON, "-c", code], check=True, env=environment)


def export_of(kind: str, directory: Path) -> tuple[list[Datum], list[np.ndarray], Renderer]:
    """Export a model to `directory`/export; return what it scored."""
    source = FAMILIES[kind](directory / "model")
    rank, renderer = trained(trainer(source), {"m": LORA}), make_renderer(source)
    rank.save_sampler_weights("m", directory / "export" / export.PEFT, for_elsewhere=True)
    export.write_both_forms(directory / "export")
    data = [datum(prompt(words(length, length)), renderer, length) for length in (5, 40)]
    return data, logprobs(rank, data), renderer


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_export_gives_the_trainers_numbers(kind: str, tmp_path: Path) -> None:
    data, expected, renderer = export_of(kind, tmp_path)
    call_weights("build_hf_model", tmp_path, "merged")
    is_for_images = "vision_config" in json.loads((tmp_path / "merged" / "config.json").read_text())
    auto = AutoModelForImageTextToText if is_for_images else AutoModelForCausalLM
    models = [auto.from_pretrained(tmp_path / name, dtype=torch.float32).eval() for name in ("merged", "model")]
    for item, wanted in zip(data, expected, strict=True):
        merged, base = (reference_logprobs(renderer, item, model)[:, 0].detach().numpy() for model in models)
        np.testing.assert_allclose(merged, wanted, atol=1e-4)
        assert np.abs(base - wanted).max() > 0.1, "the weights are those of the base"


@pytest.mark.parametrize("kind", ["Qwen3 MoE", "Nemotron-3"])
def test_pefts_form_is_the_one_that_the_cookbook_makes(kind: str, tmp_path: Path) -> None:
    """Of parts of a linear it makes the same blocks, with the same patterns."""
    export_of(kind, tmp_path)
    call_weights("build_lora_adapter", tmp_path, "adapter")
    ours, theirs = (load_file(tmp_path / form / ADAPTER_FILE) for form in ("export/peft", "adapter"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name].to(torch.float32)) for name in ours)
    configs = [json.loads((tmp_path / form / ADAPTER_CONFIG_FILE).read_text()) for form in ("export/peft", "adapter")]
    for field in ("r", "lora_alpha", "rank_pattern", "alpha_pattern"):
        assert (configs[0].get(field) or {}) == (configs[1].get(field) or {}), field
