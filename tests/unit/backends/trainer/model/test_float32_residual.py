"""The residual stream in float32 under weights in bfloat16, in the trainer and in the engine."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from tests.factories import MIXED, cross_entropy, datum, make_renderer, prompt, words
from tests.models import FAMILIES, make_tiny_of
from tests.trainers import LORA, config, forward_backward, logprobs
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.sampler.engine.vllm_patches import float32_residual as of_engine
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.linear import LoraLinear
from tinker_server.backends.trainer.model.float32_residual import keep_in_float32
from tinker_server.backends.trainer.rank import TrainerRank

NUM_LAYERS = 24


def rank_in(dtype: Literal["float32", "bfloat16"], source: Path) -> TrainerRank:
    rank = TrainerRank(replace(config(source), dtype=dtype), World(0, 1, torch.device("cpu")))
    rank.create_model("m", LORA)
    return rank


def test_bfloat16_is_then_nearer_to_float32_than_transformers_own(tmp_path):
    # Deep, over 600 tokens: products in bfloat16 round differently on each processor, which few tokens do not even out.
    source = make_tiny_of("qwen3", tmp_path, num_hidden_layers=2 * NUM_LAYERS)
    renderer = make_renderer(source)
    items = [datum(prompt(words(length, length)), renderer, length) for length in (120, 150, 130, 200)]
    exact, ours = (logprobs(rank_in(dtype, source), items) for dtype in ("float32", "bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    far, near = [], []
    for item, one, other in zip(items, exact, ours, strict=True):
        ids, targets = (
            torch.from_numpy(values).long()
            for values in (renderer.render(item.model_input, "").token_ids_T, item.loss_fn_inputs["target_tokens"])
        )
        with torch.no_grad():
            hidden = model.model(input_ids=ids[None]).last_hidden_state[0].float()
            scores = (hidden @ model.lm_head.weight.float().T).log_softmax(-1)
        own = scores.gather(-1, targets[:, None])[:, 0].numpy()
        far.append(abs(own - one).mean())
        near.append(abs(other - one).mean())
    print(f"from float32: transformers {sum(far) / 4:.5f}, ours {sum(near) / 4:.5f} nats")
    assert sum(near) < 0.85 * sum(far)


KINDS: dict[str, Callable[[Path], Path]] = {
    **FAMILIES,
    **{kind: partial(make_tiny_of, kind) for kind in ("olmo2", "olmo3", "exaone4", "apertus", "glm4", "granite")},
}
"""The families that are served, and others whose norms are elsewhere, or have other names."""


@pytest.mark.parametrize("kind", KINDS)
def test_layers_add_in_float32_and_their_products_take_bfloat16(kind, tmp_path):
    source = KINDS[kind](tmp_path)
    renderer, rank = make_renderer(source), rank_in("bfloat16", source)
    decoder = rank.base.scorer.model.get_decoder()
    streams: set[torch.dtype] = set()
    taken: set[torch.dtype] = set()

    def note_stream(_: object, arguments: tuple, keywords: dict) -> None:
        streams.add(arguments[0].dtype if arguments else keywords["hidden_states"].dtype)

    for layer in decoder.layers:
        layer.register_forward_pre_hook(note_stream, with_kwargs=True)
    for module in decoder.modules():
        if isinstance(module, LoraLinear):
            module.register_forward_pre_hook(lambda _, arguments: taken.add(arguments[0].dtype))
    inputs = [prompt(words(9)), *(MIXED.values() if renderer.takes_images else ())]
    output = forward_backward(rank, "m", cross_entropy([datum(one, renderer) for one in inputs]))
    assert output is not None
    assert (streams, taken) == ({torch.float32}, {torch.bfloat16})
    assert rank.optim_step("m", AdamParams(learning_rate=1e-3)).metrics["grad_norm"] > 0


def test_a_model_with_torchs_own_norms_is_not_changed():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = PhiForCausalLM(PhiConfig(vocab_size=64, **sizes)).to(torch.bfloat16).eval()
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    keep_in_float32(model)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.fixture
def engine_norms(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    of_engine.register_norms()
    with set_current_vllm_config(VllmConfig()):
        yield


class DecoderLayer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = norm

    def forward(self, hidden_states, residual):
        return self.input_layernorm(hidden_states, residual)


@pytest.mark.parametrize(("kind", "offset"), [(RMSNorm, 0), (GemmaRMSNorm, 1)])
def test_the_norms_of_the_engines_decoder_layers_add_in_float32_and_round_once(engine_norms, kind, offset):
    torch.manual_seed(0)
    norm = kind(64).to(torch.bfloat16)
    of_engine.mark(nn.Sequential(DecoderLayer(norm)))
    norm.weight.data.normal_()
    parts = torch.randn(5, 7, 64, dtype=torch.bfloat16)
    stream, exact = parts[0], parts[0].double()
    for part in parts[1:]:
        normed, stream = norm(part.clone(), stream.clone())
        exact = exact + part.double()
        assert (normed.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(stream.double(), exact, rtol=0, atol=1e-5)
        scale = (exact.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        expected = (exact * scale * (norm.weight.double() + offset)).to(torch.bfloat16)
        # Rounded once: only if float64 lies between two numbers of bfloat16 may it be the other of the two.
        assert (normed == expected).double().mean() > 0.99
        torch.testing.assert_close(normed, expected, rtol=2**-7, atol=0)


def test_the_engines_norms_are_vllms_own_in_float32_in_a_vision_tower_and_without_a_residual(engine_norms):
    norm = RMSNorm(64)
    of_engine.mark(nn.Sequential(DecoderLayer(norm)))
    values, residual = torch.randn(2, 7, 64)
    normed, summed = norm(values.clone(), residual=residual.clone())
    assert torch.equal(summed, values + residual)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(summed, (64,), eps=norm.variance_epsilon))
    short, other = values.to(torch.bfloat16), residual.to(torch.bfloat16)
    assert norm.to(torch.bfloat16)(short).dtype == torch.bfloat16
    of_tower = RMSNorm(64).to(torch.bfloat16)
    assert [one.dtype for one in of_tower(short.clone(), residual=other.clone())] == [torch.bfloat16] * 2
    # Like a decoder's last norm, which is beside its layers.
    assert [one.dtype for one in of_tower(short, residual)] == [torch.bfloat16, torch.float32]
