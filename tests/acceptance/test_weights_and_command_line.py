"""Users fetch, convert and merge trained weights, and manage checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from tests.acceptance.recipes import PYTHON, Cookbook, Run

BASE = "Qwen/Qwen3.5-9B-Base"
TEXT = "User: Say the river stone garden window.\n\nAssistant: The river stone garden window."
TINKER = PYTHON.parent / "tinker"
SAME_IN_FLOAT32 = 1e-4
"""nats, of any token."""


@pytest.fixture(scope="module")
def trained(cookbook_of_session: Cookbook) -> Run:
    """A model that has learned enough to differ from its base."""
    return cookbook_of_session.train("sl_loop", "batch_size=16", "max_steps=3", "learning_rate=5e-3", "save_every=2")


def weights(cookbook: Cookbook, call: str) -> None:
    cookbook.call([PYTHON, "-c", f"from tinker_cookbook import weights; weights.{call}"])


def logprobs(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """[T - 1] nats, of each token after the first."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([token_ids])).logits[0]
    logprobs: np.ndarray = logits_TV.log_softmax(-1)[:-1].gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()
    return logprobs


@pytest.mark.quick
def test_exported_weights_give_the_servers_own_numbers(cookbook: Cookbook, shows, trained: Run, tmp_path: Path) -> None:
    last = trained.checkpoints[-1]
    raw, adapter, merged = (tmp_path / name for name in ("raw", "adapter", "merged"))
    weights(cookbook, f"download(tinker_path={last['state_path']!r}, output_dir={str(raw)!r})")
    files = f"base_model={BASE!r}, adapter_path={str(raw)!r}, output_path="
    weights(cookbook, f"build_lora_adapter({files}{str(adapter)!r})")
    weights(cookbook, f"build_hf_model({files}{str(merged)!r}, dtype='float32')")

    token_ids = AutoTokenizer.from_pretrained(cookbook.folder / BASE).encode(TEXT, add_special_tokens=False)
    service = cookbook.server.client()
    served = service.create_sampling_client(model_path=last["sampler_path"]).result()
    expected = np.array(served.compute_logprobs(types.ModelInput.from_ints(token_ids)).result()[1:])
    base = Qwen3VLForConditionalGeneration.from_pretrained(cookbook.folder / BASE, dtype=torch.float32)
    untrained = np.abs(logprobs(base, token_ids) - expected).max()
    reloaded = Qwen3VLForConditionalGeneration.from_pretrained(merged, dtype=torch.float32)
    of_merged = np.abs(logprobs(reloaded, token_ids) - expected).max()
    of_adapter = np.abs(logprobs(PeftModel.from_pretrained(base, adapter), token_ids) - expected).max()
    assert untrained > 0.5, "the weights are those of the base"
    assert of_adapter < SAME_IN_FLOAT32
    assert of_merged < SAME_IN_FLOAT32
    shows(
        "weights.download, build_lora_adapter, build_hf_model",
        f"largest distance to the server {of_adapter:.0e} and {of_merged:.0e} nats (base: {untrained:.1f})",
    )


def test_command_line(cookbook: Cookbook, shows, trained: Run, tmp_path: Path) -> None:
    def tinker(*arguments: object) -> dict:
        said, _ = cookbook.call([TINKER, "--format", "json", *map(str, arguments)])
        return json.loads(said[said.index("{") :]) if "{" in said else {}

    state = trained.checkpoints[-1]["state_path"]
    first = trained.checkpoints[0]["state_path"]
    run_id = state.removeprefix("tinker://").split("/")[0]
    assert run_id in [run["training_run_id"] for run in tinker("run", "list", "--limit", "200")["runs"]]
    assert tinker("run", "info", run_id)["base_model"] == BASE

    def listed() -> dict[str, dict]:
        found = tinker("checkpoint", "list", "--run-id", run_id)["checkpoints"]
        return {checkpoint["tinker_path"]: checkpoint for checkpoint in found}

    assert {state, first} <= set(listed())
    tinker("checkpoint", "publish", state)
    assert listed()[state]["public"]
    tinker("checkpoint", "unpublish", state)
    assert not listed()[state]["public"]
    tinker("checkpoint", "set-ttl", state, "--ttl", 7200)
    tinker("checkpoint", "download", state, "--output", tmp_path)
    assert list(tmp_path.rglob("adapter_model.safetensors*")), list(tmp_path.rglob("*"))
    tinker("checkpoint", "delete", "--yes", first)
    assert first not in listed()
    shows("tinker: run list, info; checkpoint list, publish, unpublish, set-ttl, download, delete", "all took effect")
