"""Slots for factors that a layer's experts share, on CUDA: kernels of both forms of slots against a plain sum, and an
engine of either form against the trainer.

pytest tests/gpu/test_expert_slots.py
"""

import asyncio
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.factories import cross_entropy, make_renderer, present, prompt, words
from tests.gpu.agreement import ON_CUDA, TEXTS, assert_close, drawn_datum, of_text, on_cuda, scoring_datum
from tests.models import FAMILIES
from tests.sampling import request, sample, sampler_config
from tests.trainers import forward_backward, perturb
from tinker_server.api_schemas.training import Layout, Trainable
from tinker_server.backends.sampler.pool import SamplerPool

pytestmark = pytest.mark.gpu
SLOTS, EXPERTS, CHOSEN, HIDDEN, INNER = 3, 64, 8, 512, 128


@dataclass(frozen=True)
class Step:
    """What a layer's experts compute: tokens, each with a slot (-1 for none) and its experts, and factors of slots."""

    slots_T: Tensor
    experts_TK: Tensor
    weights_TK: Tensor
    x_TH: Tensor
    inner_TKI: Tensor
    into: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    """A [S, 1, R, H] and B [S, E, I, R] of gate and up."""
    down: tuple[Tensor, Tensor]
    """A [S, E, R, I] and B [S, 1, H, R]."""


def make_step(num_tokens: int, rank: int) -> Step:
    torch.manual_seed(num_tokens + rank)

    def normal(*shape: int) -> Tensor:
        made: Tensor = torch.randn(shape, device="cuda") * float(shape[-1]) ** -0.5
        return made.bfloat16()

    def into() -> tuple[Tensor, Tensor]:
        return normal(SLOTS, 1, rank, HIDDEN), normal(SLOTS, EXPERTS, INNER, rank)

    return Step(
        slots_T=torch.randint(-1, SLOTS, (num_tokens,)),
        experts_TK=torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(num_tokens)]).cuda().int(),
        weights_TK=torch.rand(num_tokens, CHOSEN, device="cuda"),
        x_TH=normal(num_tokens, HIDDEN) * HIDDEN**0.5,
        inner_TKI=normal(num_tokens, CHOSEN, INNER) * INNER**0.5,
        into=(into(), into()),
        down=(normal(SLOTS, EXPERTS, rank, INNER), normal(SLOTS, 1, HIDDEN, rank)),
    )


def by_kernels(step: Step, rank: int, *, shared: bool) -> tuple[Tensor, Tensor]:
    """Gate above up [T, K, 2 I] and down [T, H] of the adapters, from slots of this form."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import LoRAMapping
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

    from tinker_server.backends.sampler.engine.vllm_patches.shared_factors import SharedFactors

    num_tokens = len(step.slots_T)
    config = LoRAConfig(max_lora_rank=rank, max_loras=SLOTS, lora_dtype=torch.bfloat16)
    kernels = SharedFactors(max(num_tokens, 16), 16, "cuda", lora_config=config)
    numbers = tuple((step.slots_T + 1).tolist())
    kernels.update_metadata(LoRAMapping(numbers, numbers[:1]), [1, 2, 3], SLOTS, 1000)

    def of_form(factor: Tensor) -> Tensor:
        return factor if shared else factor.expand(-1, EXPERTS, -1, -1).contiguous()

    context = MoELoRAContext(
        w13_lora_a_stacked=tuple(of_form(a) for a, _ in step.into),
        w13_lora_b_stacked=tuple(b for _, b in step.into),
        w2_lora_a_stacked=(step.down[0],),
        w2_lora_b_stacked=(of_form(step.down[1]),),
        adapter_enabled=torch.ones(SLOTS + 1, dtype=torch.int32, device="cuda"),
        max_loras=SLOTS,
        top_k=CHOSEN,
        w13_num_slices=2,
        fully_sharded=False,
        tp_rank=0,
        tp_size=1,
        local_num_experts=EXPERTS,
        punica_wrapper=kernels,
        use_tuned_config=False,
        enable_moe_shared_loras=shared,
    )
    layer: Any = LoRAExpertsMixin()
    layer.moe_config = SimpleNamespace(activation=MoEActivation.SILU)
    into = torch.zeros(num_tokens, CHOSEN, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    down = torch.zeros(num_tokens, CHOSEN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = {
        "w1": torch.empty(EXPERTS, 2 * INNER, HIDDEN, device="meta"),
        "w2": torch.empty(EXPERTS, HIDDEN, INNER, device="meta"),
    }
    common = {"topk_weights": step.weights_TK, "num_tokens": num_tokens, "top_k_num": CHOSEN, **weights}
    sorted_ids, expert_ids, padded, mapping = layer.apply_w13_lora(
        context, y=into, x=step.x_TH, topk_ids=step.experts_TK, expert_map=None, **common
    )
    layer.apply_w2_lora(
        context,
        y=down,
        x=step.inner_TKI.view(-1, INNER),
        sorted_token_ids_lora=sorted_ids,
        expert_ids_lora=expert_ids,
        num_tokens_post_padded_lora=padded,
        token_lora_mapping=mapping,
        **common,
    )
    return into, down.sum(1, dtype=torch.float32)


def by_sums(step: Step) -> tuple[Tensor, Tensor]:
    """The same in float32, token by token."""
    into = torch.zeros(*step.experts_TK.shape, 2 * INNER, device="cuda")
    down = torch.zeros(*step.experts_TK.shape, HIDDEN, device="cuda")
    for token, slot in enumerate(step.slots_T.tolist()):
        if slot < 0:
            continue
        experts = step.experts_TK[token].long()
        for part, (a, b) in enumerate(step.into):
            low_R = step.x_TH[token].float() @ a[slot, 0].float().T
            into[token, :, part * INNER : (part + 1) * INNER] = b[slot, experts].float() @ low_R
        a, b = step.down
        low_KR = torch.einsum("kri,ki->kr", a[slot, experts].float(), step.inner_TKI[token].float())
        down[token] = low_KR @ b[slot, 0].float().T * step.weights_TK[token, :, None]
    return into, down.sum(1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rank", [8, 32, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64, 700])
def test_adapters_of_experts_are_added_from_slots_of_each_form(num_tokens: int, rank: int, *, shared: bool) -> None:
    """Few tokens and many, and the largest rank, have kernels of their own."""
    step = make_step(num_tokens, rank)
    for found, exact in zip(by_kernels(step, rank, shared=shared), by_sums(step), strict=True):
        torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2 * exact.abs().max().item() + 1e-6)


@pytest.mark.parametrize(
    ("kind", "slots"),
    [("Qwen3 MoE", "own"), ("Qwen3 MoE", "service"), ("Nemotron-3", "service"), ("gpt-oss", "service")],
)
async def test_an_engine_scores_and_draws_as_the_trainer_from_slots_of_each_form(
    kind: str, slots: Layout, tmp_path: Path
) -> None:
    source = FAMILIES[kind](tmp_path / "model")
    rank, renderer = on_cuda(source, "bfloat16"), make_renderer(source)
    for number, name in enumerate(("a", "b")):
        rank.create_model(name, Trainable(rank=4 << number, seed=number, layout="service"))
        perturb(rank, name)
        rank.save_sampler_weights(name, tmp_path / name, for_elsewhere=False)
    spec = dataclasses.replace(sampler_config(source, tmp_path / "scratch"), **ON_CUDA, expert_slots=slots)
    running = SamplerPool(spec)
    await running.start()
    data = [(name, scoring_datum(text, renderer)) for text in TEXTS.values() for name in ("a", "b")]
    asked = [(name, prompt(words(1, seed))) for name in ("a", "b") for seed in range(96)]
    scoring, drawing = {"max_tokens": 1}, {"max_tokens": 12, "stop": []}
    try:
        scores = await asyncio.gather(
            *(
                sample(running, request(item.model_input, scoring, prompt_logprobs=True), tmp_path / name)
                for name, item in data
            )
        )
        drawn = await asyncio.gather(
            *(sample(running, request(word, drawing), tmp_path / name) for name, word in asked)
        )
    finally:
        await running.stop()
    found = []
    for (name, item), answer in zip(data, scores, strict=True):
        (row,) = present(forward_backward(rank, name, cross_entropy([item]), False)).loss_fn_outputs
        found.append(of_text(item, present(answer.prompt_logprobs), row["logprobs"], renderer))
    assert_close(f"{kind}, {slots}", np.concatenate(found))
    found = []
    for (name, word), answer in zip(asked, drawn, strict=True):
        (sequence,) = answer.sequences
        item = drawn_datum(word, sequence)
        (row,) = present(forward_backward(rank, name, cross_entropy([item]), False)).loss_fn_outputs
        found.append(np.abs(sequence.logprobs - row["logprobs"]))
    assert_close(f"{kind}, {slots}, drawn", np.concatenate(found))
