"""An engine that keeps latents in place of whole keys and values.

pytest tests/contract/sampler/test_latent_cache.py
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.engines import fork_sampler
from tests.factories import present, prompt, words
from tests.models import LATENTS, make_tiny_deepseek_v3
from tests.sampling import ATOL, request, sample, sampler_config
from tests.trainers import logprobs, trained, trainer
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk
from tinker_server.api_schemas.training import Trainable
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.rank import TrainerRank

ADAPTERS = {
    "whole": Trainable(rank=4, seed=1, layout="service"),
    "attention": Trainable(rank=3, seed=2, train_mlp=False, train_unembed=False, layout="service"),
    "experts": Trainable(rank=8, seed=3, train_attn=False, layout="service"),
}


def trainer_scores(rank: TrainerRank, name: str, ids: np.ndarray) -> np.ndarray:
    """The trainer's log probability of each token after the first, nats."""
    given = prompt(EncodedTextChunk(tokens=ids[:-1].astype(np.int32)))
    inputs: dict[str, np.ndarray] = {
        "target_tokens": ids[1:].astype(np.int64),
        "weights": np.ones(len(ids) - 1, np.float32),
    }
    (found,) = logprobs(rank, [Datum(model_input=given, loss_fn_inputs=inputs)], name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("q_lora_rank", "num_ranks"), [(48, 1), (None, 1), (48, 2)])
async def test_an_engine_that_keeps_latents_scores_and_draws_as_the_trainer(
    q_lora_rank: int | None, num_ranks: int, tmp_path: Path
) -> None:
    source = make_tiny_deepseek_v3(tmp_path / "model", **LATENTS, q_lora_rank=q_lora_rank)
    models = {**ADAPTERS, "own": Trainable(rank=2, seed=3, train_mlp=False)}
    rank = trained(trainer(source), models)
    for name in models:
        rank.save_sampler_weights(name, tmp_path / name, for_elsewhere=False)
    spec = replace(sampler_config(source, tmp_path / "scratch"), expert_slots="service", latent_cache=True)
    running = SamplerPool(replace(spec, tensor_parallel=num_ranks), fork_sampler)
    await running.start()
    asked = {"max_tokens": 20, "temperature": 1.0, "seed": 1, "stop": []}
    try:
        differences = []
        for name, length in product(ADAPTERS, (5, 11, 40)):
            ids = words(length, length).tokens
            given = request(prompt(EncodedTextChunk(tokens=ids)), asked, prompt_logprobs=True)
            answer = await sample(running, given, tmp_path / name)
            (sequence,) = answer.sequences
            wanted = trainer_scores(rank, name, np.concatenate([ids, sequence.tokens]))
            got = np.concatenate([present(answer.prompt_logprobs)[1:], sequence.logprobs])
            differences.append(np.abs(got - wanted))
        assert np.concatenate(differences).max() < ATOL
        with pytest.raises(InvalidInput, match=r"linears out of latents \(LoRA layout own\), .*; own takes both"):
            await sample(running, given, tmp_path / "own")
    finally:
        await running.stop()
