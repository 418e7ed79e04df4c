"""An engine that has whole models one at a time, against plain transformers, in float32.

pytest tests/contract/test_full_sampler.py
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from api_schemas.inputs import ModelInput
from api_schemas.sampling import SampleResponse
from backends.inputs.rendering import Renderer
from backends.protocol import BackendFailed, InvalidInput
from backends.sampler.pool import SamplerPool
from tests.engines import fork_sampler
from tests.factories import MIXED, image, present, prompt, words
from tests.full import FULL, full_trainer, mixed_data, train
from tests.sampling import ATOL, request, sample, sampler_config, scoring
from tests.trainers import LORA, reference_inputs, trainer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
LONG = prompt(words(300, 1), image(64, 96, 1), words(20, 2))
"""More than a block of the prefix cache, and an image."""
MODEL_FILE = "model.safetensors"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerPool]:
    config = sampler_config(tiny_vl, tmp_path_factory.mktemp("scratch"))
    running = SamplerPool(replace(config, full=True), fork_sampler)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(scope="module")
def versions(tiny_vl: Path, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The base, and what two and four steps have made of it."""
    root, rank = tmp_path_factory.mktemp("versions"), full_trainer(tiny_vl)
    rank.create_model("m", FULL)
    for name in ("two", "four"):
        train(rank, mixed_data(renderer), 2)
        rank.save_sampler_weights("m", root / name, for_elsewhere=False)
    return [tiny_vl, root / "two", root / "four"]


@pytest.fixture(scope="module")
def references(versions: list[Path]) -> list:
    return [AutoModelForImageTextToText.from_pretrained(one).eval() for one in versions]


def expected(model, renderer: Renderer, model_input: ModelInput, continuation: list[int]) -> np.ndarray:
    """[T - 1] nats, of a prompt and what follows it; 0 at images."""
    longer = ModelInput(chunks=[*model_input.chunks, *prompt(words(1)).chunks * bool(continuation)])
    if continuation:
        longer.chunks[-1] = longer.chunks[-1].model_copy(update={"tokens": np.array(continuation, np.int32)})
    inputs = reference_inputs(renderer, longer, model)
    with torch.no_grad():
        logprobs_TV = model(**inputs, use_cache=False).logits[0].log_softmax(-1)
    ids = inputs["input_ids"][0]
    values: np.ndarray = logprobs_TV[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
    values[ids[1:].numpy() == model.config.image_token_id] = 0
    return values


def assert_is_of(response: SampleResponse, model, renderer: Renderer, model_input: ModelInput) -> None:
    (sequence,) = response.sequences
    values = expected(model, renderer, model_input, sequence.tokens.tolist())
    got = np.concatenate([present(response.prompt_logprobs)[1:], sequence.logprobs])
    np.testing.assert_allclose(got, values, rtol=0, atol=ATOL)


async def test_every_version_scores_and_draws_as_transformers_does_in_any_order(
    sampler, versions, references, renderer
):
    for index in (0, 1, 0, 2, 1, 0):
        for model_input in (LONG, LONG, *MIXED.values()):
            weights = None if index == 0 else versions[index]
            response = await sample(sampler, request(model_input, {"max_tokens": 5}, prompt_logprobs=True), weights)
            assert_is_of(response, references[index], renderer, model_input)


async def test_versions_that_are_requested_at_once_wait_for_the_engine(sampler, versions, references, renderer):
    async def one(number: int) -> None:
        index = number % 3
        weights = None if index == 0 else versions[index]
        owner, model_input = f"owner {number % 2}", LONG if number % 4 else MIXED["text"]
        response = await sample(sampler, request(model_input, {"max_tokens": 12}, prompt_logprobs=True), weights, owner)
        assert_is_of(response, references[index], renderer, model_input)

    async def cancelled(number: int) -> None:
        task = asyncio.ensure_future(sample(sampler, request(LONG, {"max_tokens": 400}), versions[1 + number % 2]))
        await asyncio.sleep(0.05 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async with asyncio.timeout(120):
        await asyncio.gather(*map(one, range(24)), *map(cancelled, range(6)))


async def test_weights_that_are_not_the_trainers_are_refused_and_the_others_are_as_they_were(
    sampler, versions, references, renderer, tmp_path
):
    directory = shutil.copytree(versions[1], tmp_path / "spoilt")
    tensors = load_file(directory / MODEL_FILE)
    name = next(one for one in tensors if one.endswith("layers.0.mlp.up_proj.weight"))
    tensors[name] = -tensors[name]
    save_file(tensors, directory / MODEL_FILE, {"format": "pt"})
    with pytest.raises(BackendFailed, match="not the trainer's"):
        await sampler.publish(directory, "somebody")
    lacking = shutil.copytree(versions[1], tmp_path / "lacking")
    tensors = {name: one for name, one in load_file(lacking / MODEL_FILE).items() if "visual.merger.norm" not in name}
    save_file(tensors, lacking / MODEL_FILE, {"format": "pt"})
    with pytest.raises(BackendFailed, match=r"they lack visual\.merger\.norm\."):
        await sampler.publish(lacking, "somebody")
    for index in (2, 0):
        response = await sample(sampler, scoring(LONG), None if index == 0 else versions[index])
        assert_is_of(response, references[index], renderer, LONG)


async def test_adapters_and_what_is_gone_are_refused_by_name(sampler, versions, tiny_vl, tmp_path):
    rank = trainer(tiny_vl)
    rank.create_model("m", LORA)
    rank.save_sampler_weights("m", tmp_path / "lora", for_elsewhere=False)
    with pytest.raises(InvalidInput, match=r"a LoRA adapter, .* backend\.full"):
        await sampler.publish(tmp_path / "lora", "somebody")
    with pytest.raises(InvalidInput, match="no longer exist"):
        await sampler.publish(tmp_path / "gone", "somebody")
    copy = shutil.copytree(versions[1], tmp_path / "copy")
    await sampler.publish(copy, "somebody")
    shutil.rmtree(copy)
    await sample(sampler, scoring(LONG), copy)  # it is loaded
    await sample(sampler, scoring(LONG), None)
    with pytest.raises(InvalidInput, match="no longer exist"):
        await sample(sampler, scoring(LONG), copy)
