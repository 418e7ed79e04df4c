"""Models other than the one that all other tests share, on the CPU."""

import asyncio

import pytest

from tests.engines import fork_sampler
from tests.factories import make_renderer, prompt, words
from tests.models import make_tiny_qwen3_5, make_tiny_text, make_tiny_vl
from tests.sampling import (
    RANKS,
    Reference,
    assert_close,
    assert_sequence_close,
    request,
    sample,
    sampler_config,
)
from tests.slots import running_engine
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("model", ["tied head", "text only"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
async def test_other_models_with_adapters_on_the_head_are_those_of_peft(model, tmp_path):
    """A tied head's adapter acts on its output alone, never on the input embeddings."""
    source = tmp_path / "model"
    source = make_tiny_text(source) if model == "text only" else make_tiny_vl(source, tie=True)
    reference = Reference(source, make_renderer(source), RANKS)
    names = [None, *RANKS]
    saved = {name: reference.save(name, rank, tmp_path / name) for name, rank in RANKS.items()}
    running = SamplerPool(sampler_config(source, tmp_path / "scratch"), fork_sampler)
    await running.start()
    try:
        inputs = [prompt(words(20 + i, i)) for i in range(24)]
        works = [request(one, prompt_logprobs=True) for one in inputs]
        responses = await asyncio.gather(
            *(sample(running, work, saved.get(names[i % 6] or "")) for i, work in enumerate(works))
        )
    finally:
        await running.stop()
    for i, response in enumerate(responses):
        assert_close(response.prompt_logprobs, reference.prompt_logprobs(inputs[i], names[i % 6]))
        assert_sequence_close(response, reference, inputs[i], names[i % 6])


async def test_the_gated_norm_of_linear_attention_is_in_float32(tmp_path):
    source = make_tiny_qwen3_5(tmp_path / "model")
    async with running_engine(source, make_renderer(source), tmp_path / "scratch") as engine:
        (found,) = await engine.collective_rpc("types_of", args=("linear_attn.norm.weight",))
    assert set(found) == {"torch.float32"}
