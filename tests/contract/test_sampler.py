"""The vLLM sampler against plain transformers and PEFT, in float32 on the CPU.

pytest tests/contract/test_sampler.py

One engine at a time: other models come first, then one engine for all the rest; the tests that kill it are last.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from api_schemas.inputs import ModelInput, TensorData
from api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from api_schemas.training import LoraConfig
from backends.families.qwen3_vl import mrope_positions
from backends.protocol import ADAPTER_FILE, BackendFailed, InvalidInput, SamplingTask
from backends.rendering import Renderer
from backends.sampler.checks import check_sample
from backends.sampler.client import SamplerClient
from backends.sampler.commands import SamplerConfig
from backends.trainer.checkpoint import write_adapter, write_directory
from tests.factories import MIXED, image, make_renderer, prompt, words
from tests.models import make_tiny_text, make_tiny_vl

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATOL = 1e-4
ADJACENT = prompt(words(3, 1), image(64, 96, 1), image(96, 64, 2), words(4, 2))
TARGETS = r".*\.layers\..*\.(q|k|v|o|gate|up|down)_proj|.*lm_head"


def sampler_config(source: Path, scratch_dir: Path) -> SamplerConfig:
    return SamplerConfig(
        name="tiny",
        source=str(source),
        device="cpu",
        dtype="float32",
        max_context_length=4096,
        max_lora_rank=64,
        max_concurrent_samples=256,
        max_images_per_prompt=8,
        gpu_memory_fraction=0.4,
        kv_cache_bytes=64 << 20,
        image_cache_bytes=1 << 26,
        max_image_pixels=10**7,
        scratch_dir=scratch_dir,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampler(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerClient]:
    running = SamplerClient(sampler_config(tiny_vl, tmp_path_factory.mktemp("scratch")))
    await running.start()
    yield running
    await running.stop()


class Reference:
    """transformers with PEFT adapters on every linear layer of the language model and on the head."""

    def __init__(self, source: Path, renderer: Renderer, ranks: dict[str, int]) -> None:
        self._renderer = renderer
        self._model: Any = None
        kind = AutoModelForImageTextToText if renderer.takes_images else AutoModelForCausalLM
        base = kind.from_pretrained(source).eval()
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

    def save(self, name: str, rank: int, directory: Path) -> Path:
        """As the trainer saves it for a sampler."""
        tensors = {
            key.replace(f".{name}.", "."): tensor
            for key, tensor in self._model.named_parameters()
            if f".{name}." in key and "lora_" in key
        }
        write_directory(directory, lambda at: write_adapter(at, tensors, LoraConfig(rank=rank), "base"))
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
            return (self._model(**inputs, use_cache=False).logits[0] / temperature).log_softmax(-1)

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


RANKS = {"small": 4, "large": 24, "third": 8, "fourth": 1, "fifth": 64}
"""One more than the engine holds in a step, so that every one of its slots is taken."""


@pytest.fixture(scope="module")
def reference(tiny_vl: Path, renderer: Renderer) -> Reference:
    return Reference(tiny_vl, renderer, RANKS)


@pytest.fixture(scope="module")
def adapters(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path | None]:
    """Saved directories by adapter name; None is the base model."""
    root = tmp_path_factory.mktemp("adapters")
    return {None: None} | {name: reference.save(name, rank, root / name) for name, rank in RANKS.items()}


def request(model_input: ModelInput, params: dict | None = None, **fields) -> SampleRequest:
    return SampleRequest(
        prompt=model_input, sampling_params=SamplingParams(**{"max_tokens": 8, **(params or {})}), **fields
    )


def targets(rows: list[list[int]]) -> TensorData:
    """Dense target_prompt_logprobs."""
    return TensorData(data=np.ravel(rows).tolist(), dtype="int64", shape=[len(rows), len(rows[0])])


def scoring(model_input: ModelInput) -> SampleRequest:
    """What the SDK's compute_logprobs sends."""
    return request(model_input, {"max_tokens": 1}, prompt_logprobs=True)


async def sample(sampler: SamplerClient, one: SampleRequest, weights: Path | None) -> SampleResponse:
    return await sampler.sample(SamplingTask.from_request(one, weights, owner="somebody"))


async def drawn(sampler: SamplerClient, model_input: ModelInput, params: dict, **fields) -> SampledSequence:
    response = await sample(sampler, request(model_input, params, **fields), None)
    return response.sequences[0]


# Other models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tied head", "text only"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
async def test_other_models_with_adapters_on_the_head_are_those_of_peft(model, tmp_path):
    """A tied head's adapter acts on its output alone, never on the input embeddings."""
    source = tmp_path / "model"
    source = make_tiny_text(source) if model == "text only" else make_tiny_vl(source, tie=True)
    reference = Reference(source, make_renderer(source), RANKS)
    names = [None, *RANKS]
    saved = {name: reference.save(name, rank, tmp_path / name) for name, rank in RANKS.items()}
    running = SamplerClient(sampler_config(source, tmp_path / "scratch"))
    await running.start()
    try:
        inputs = [prompt(words(20 + i, i)) for i in range(24)]
        works = [request(one, prompt_logprobs=True) for one in inputs]
        responses = await asyncio.gather(
            *(sample(running, work, saved.get(names[i % 6])) for i, work in enumerate(works))
        )
    finally:
        await running.stop()
    for i, response in enumerate(responses):
        assert_close(response.prompt_logprobs, reference.prompt_logprobs(inputs[i], names[i % 6]))
        assert_sequence_close(response, reference, inputs[i], names[i % 6])


# Log probabilities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MIXED, "adjacent images"])
async def test_prompt_and_sample_logprobs_are_those_of_transformers(sampler, reference, name):
    model_input = MIXED.get(name, ADJACENT)
    response = await sample(sampler, request(model_input, prompt_logprobs=True), None)
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(model_input))
    assert_sequence_close(response, reference, model_input, None)


async def test_temperature_scales_logprobs_of_samples_but_not_of_the_prompt(sampler, reference, adapters):
    model_input = MIXED["one image"]
    response = await sample(
        sampler, request(model_input, {"temperature": 0.5}, prompt_logprobs=True), adapters["small"]
    )
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(model_input, "small"))
    assert_sequence_close(response, reference, model_input, "small", temperature=0.5)


async def test_samples_of_five_adapters_and_the_base_at_once_are_those_of_peft(sampler, reference, adapters):
    async def one(name: str | None, model_input: ModelInput, seed: int) -> None:
        response = await sample(sampler, request(model_input, {"max_tokens": 12 + seed}), adapters[name])
        assert_sequence_close(response, reference, model_input, name)

    inputs = [*MIXED.values(), ADJACENT]
    await asyncio.gather(
        *(one(name, model_input, index) for index, model_input in enumerate(inputs) for name in adapters)
    )


async def test_two_hundred_prompts_scored_at_once_are_those_of_peft(sampler, reference, adapters):
    """Six weights, several steps' worth of tokens so that prompts are cut between steps, samples in between."""
    names = list(adapters)
    random = np.random.default_rng(0)
    inputs = [prompt(words(int(random.integers(2, 60)), seed)) for seed in range(197)]
    inputs += [MIXED["three images of different sizes"], ADJACENT, prompt(words(2500, 7))]
    works = [sample(sampler, scoring(one), adapters[names[i % 6]]) for i, one in enumerate(inputs)]
    drawing = [request(prompt(words(9, i)), {"max_tokens": 40}) for i in range(12)]
    works += [sample(sampler, one, adapters[names[i % 6]]) for i, one in enumerate(drawing)]
    responses = await asyncio.gather(*works)
    for i, model_input in enumerate(inputs):
        assert_close(responses[i].prompt_logprobs, reference.prompt_logprobs(model_input, names[i % 6]))
    for i, (one, response) in enumerate(zip(drawing, responses[len(inputs) :], strict=True)):
        assert_sequence_close(response, reference, one.prompt, names[i % 6])


async def test_top_k_and_top_p_shut_out_unlikely_tokens_and_renormalise(sampler, reference):
    model_input = MIXED["text"]
    logprobs_V = reference.logprobs_TV(model_input, [], None)[-1].double().numpy()
    order = np.argsort(-logprobs_V)
    nucleus = order[: int(np.searchsorted(np.exp(logprobs_V[order]).cumsum(), 0.4)) + 1]
    for params, allowed in (({"top_k": 3}, order[:3]), ({"top_p": 0.4}, nucleus)):
        response = await sample(
            sampler, request(model_input, {"max_tokens": 1, "seed": 1, **params}, num_samples=64), None
        )
        normaliser = np.logaddexp.reduce(logprobs_V[allowed])
        drawn_tokens = {int(one.tokens[0]) for one in response.sequences}
        assert len(drawn_tokens) > 1
        assert drawn_tokens <= set(allowed.tolist())
        for one in response.sequences:
            assert one.logprobs[0] == pytest.approx(logprobs_V[one.tokens[0]] - normaliser, abs=ATOL)


async def test_topk_tables_hold_the_likeliest_tokens_in_order(sampler, reference, adapters):
    model_input = MIXED["one image"]
    response = await sample(
        sampler,
        request(model_input, prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=5),
        adapters["large"],
    )
    sequence, length = response.sequences[0], len(response.prompt_logprobs)
    logprobs, token_ids = reference.logprobs_TV(model_input, sequence.tokens, "large").topk(5)
    table = response.topk_prompt_logprobs
    assert (table.token_ids[0] == 0).all()
    assert (table.logprobs[0] == -99999.0).all()
    for row in np.flatnonzero(np.nan_to_num(response.prompt_logprobs) != 0):
        assert_close(table.logprobs[row], logprobs[row - 1, :3].numpy())
        assert table.token_ids[row].tolist() == token_ids[row - 1, :3].tolist()
    assert_close(sequence.topk_logprobs.logprobs, logprobs[length - 1 : -1].numpy())
    assert sequence.topk_logprobs.token_ids.dtype == np.int32


async def test_chosen_tokens_are_scored_beside_all_else_the_prompt_is_asked_for(sampler, reference, adapters):
    """Of several weights at once, one prompt cut between steps."""
    names = list(adapters)
    inputs = [MIXED["text"], MIXED["one image"], prompt(words(5, 1)), prompt(words(2500, 7))]
    works, tables = [], []
    for index, model_input in enumerate(inputs):
        logprobs_TV = reference.logprobs_TV(model_input, [], names[index])[:-1].numpy()
        ids = np.random.default_rng(index).integers(-1, 300, (len(logprobs_TV), 3))
        tables.append((logprobs_TV, ids))
        fields = {"topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2, "prompt_logprobs": True}
        one = request(model_input, {"max_tokens": 2}, target_prompt_logprobs=targets(ids), num_samples=2, **fields)
        works.append(sample(sampler, one, adapters[names[index]]))
    for model_input, name, response, (logprobs_TV, ids) in zip(
        inputs, names, await asyncio.gather(*works), tables, strict=False
    ):
        rows = np.arange(len(ids))[:, None]
        expected = np.where(ids >= 0, logprobs_TV[rows, np.maximum(ids, 0)], 0)
        chosen = response.target_prompt_logprobs
        assert chosen.shape == list(ids.shape) and chosen.crow_indices is None
        np.testing.assert_allclose(chosen.values, expected, atol=ATOL)
        drawn = response.prompt_alt_tokens
        np.testing.assert_allclose(drawn.logprobs, logprobs_TV[rows, drawn.tokens], atol=ATOL)
        assert_close(response.prompt_logprobs, reference.prompt_logprobs(model_input, name))
        assert response.topk_prompt_logprobs.token_ids.shape == (len(ids) + 1, 2)
        assert len(response.sequences) == 2


async def test_chosen_tokens_in_sparse_rows_come_back_in_sparse_rows(sampler, reference):
    model_input = prompt(words(4, 1))
    asked = TensorData(
        data=[7, -1, 9], dtype="int64", shape=[3, 5], sparse_crow_indices=[0, 2, 2, 3], sparse_col_indices=[0, 3, 4]
    )
    response = await sample(sampler, request(model_input, target_prompt_logprobs=asked), None)
    logprobs_TV = reference.logprobs_TV(model_input, [], None).numpy()
    chosen = response.target_prompt_logprobs
    np.testing.assert_allclose(chosen.values, [logprobs_TV[0, 7], 0, logprobs_TV[2, 9]], atol=ATOL)
    assert (chosen.crow_indices.tolist(), chosen.col_indices.tolist()) == ([0, 2, 2, 3], [0, 3, 4])
    assert response.prompt_logprobs is None and response.topk_prompt_logprobs is None


async def test_draws_at_prompt_positions_follow_the_scaled_distribution(sampler, reference, adapters):
    model_input, k = prompt(words(60, 3)), 100
    scaled_TV = reference.logprobs_TV(model_input, [], "small", temperature=0.5)[:-1].double().numpy()
    fields = {"params": {"temperature": 0.5, "seed": 3}, "prompt_alt_tokens_k": k}
    first, again = [await sample(sampler, request(model_input, **fields), adapters["small"]) for _ in range(2)]
    tokens = first.prompt_alt_tokens.tokens
    assert tokens.shape == (59, k) and (tokens == again.prompt_alt_tokens.tokens).all()
    # The mean log probability of draws is minus the entropy, up to the error of a mean.
    drawn = np.take_along_axis(scaled_TV, tokens, axis=1)
    entropy_T = -(np.exp(scaled_TV) * scaled_TV).sum(-1)
    variance_T = (np.exp(scaled_TV) * (scaled_TV + entropy_T[:, None]) ** 2).sum(-1)
    assert abs(drawn.mean() + entropy_T.mean()) < 4 * np.sqrt(variance_T.mean() / drawn.size)
    greedy = await sample(sampler, request(model_input, {"temperature": 0}, prompt_alt_tokens_k=2), adapters["small"])
    assert (greedy.prompt_alt_tokens.tokens == scaled_TV.argmax(-1)[:, None]).all()


async def test_last_n_leaves_everything_before_it_undefined(sampler, reference):
    model_input = MIXED["image last"]
    response = await sample(sampler, request(model_input, prompt_logprobs=True, prompt_logprobs_last_n=3), None)
    expected = reference.prompt_logprobs(model_input)
    expected[:-3] = np.nan
    assert_close(response.prompt_logprobs, expected)


async def test_cells_that_top_k_leaves_empty_hold_the_sentinel(sampler):
    sequence = await drawn(sampler, MIXED["text"], {"top_k": 2}, topk_sample_logprobs=4)
    assert (sequence.topk_logprobs.logprobs[:, 2:] == -99999.0).all()
    assert (sequence.topk_logprobs.token_ids[:, 2:] == 0).all()
    assert (sequence.topk_logprobs.logprobs[:, :2] > -99999.0).all()


# Drawing ----------------------------------------------------------------------------------------------


async def test_temperature_zero_takes_the_likeliest_token(sampler, reference):
    sequence = await drawn(sampler, MIXED["text"], {"temperature": 0})
    logprobs_TV = reference.logprobs_TV(MIXED["text"], sequence.tokens, None)
    assert sequence.tokens.tolist() == logprobs_TV[-9:-1].argmax(-1).tolist()


async def test_the_same_seed_gives_the_same_tokens_and_its_samples_differ(sampler):
    def seeded(seed: int) -> SampleRequest:
        return request(MIXED["one image"], {"seed": seed}, num_samples=4)

    first, second, other, huge = await asyncio.gather(
        *(sample(sampler, seeded(seed), None) for seed in (7, 7, 8, 2**64 - 1))
    )
    texts = [[one.tokens.tolist() for one in response.sequences] for response in (first, second, other, huge)]
    assert texts[0] == texts[1]
    assert len({str(tokens) for tokens in texts[0]}) == 4
    assert texts[0] != texts[2]


async def test_without_a_seed_samples_differ(sampler):
    responses = await asyncio.gather(*(sample(sampler, request(MIXED["text"], num_samples=3), None) for _ in range(2)))
    assert len({str(one.tokens.tolist()) for response in responses for one in response.sequences}) == 6


async def test_a_repeated_prompt_is_found_in_the_cache(sampler):
    model_input = prompt(words(300, 42))
    first = await sample(sampler, request(model_input), None)
    second = await sample(sampler, request(model_input), None)
    assert (first.prompt_cache_hit_tokens, second.prompt_cache_hit_tokens) == (0, 256)


# Stopping ---------------------------------------------------------------------------------------------

LONG = {"seed": 3, "max_tokens": 400}


async def test_without_stop_the_models_end_tokens_stop_and_stay(sampler, tiny_vl):
    """And with an empty stop nothing does: the same tokens, and more."""
    ends = set(json.loads((tiny_vl / "generation_config.json").read_text())["eos_token_id"])
    assert len(ends) == 2
    ended, free = await asyncio.gather(
        sample(sampler, request(MIXED["text"], LONG, num_samples=16), None),
        sample(sampler, request(MIXED["text"], LONG | {"stop": []}, num_samples=16), None),
    )
    seen = set()
    for one, whole in zip(ended.sequences, free.sequences, strict=True):
        assert one.tokens.tolist() == whole.tokens[: len(one.tokens)].tolist()
        assert (whole.stop_reason, len(whole.tokens)) == ("length", 400)
        assert not ends & set(one.tokens[:-1].tolist())
        if one.stop_reason == "stop":
            seen.add(int(one.tokens[-1]))
    assert seen == ends


async def test_stop_tokens_stop_alone_and_stay(sampler):
    free = (await drawn(sampler, MIXED["text"], LONG | {"stop": []})).tokens.tolist()
    wanted = [free[200], free[300]]
    sequence = await drawn(sampler, MIXED["text"], LONG | {"stop": wanted})
    first = min(free.index(token) for token in wanted)
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == free[: first + 1]
    assert len(sequence.logprobs) == first + 1


@pytest.mark.parametrize("form", [str, list])
async def test_a_stop_string_stops_and_its_tokens_stay(sampler, tiny_vl, form):
    """Also one that spans tokens, special ones among them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_vl)
    free = (await drawn(sampler, MIXED["text"], LONG | {"stop": []})).tokens.tolist()
    at = next(i for i, token in enumerate(free) if i > 5 and token in tokenizer.all_special_ids)
    stop = tokenizer.decode([free[at]])
    sequence = await drawn(sampler, MIXED["text"], LONG | {"stop": stop if form is str else ["never seen", stop]})
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == free[: free.index(free[at]) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)

    ascii_at = next(i for i in range(20, 300) if tokenizer.decode(free[i : i + 2]).isascii())
    pair = tokenizer.decode(free[ascii_at : ascii_at + 2])
    sequence = await drawn(sampler, MIXED["text"], LONG | {"stop": pair if form is str else [pair]})
    assert sequence.stop_reason == "stop"
    assert pair in tokenizer.decode(sequence.tokens.tolist())
    assert pair not in tokenizer.decode(sequence.tokens.tolist()[:-1])


async def test_without_max_tokens_a_sample_runs_to_the_context_limit(sampler):
    sequence = await drawn(sampler, prompt(words(3000)), {"max_tokens": None, "stop": []})
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 1096)


# Refusals ---------------------------------------------------------------------------------------------


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
        (request(MIXED["text"], record_stability_info=True), "record_stability_info"),
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
    write_directory(tmp_path / "strange", lambda at: write_adapter(at, tensors, LoraConfig(rank=4), "base"))
    write_directory(tmp_path / "wide", lambda at: write_adapter(at, tensors, LoraConfig(rank=128), "base"))
    for bad in (torn, tmp_path / "strange", tmp_path / "wide", torn):
        good = asyncio.create_task(sample(sampler, scoring(MIXED["text"]), adapters["large"]))
        with pytest.raises(BackendFailed, match="cannot load these weights"):
            await sample(sampler, request(MIXED["text"]), bad)
        assert_close((await good).prompt_logprobs, reference.prompt_logprobs(MIXED["text"], "large"))


# Lifetime ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("victim", ["engine", "host"])
async def test_a_crash_is_survived_by_the_running_call_and_the_next(sampler, reference, adapters, victim):
    call = asyncio.create_task(sample(sampler, request(MIXED["text"], {"max_tokens": 1500, "stop": []}), None))
    await asyncio.sleep(0.5)
    host = psutil.Process(sampler._child.process.pid)
    engine = next(child for child in host.children(recursive=True) if child.memory_info().rss > 300 << 20)
    (engine if victim == "engine" else host).kill()
    assert len((await call).sequences[0].tokens) == 1500
    response = await sample(sampler, scoring(MIXED["one image"]), adapters["small"])
    assert_close(response.prompt_logprobs, reference.prompt_logprobs(MIXED["one image"], "small"))
    assert not psutil.pid_exists(engine.pid)


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == np.float32
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
