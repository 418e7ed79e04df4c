"""Weights that are gone or broken, cancelled calls, and a crash: each fails alone."""

import asyncio
import shutil

import psutil
import pytest
import torch

from tests.factories import MIXED, image, prompt, words
from tests.sampling import (
    assert_close,
    request,
    sample,
    scoring,
    targets,
)
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.protocol import ADAPTER_FILE, BackendFailed, InvalidInput
from tinker_server.backends.sampler.checks import check_sample
from tinker_server.backends.trainer.checkpoint_files import write_adapter, write_directory

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(prompt()), "prompt: it is empty"),
        (request(prompt(words(4000)), {"max_tokens": 97}), "window: 4000 \\+ 97 > 4096"),
        (request(prompt(words(4096)), {"max_tokens": None}), "window: 4096 \\+ 1 > 4096"),
        (request(prompt(*[image(32, 32)] * 9)), "9 images; 8 are allowed"),
        (request(MIXED["text"], prompt_logprobs_last_n=2), "needs prompt_logprobs"),
        (request(MIXED["text"], prompt_logprobs=True, prompt_logprobs_last_n=17), "it must be 1 to 16"),
        (request(MIXED["text"], record_stability_info=True), "record_stability_info"),
        (request(MIXED["text"], prompt_alt_tokens_k=101), "prompt_alt_tokens_k is 101"),
        (request(MIXED["text"], target_prompt_logprobs=targets([[1]])), "must be \\[16, 1 to 100\\]"),
        (request(MIXED["text"], target_prompt_logprobs=targets([[10**6]] * 16)), "token id 1000000"),
        (request(MIXED["text"], topk_sample_logprobs=101), "topk_sample_logprobs is 101"),
        (request(MIXED["text"], {"temperature": 1e-3}), "temperature is 0.001"),
        (request(MIXED["text"], {"stop": [384]}), "token id 384 is outside"),
        (request(MIXED["text"], {"stop": [""]}), "empty string"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_by_name(renderer, bad, text):
    with pytest.raises(InvalidInput, match=text):
        check_sample(renderer, bad, max_context_length=4096, max_images=8)


async def test_weights_that_are_gone_are_refused(sampler, tmp_path):
    with pytest.raises(InvalidInput, match="no longer exist"):
        await sample(sampler, request(MIXED["text"]), tmp_path / "gone")


async def test_weights_that_cannot_be_loaded_fail_alone(sampler, reference, adapters, tmp_path):
    torn = shutil.copytree(adapters["small"], tmp_path / "torn")
    (torn / ADAPTER_FILE).write_bytes((torn / ADAPTER_FILE).read_bytes()[:-100])
    tensors = {"base_model.model.model.language_model.layers.0.self_attn.unknown.lora_A.weight": torch.zeros(4, 64)}
    write_directory(tmp_path / "strange", lambda at: write_adapter(at, tensors, Trainable(rank=4, seed=0), "base"))
    write_directory(tmp_path / "wide", lambda at: write_adapter(at, tensors, Trainable(rank=128, seed=0), "base"))
    for bad in (torn, tmp_path / "strange", tmp_path / "wide", torn):
        good = asyncio.create_task(sample(sampler, scoring(MIXED["text"]), adapters["large"]))
        with pytest.raises(BackendFailed, match="cannot load these weights"):
            await sample(sampler, request(MIXED["text"]), bad)
        assert_close((await good).prompt_logprobs, reference.prompt_logprobs(MIXED["text"], "large"))


async def test_weights_with_a_tower_are_refused_by_an_engine_whose_tower_takes_none(sampler, tmp_path):
    module = "base_model.model.model.visual.blocks.{}.attn.qkv"
    shapes = {"lora_A": (4, 32), "lora_B": (96, 4)}
    tensors = {f"{module.format(i)}.{half}.weight": torch.ones(shapes[half]) for i in (0, 1) for half in shapes}
    write_directory(tmp_path / "seeing", lambda at: write_adapter(at, tensors, Trainable(rank=4, seed=0), "base"))
    with pytest.raises(
        BackendFailed, match=r"no place for visual\.blocks\.0\.attn\.qkv, visual\.blocks\.1\.attn\.qkv$"
    ):
        await sample(sampler, request(MIXED["text"]), tmp_path / "seeing")


async def test_weights_sample_on_after_their_directory_is_deleted(sampler, reference, adapters, tmp_path):
    """Also once as many others as the sampler holds have been used in between."""
    first = shutil.copytree(adapters["small"], tmp_path / "first")
    await sample(sampler, request(MIXED["text"]), first)
    shutil.rmtree(first)
    others = [shutil.copytree(adapters["large"], tmp_path / str(i)) for i in range(31)]
    await asyncio.gather(*(sample(sampler, request(MIXED["text"]), other) for other in others))
    response = await sample(sampler, scoring(MIXED["text"]), first)
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(MIXED["text"], "small"))


async def test_cancelling_frees_the_engine(sampler):
    endless = request(MIXED["text"], {"max_tokens": 4000, "stop": []}, num_samples=256)
    call = asyncio.create_task(sample(sampler, endless, None))
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(15):
        await sample(sampler, request(MIXED["text"], num_samples=200), None)


@pytest.mark.parametrize("victim", ["engine", pytest.param("host", marks=pytest.mark.slow)])
async def test_a_crash_is_survived_by_the_running_call_and_the_next(sampler, reference, adapters, victim):
    seeded = request(MIXED["text"], {"max_tokens": 600, "stop": [], "seed": 7}, num_samples=2)
    expected = await sample(sampler, seeded, adapters["large"])
    call = asyncio.create_task(sample(sampler, seeded, adapters["large"]))
    await asyncio.sleep(0.5)
    host = psutil.Process(sampler.engines[0].supervisor.children[0].process.pid)
    engine = next(child for child in host.children(recursive=True) if child.name().startswith("VLLM"))
    (engine if victim == "engine" else host).kill()
    for got, wanted in zip((await call).sequences, expected.sequences, strict=True):
        assert got.tokens.tolist() == wanted.tokens.tolist() and len(got.tokens) == 600
    response = await sample(sampler, scoring(MIXED["one image"]), adapters["small"])
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(MIXED["one image"], "small"))
    assert not psutil.pid_exists(engine.pid)
