"""The sampler's tests share these requests, and plain transformers and PEFT as a reference."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.factories import MIXED, image, present, prompt, words
from tests.specs import tiny_spec
from tests.trainers import logprobs
from tinker_server.api_schemas.inputs import Datum, ModelInput, TensorData
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.families.qwen import mrope_positions
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import ModelSpec, Placement
from tinker_server.backends.protocol import InvalidInput, SamplingTask
from tinker_server.backends.sampler.client import ScoreBase
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.checkpoint_files import write_adapter, write_directory
from tinker_server.backends.trainer.rank import TrainerRank

ATOL = 1e-4
ADJACENT = prompt(words(3, 1), image(64, 96, 1), image(96, 64, 2), words(4, 2))
TARGETS = r".*\.layers\..*\.(q|k|v|o|gate|up|down)_proj|.*lm_head"


def sampler_config(source: Path, scratch_dir: Path) -> ModelSpec:
    placement = Placement(sampler_fraction=0.4)
    return replace(tiny_spec(source), max_context_length=4096, scratch_dir=scratch_dir, placement=placement)


def scores_of(base: LoadCheck) -> ScoreBase:
    """As a trainer gives them that has started."""

    async def score_base() -> LoadCheck:
        return base

    return score_base


RANKS = {"small": 4, "large": 24, "third": 8, "fourth": 1, "fifth": 64}
"""One more than the engine holds in a step, so that every one of its slots is taken."""


class Reference:
    """transformers with PEFT adapters on every linear layer of the language model and on the head."""

    def __init__(self, source: Path, renderer: Renderer, ranks: dict[str, int]) -> None:
        self._renderer = renderer
        self._model: Any = None
        kind = AutoModelForImageTextToText if renderer.takes_images else AutoModelForCausalLM
        base = kind.from_pretrained(source).float().eval()
        self.image_token_id = base.config.image_token_id if renderer.takes_images else -1
        torch.manual_seed(5)
        for name, rank in ranks.items():
            peft_config = PeftLoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS)
            if self._model is None:
                self._model = get_peft_model(base, peft_config, name).eval()
            else:
                self._model.add_adapter(name, peft_config)
        with torch.no_grad():
            for parameter_name, parameter in self._model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(0, 0.05)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """An adapter's, by their names in a PEFT file."""
        return {
            key.replace(f".{name}.", "."): tensor
            for key, tensor in self._model.named_parameters()
            if f".{name}." in key and "lora_" in key
        }

    def save(self, name: str, rank: int, directory: Path) -> Path:
        """As the trainer saves it for a sampler."""
        tensors = self.tensors(name)
        write_directory(directory, lambda at: write_adapter(at, tensors, Trainable(rank=rank, seed=0), "base"))
        return directory

    def logprobs_TV(
        self, model_input: ModelInput, continuation: Iterable[int], adapter: str | None, temperature: float = 1.0
    ) -> torch.Tensor:
        """[T, V]: row t predicts token t + 1 of the prompt and its continuation."""
        rendered = self._renderer.render(model_input, "prompt")
        ids = torch.tensor([[*rendered.token_ids_T.tolist(), *continuation]])
        inputs = {"input_ids": ids}
        if rendered.images:
            inputs["pixel_values"] = torch.cat([one.tensors["pixel_values"] for one in rendered.images])
            inputs["image_grid_thw"] = torch.cat([one.tensors["image_grid_thw"] for one in rendered.images])
            inputs["mm_token_type_ids"] = (ids == self.image_token_id).int()
        if model_input is ADJACENT:  # which transformers' own positions take for one image
            positions = torch.from_numpy(mrope_positions(ids.shape[1], rendered.spans))
            inputs["position_ids"] = torch.cat([torch.arange(ids.shape[1])[None], positions])[:, None]
        if adapter is not None:
            self._model.set_adapter(adapter)
            return self._forward(inputs, temperature)
        with self._model.disable_adapter():
            return self._forward(inputs, temperature)

    def _forward(self, inputs: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logprobs: torch.Tensor = (self._model(**inputs, use_cache=False).logits[0] / temperature).log_softmax(-1)
            return logprobs

    def prompt_logprobs(self, model_input: ModelInput, adapter: str | None = None) -> np.ndarray:
        """As a SampleResponse holds them."""
        rendered = self._renderer.render(model_input, "prompt")
        logprobs_TV = self.logprobs_TV(model_input, [], adapter)
        expected = np.full(len(rendered.token_ids_T), np.nan, np.float32)
        rows = np.arange(len(expected) - 1)
        expected[1:] = logprobs_TV.numpy()[rows, rendered.token_ids_T[1:]]
        for span in rendered.spans:
            expected[max(span.offset, 1) : span.offset + span.num_tokens] = 0
        return expected


OVERFLOWING = 1e30
"""Finite, also in bfloat16, and too large for any product."""


def spoilt(reference: Reference, directory: Path, value: float) -> Path:
    """The adapter `small`, every lora_B filled with one value."""
    tensors = {name: tensor.detach().clone() for name, tensor in reference.tensors("small").items()}
    for name in tensors:
        if "lora_B" in name:
            tensors[name].fill_(value)
    write_directory(directory, lambda at: write_adapter(at, tensors, Trainable(rank=4, seed=0), "base"))
    return directory


async def assert_draws_fail_alone(sampler: SamplerPool, reference: Reference, directory: Path, beside: Path) -> None:
    """Draws from scores that are not finite: those with the weights `beside` go on, and so does the engine."""
    diverged = spoilt(reference, directory / "diverged", OVERFLOWING)
    process = sampler.engines[0].supervisor.children
    other = request(MIXED["text"], {"max_tokens": 300, "stop": []})
    drawing = asyncio.create_task(sample(sampler, other, beside))
    for fields in ({"prompt_alt_tokens_k": 2}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 3}):
        with pytest.raises(InvalidInput, match="not finite"):
            await sample(sampler, request(MIXED["one image"], {"seed": 1}, **fields), diverged)
    assert len((await drawing).sequences[0].tokens) == 300
    assert sampler.engines[0].supervisor.children is process


def favouring_placeholders(config: Any, directory: Path) -> Path:
    """An adapter of the head under which, at every position, one of the two placeholders is favoured by far: their
    rows point in opposite directions."""
    direction = torch.ones(1, config.get_text_config().hidden_size)
    rows = torch.zeros(config.get_text_config().vocab_size, 2)
    rows[config.image_token_id, 0] = rows[config.video_token_id, 1] = 1.0
    tensors = {
        "base_model.model.lm_head.lora_A.weight": torch.cat([direction, -direction]),
        "base_model.model.lm_head.lora_B.weight": rows,
    }
    write_directory(directory, lambda at: write_adapter(at, tensors, Trainable(rank=2, seed=0), "base"))
    return directory


async def assert_no_placeholder_is_drawn(sampler: SamplerPool, renderer: Renderer, directory: Path) -> None:
    """However likely it is."""
    config = renderer.config
    weights = favouring_placeholders(config, directory)
    for params in ({}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.2}):
        one = request(MIXED["one image"], {"max_tokens": 40, "stop": []} | params, num_samples=8)
        response = await sample(sampler, one, weights)
        tokens = np.concatenate([one.tokens for one in response.sequences])
        assert not set(tokens.tolist()) & {config.image_token_id, config.video_token_id}, params
        assert all(np.isfinite(one.logprobs).all() for one in response.sequences)
        mean = np.mean([one.logprobs.mean() for one in response.sequences])
        # Else of the whole distribution, which the two dominate.
        assert (mean > -3) == ("top_k" in params or "top_p" in params)


def request(model_input: ModelInput, params: dict | None = None, **fields) -> SampleRequest:
    return SampleRequest(
        prompt=model_input, sampling_params=SamplingParams(**{"max_tokens": 8, **(params or {})}), **fields
    )


def targets(rows: list[list[int]] | np.ndarray) -> TensorData:
    """Dense target_prompt_logprobs."""
    return TensorData(data=[*np.ravel(rows).tolist()], dtype="int64", shape=[len(rows), len(rows[0])])


def scoring(model_input: ModelInput) -> SampleRequest:
    """The request of the SDK's compute_logprobs."""
    return request(model_input, {"max_tokens": 1}, prompt_logprobs=True)


async def sample(
    sampler: SamplerPool, one: SampleRequest, weights: Path | None, owner: str = "somebody"
) -> SampleResponse:
    return await sampler.sample(SamplingTask.from_request(one, weights, owner))


async def score_distances(
    sampler: SamplerPool, weights: Path | None, rank: TrainerRank, model_id: str, renderer: Renderer
) -> np.ndarray:
    """Absolute, nats, of a prompt's tokens: by the sampler with these weights, and by a trainer's model."""
    text = prompt(words(40, 1))
    response = await sample(sampler, request(text, {"max_tokens": 1}, prompt_logprobs=True), weights)
    ids = renderer.render(text, "prompt").token_ids_T
    targets = {"target_tokens": np.append(ids[1:], 0), "weights": np.ones(len(ids), np.float32)}
    (expected,) = logprobs(rank, [Datum(model_input=text, loss_fn_inputs=targets)], model_id)
    distances: np.ndarray = np.abs(np.array(present(response.prompt_logprobs)[1:]) - expected[:-1])
    return distances


async def ask(sampler: SamplerPool, token: int, owner: str = "good", seed: int = 0) -> int:
    """What a light process (`fake_sampler_process.py`) answers to a prompt of this token and of the seed."""
    chunk = words(1).model_copy(update={"tokens": np.array([token, seed])})
    task = SamplingTask(prompt(chunk), SamplingParams(max_tokens=1), num_samples=1, weights=None, owner=owner)
    return int((await sampler.sample(task)).sequences[0].tokens[0])


async def drawn(sampler: SamplerPool, model_input: ModelInput, params: dict, **fields) -> SampledSequence:
    response = await sample(sampler, request(model_input, params, **fields), None)
    return response.sequences[0]


def assert_close(got: np.ndarray | None, expected: np.ndarray) -> None:
    assert got is not None and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)


def assert_sequence_close(
    response: SampleResponse,
    reference: Reference,
    model_input: ModelInput,
    adapter: str | None,
    temperature: float = 1.0,
) -> None:
    """As far as a drawn image placeholder, which transformers would take for an image."""
    (sequence,) = response.sequences
    assert sequence.tokens.dtype == np.int32
    placeholders = np.flatnonzero(sequence.tokens == reference.image_token_id)
    tokens = sequence.tokens[: placeholders[0]] if len(placeholders) else sequence.tokens
    logprobs_TV = reference.logprobs_TV(model_input, tokens.tolist(), adapter, temperature)
    rows_TV = logprobs_TV[-len(tokens) - 1 : -1].numpy()
    assert_close(sequence.logprobs[: len(tokens)], rows_TV[np.arange(len(tokens)), tokens])
