"""The sampler scores saved weights as the trainer did, or does not sample from them."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.factories import MIXED, cross_entropy, datum, present, prompt, words
from tests.sampling import request, sample
from tests.trainers import LORA, config, forward_backward, lora_model, trainer
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.formats.stacked_adapters import open_adapter
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, BackendFailed, InvalidInput
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.fixture(scope="module")
def rank(tiny_vl, renderer) -> TrainerRank:
    """With the model `m`, some steps on."""
    rank = trainer(tiny_vl)
    rank.create_model("m", LORA)
    for seed in range(3):
        forward_backward(rank, "m", cross_entropy([datum(prompt(words(30, seed)), renderer, seed)]), True)
        rank.optim_step("m", AdamParams(learning_rate=1e-2))
    return rank


@pytest.fixture
def saved(rank: TrainerRank, tmp_path: Path) -> Path:
    rank.save_sampler_weights("m", tmp_path / "saved", for_elsewhere=False)
    return tmp_path / "saved"


def by_name(directory: Path) -> dict[str, Tensor]:
    """As the engine reads them."""
    with open_adapter(str(directory / ADAPTER_FILE), "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - the file is no mapping


def changed(saved: Path, name: str, change: Callable[[dict[str, Tensor]], object], alpha: int = 32) -> Path:
    """The same files, with other tensors or another alpha than the trainer's, which says so nowhere."""
    directory = shutil.copytree(saved, saved.with_name(name))
    with safe_open(saved / ADAPTER_FILE, "pt") as file:
        canary = LoadCheck.from_metadata(file.metadata())
    assert canary is not None
    tensors = by_name(saved)
    change(tensors)
    save_file(tensors, directory / ADAPTER_FILE, canary.to_metadata())
    config = json.loads((directory / ADAPTER_CONFIG_FILE).read_text())
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps({**config, "lora_alpha": alpha}))
    return directory


def without_attention(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers.1.self_attn" in name]:
        del tensors[name]


def swapped(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


async def test_saved_weights_carry_the_trainers_scores_and_the_sampler_agrees(sampler, rank, saved, renderer):
    with safe_open(saved / ADAPTER_FILE, "pt") as file:
        canary = LoadCheck.from_metadata(file.metadata())
    assert canary is not None
    ids = np.array(canary.token_ids)
    text = words(len(ids)).model_copy(update={"tokens": ids.astype(np.int32)})
    scored = datum(prompt(text), renderer)
    scored = scored.model_copy(update={"loss_fn_inputs": {**scored.loss_fn_inputs, "target_tokens": np.roll(ids, -1)}})
    (output,) = present(forward_backward(rank, "m", cross_entropy([scored]), False)).loss_fn_outputs
    np.testing.assert_allclose(canary.logprobs, output["logprobs"][:-1], atol=1e-5)
    await sampler.publish(saved, "somebody")


@pytest.mark.parametrize(
    ("name", "change", "alpha"),
    [
        ("a layer's attention is left out", without_attention, 32),
        ("two modules are swapped", swapped, 32),
        ("another scale", lambda _: None, 64),
        ("no adapter at all", lambda tensors: [tensor.zero_() for tensor in tensors.values()], 32),
    ],
)
async def test_weights_that_are_scored_otherwise_are_neither_published_nor_sampled(sampler, saved, name, change, alpha):
    wrong = changed(saved, name, change, alpha)
    with pytest.raises(BackendFailed, match=r"not the trainer's: with these weights they differ by .* the weights are"):
        await sampler.publish(wrong, "somebody")
    with pytest.raises(BackendFailed, match="not the trainer's"):
        await sample(sampler, request(MIXED["text"]), wrong)
    await sampler.publish(saved, "somebody")


async def test_weights_whose_products_overflow_in_the_engine_alone_are_the_requests_fault(sampler, saved):
    wrong = changed(saved, "large", lambda tensors: [tensor.fill_(3e38) for tensor in tensors.values()])
    with pytest.raises(InvalidInput, match="of a test text are not finite with these weights"):
        await sampler.publish(wrong, "somebody")
    await sampler.publish(saved, "somebody")


@pytest.fixture
def in_files(rank: TrainerRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As an adapter of many bytes is saved."""
    monkeypatch.setattr("tinker_server.backends.formats.stacked_adapters._FILE_BYTES", 1)
    rank.save_sampler_weights("m", tmp_path / "in files", for_elsewhere=False)
    return tmp_path / "in files"


async def test_a_large_adapter_is_several_files_and_the_sampler_reads_them_all(sampler, saved, in_files):
    assert len(list(saved.glob("*.safetensors"))) == 1 and len(list(in_files.glob("*.safetensors"))) == 4
    whole, parts = by_name(saved), by_name(in_files)
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    await sampler.publish(in_files, "somebody")
    drawn = [await sample(sampler, request(MIXED["text"], {"seed": 1}), weights) for weights in (saved, in_files)]
    first, second = (one.sequences[0] for one in drawn)
    assert first.tokens.tolist() == second.tokens.tolist()
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


async def test_of_a_large_adapter_no_file_may_be_missing_or_torn(sampler, in_files):
    torn = shutil.copytree(in_files, in_files.with_name("torn"))
    (torn / "stacks-2.safetensors").write_bytes((torn / "stacks-2.safetensors").read_bytes()[:-100])
    with pytest.raises(BackendFailed, match="the sampler cannot load these weights: "):
        await sampler.publish(torn, "somebody")
    (in_files / "stacks-2.safetensors").unlink()
    with pytest.raises(InvalidInput, match="the sampler weights no longer exist"):
        await sampler.publish(in_files, "somebody")


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
async def test_publishing_does_not_wait_for_the_samples_of_others(sampler, saved, adapters):
    """Two owners take every sequence and every slot."""
    long = request(MIXED["text"], {"max_tokens": 1500, "stop": []}, num_samples=70)
    others = [asyncio.create_task(sample(sampler, long, one, str(i % 2))) for i, one in enumerate(adapters.values())]
    await asyncio.sleep(2)
    began = time.monotonic()
    await sampler.publish(saved, "somebody")
    took_s = time.monotonic() - began
    assert not any(other.done() for other in others)
    assert took_s < 5
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_model_that_scores_nothing_finite_is_not_saved_for_a_sampler(rank, tmp_path):
    rank.create_model("diverged", LORA)
    for parameter in rank.models["diverged"].parameters:
        parameter.data.fill_(1e30)
    with pytest.raises(InvalidInput, match="log probabilities are not finite: its weights have diverged"):
        rank.save_sampler_weights("diverged", tmp_path / "bad", for_elsewhere=False)
    assert not (tmp_path / "bad").exists()


async def test_weights_for_the_sampler_are_in_its_precision_and_for_elsewhere_in_float32(tiny_vl, tmp_path):
    rounded = TrainerRank(replace(config(tiny_vl), dtype="bfloat16"), World(0, 1, torch.device("cpu")))
    rounded.create_model("m", LORA)
    tensors = lora_model(rounded, "m").tensors
    for directory, for_elsewhere, dtype in (("own", False, torch.bfloat16), ("other", True, torch.float32)):
        rounded.save_sampler_weights("m", tmp_path / directory, for_elsewhere)
        read = by_name(tmp_path / directory)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(one, tensors[name].to(dtype)) for name, one in read.items())
