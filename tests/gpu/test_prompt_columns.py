"""On CUDA's model runner, chosen and drawn prompt tokens have the log probabilities that the prompt itself has.

pytest tests/gpu
"""

import numpy as np
import pytest
import tinker.types as types

from tests.factories import as_text, prompt, words
from tests.servers import MODEL, sdk_input
from tests.training import batch, step

pytestmark = pytest.mark.gpu


def test_chosen_and_drawn_tokens_agree_with_the_other_scores(server, renderer):
    service = server.client()
    client = service.create_lora_training_client(MODEL, rank=8, seed=1).result()
    for number in range(2):
        step(client, batch(renderer, number), types.AdamParams(learning_rate=5e-3))
    base = service.create_sampling_client(base_model=MODEL).result()
    adapted = client.save_weights_and_get_sampling_client().result()
    works = []
    for index in range(12):
        model_input = prompt(words([5, 60, 700][index % 3], index))
        ids = as_text(model_input.chunks[0]).tokens.astype(np.int64)
        targets = np.stack([ids[1:], np.full(len(ids) - 1, -1), ids[:-1]], axis=1)
        future = (adapted, base)[index % 2].sample(
            sdk_input(model_input),
            1,
            types.SamplingParams(max_tokens=4, temperature=0.7, seed=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=50,
            target_prompt_logprobs=types.TensorData.from_numpy(targets),
            prompt_alt_tokens_k=8,
        )
        works.append((ids, future))
    for ids, future in works:
        result = future.result()
        chosen = np.asarray(result.target_prompt_logprobs.data).reshape(len(ids) - 1, 3)
        np.testing.assert_allclose(chosen[:, 0], result.prompt_logprobs[1:], atol=1e-3)
        assert (chosen[:, 1] == 0).all()
        drawn = np.asarray(result.prompt_alt_tokens.tokens.data).reshape(-1, 8)
        scores = np.asarray(result.prompt_alt_tokens.logprobs.data).reshape(-1, 8)
        found = 0
        for row, (tokens, values) in enumerate(zip(drawn, scores, strict=True), start=1):
            likeliest = dict(result.topk_prompt_logprobs[row])
            for token, value in zip(tokens.tolist(), values.tolist(), strict=True):
                if token in likeliest:
                    found += 1
                    assert value == pytest.approx(likeliest[token], abs=1e-3)
        assert found > drawn.size / 20
