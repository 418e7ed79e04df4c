"""Sampled tokens are trained by the experts that sampled them: engine and trainer, and a whole server.

pytest -m slow tests/contract/test_replayed_routing.py
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker import types

from tests.engines import fork_sampler
from tests.factories import MIXED, cross_entropy, make_renderer, present, prompt, words
from tests.gpu.agreement import LARGEST, MEAN
from tests.models import make_tiny_deepseek_v3, make_tiny_gpt_oss, make_tiny_vl, make_wide_moe
from tests.sampling import ATOL, request, sample, sampler_config
from tests.servers import Server
from tests.trainers import LORA, OWNER, config, forward_backward, perturb
from tests.training import rl_datum
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.backends.formats.expert_routing import read_routing, routing_name
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

pytestmark = pytest.mark.slow


def with_sampled(model_input: ModelInput, tokens: np.ndarray) -> ModelInput:
    return ModelInput(chunks=[*model_input.chunks, EncodedTextChunk(tokens=np.asarray(tokens, np.int32))])


@pytest.mark.parametrize(
    ("make", "num_ranks", "prompts"),
    [
        (partial(make_tiny_vl, moe=True), 1, [*MIXED.values()]),
        (partial(make_tiny_vl, moe=True), 2, [*MIXED.values()]),
        (make_tiny_gpt_oss, 1, [prompt(words(9, 9))]),
        (make_tiny_deepseek_v3, 1, [prompt(words(9, 9))]),
    ],
    ids=["Qwen3-VL MoE", "Qwen3-VL MoE on two ranks", "gpt-oss", "DeepSeek-V3"],
)
async def test_the_trainer_finds_the_experts_of_prompts_images_samples_and_later_messages(
    make: Callable[[Path], Path], num_ranks: int, prompts: list[ModelInput], tmp_path: Path
) -> None:
    """In float32, where both choose the same experts: so the engine reports what the trainer would choose."""
    source, routing_dir = make(tmp_path / "model"), tmp_path / "routing"
    renderer = make_renderer(source)
    rank = TrainerRank(replace(config(source), routing_dir=routing_dir), World(0, 1, torch.device("cpu")))
    rank.create_model("m", LORA.model_copy(update={"layout": "service"}))
    perturb(rank, "m")
    rank.save_sampler_weights("m", tmp_path / "m", for_elsewhere=False)
    spec = replace(sampler_config(source, tmp_path / "scratch"), routing_dir=routing_dir, tensor_parallel=num_ranks)
    running = SamplerPool(spec, fork_sampler)
    await running.start()
    drawn: list[tuple[ModelInput, np.ndarray, np.ndarray]] = []

    async def draw(prompts: list[ModelInput], seed: int) -> None:
        params = {"max_tokens": 21, "stop": [], "seed": seed}
        asked = [request(one, params, num_samples=2) for one in prompts]
        answers = await asyncio.gather(*(sample(running, one, tmp_path / "m") for one in asked))
        for one, answer in zip(prompts, answers, strict=True):
            drawn.extend((one, sequence.tokens, sequence.logprobs) for sequence in answer.sequences)

    try:
        await draw([*prompts, prompt(words(300, 3))], seed=1)
        # A second message, whose beginning is in the prefix cache: the engine computes only the new part.
        await draw([with_sampled(one, np.append(tokens, [5, 6, 7])) for one, tokens, _ in drawn], seed=2)
        before = {path.name for path in routing_dir.iterdir()}
        await sample(running, request(prompt(words(9, 9))), None)
    finally:
        await running.stop()
    assert {path.name for path in routing_dir.iterdir()} == before  # the base model's samples are nobody's to train

    chosen: list[torch.Tensor] = []
    for module in rank.base.scorer.model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            module.register_forward_hook(lambda _, inputs, output: chosen.append(output[2]))
    for model_input, tokens, logprobs in drawn:
        whole = with_sampled(model_input, tokens[:-1])
        rendered = renderer.render(whole, "datum")
        targets = np.append(rendered.token_ids_T[1:], tokens[-1])
        item = Datum(
            model_input=whole,
            loss_fn_inputs={"target_tokens": targets, "weights": np.ones(len(targets), np.float32)},
        )
        chosen.clear()
        output = forward_backward(rank, "m", cross_entropy([item]), False)
        assert present(output).metrics["replayed_tokens:sum"] == len(targets)
        np.testing.assert_allclose(present(output).loss_fn_outputs[0]["logprobs"][-len(tokens) :], logprobs, atol=ATOL)
        own_TLK = torch.stack(chosen, dim=1).numpy()
        kept_TLK = present(read_routing(routing_dir, routing_name(OWNER, "m", rendered)))
        kept_TLK = kept_TLK[:, -own_TLK.shape[1] :]  # the first layers may have no experts
        assert (np.sort(kept_TLK, -1) == np.sort(own_TLK, -1)).all(-1).mean() > 0.999  # but for the nearest to a tie


def with_sequence(item: types.Datum, sequence: types.SampledSequence) -> types.Datum:
    """Say that the datum is the sequence behind its prompt, as the SDK has it."""
    num_sampled, name = len(sequence.tokens), sequence.sequence_id
    num_prompt = len(item.model_input.to_ints()) + 1 - num_sampled
    prompt_of = types.PromptProvenanceSpan(sequence_id=name, length=num_prompt)
    shifted = types.PromptProvenanceSpan(sequence_id=name, offset=1, length=num_prompt - 1)
    return item.with_provenance(
        model_input=[prompt_of, types.SampledProvenanceSpan(sequence_id=name, length=num_sampled - 1)],
        loss_fn_inputs=[shifted, types.SampledProvenanceSpan(sequence_id=name, length=num_sampled)],
    )


def test_through_the_sdk_trainer_and_sampler_agree_in_bfloat16_on_a_mixture(tmp_path: Path) -> None:
    """Without replay this model's mean difference is 0.05 nats, and its largest 0.3 and more."""
    source = make_wide_moe(tmp_path / "model")
    server = Server(tmp_path / "data", {"wide": source}, "--replay-routing", backend__dtype="bfloat16").start()
    try:
        training = server.client().create_lora_training_client("wide", rank=8, seed=1).result()
        random = np.random.default_rng(0)
        for _ in range(2):  # the second of weights that have learned
            sampling = training.save_weights_and_get_sampling_client().result()
            prompts = [random.integers(1, 250, 16).tolist() for _ in range(4)]
            params = types.SamplingParams(max_tokens=32, stop=[])
            futures = [sampling.sample(types.ModelInput.from_ints(one), 2, params) for one in prompts]
            drawn = [
                (one, of) for one, future in zip(prompts, futures, strict=True) for of in future.result().sequences
            ]
            sequences = [sequence for _, sequence in drawn]
            data = [rl_datum(one, sequence, 1.0) for one, sequence in drawn]
            metrics = training.forward_backward(data, "importance_sampling").result().metrics
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            assert metrics["replayed_tokens:sum"] == sum(len(one.model_input.to_ints()) for one in data)
            assert metrics["sampler_gap:mean"] < MEAN
            assert metrics["sampler_gap:max"] < LARGEST
        other = server.client().create_lora_training_client("wide", rank=8, seed=1).result()
        assert other.forward(data, "importance_sampling").result().metrics["replayed_tokens:sum"] == 0
        named = [with_sequence(item, sequence) for item, sequence in zip(data, sequences, strict=True)]
        for model in (training, other):
            metrics = model.forward(named, "importance_sampling").result().metrics
            assert metrics["replayed_tokens:sum"] == sum(len(one.model_input.to_ints()) for one in named)
    finally:
        server.stop()
