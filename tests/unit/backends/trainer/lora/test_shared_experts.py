"""Experts that share the factors on the hidden side equal autograd through each expert's merged weights, alone and in a
microbatch with models whose experts have adapters of their own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from tinker_server.api_schemas.training import Layout
from tinker_server.backends.families.gpt_oss import apply_gate
from tinker_server.backends.families.gpt_oss.experts import BiasedExperts
from tinker_server.backends.trainer.lora.experts import LoraExperts
from tinker_server.backends.trainer.lora.linear import TokenScales

EXPERTS, HIDDEN, INNER, CHOSEN = 5, 12, 6, 3
RANKS: dict[Layout, int] = {"own": 2, "service": 3}
TOKENS_OF: dict[Layout, int] = {"own": 7, "service": 9}
SCALE = {"own": 1.5, "service": 0.75}
KINDS = ("gated", "ungated", "biased")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) / 3


def base_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "biased":
        base = BiasedExperts(EXPERTS, HIDDEN, INNER)
        for name, parameter in base.named_parameters():
            setattr(base, name, nn.Parameter(random(*parameter.shape), requires_grad=False))
        return base
    into = {"gate_up_proj": random(EXPERTS, 2 * INNER, HIDDEN)} if kind == "gated" else {}
    return SimpleNamespace(
        has_gate=kind == "gated",
        act_fn=nn.SiLU() if kind == "gated" else nn.ReLU(),
        down_proj=random(EXPERTS, HIDDEN, INNER),
        up_proj=random(EXPERTS, INNER, HIDDEN),
        **into,
    )


def experts_of(kind: str, scales: TokenScales) -> LoraExperts:
    return LoraExperts(base_of(kind), scales)


def load(experts: LoraExperts, layouts: tuple[Layout, ...]) -> dict[tuple[Layout, str], tuple[Tensor, Tensor]]:
    """Random adapters of one model of each layout, side by side; A [E or 1, R, I] and B [E or 1, R, O], whole."""
    width = sum(RANKS[layout] for layout in layouts)
    leaves, begin = {}, 0
    for layout, matrices in experts.adapters.items():
        rank = RANKS[layout] if layout in layouts else 0
        for name, adapters in matrices.items():
            (outputs, inputs), (num_a, num_b) = adapters.matrix_shape, adapters.num_matrices
            halves = [torch.zeros(num_a, width * bool(rank), inputs), torch.zeros(num_b, width * bool(rank), outputs)]
            halves = [half.double() for half in halves]
            for half in halves:
                half[:, begin : begin + rank] = random(len(half), rank, half.shape[2])
            adapters.take(*halves, *map(torch.zeros_like, halves))
            if rank:
                own = (half[:, begin : begin + rank].clone().requires_grad_() for half in halves)
                leaves[layout, name] = tuple(own)
        begin += rank
    return leaves  # type: ignore[return-value]


def one_token(experts: LoraExperts, x_H: Tensor, expert: int, adapters: dict[str, tuple[Tensor, Tensor]], scale: float):
    """One expert's output for a token, by its merged weights."""
    base: Any = experts.base
    deltas = {}
    for name, (a_ERI, b_ERO) in adapters.items():
        a_RI, b_RO = (half[expert if len(half) > 1 else 0] for half in (a_ERI, b_ERO))
        deltas[name] = scale * b_RO.T @ a_RI
    down = base.down_proj[expert] + deltas["down_proj"]
    if not base.has_gate:
        return down @ base.act_fn((base.up_proj[expert] + deltas["up_proj"]) @ x_H)
    gate, up = base.gate_up_proj[expert].split(INNER)
    gate_I, up_I = (gate + deltas["gate_proj"]) @ x_H, (up + deltas["up_proj"]) @ x_H
    if not isinstance(base, BiasedExperts):
        return down @ (base.act_fn(gate_I) * up_I)
    gate_bias, up_bias = base.gate_up_bias[expert].split(INNER)
    return down @ apply_gate(gate_I + gate_bias, up_I + up_bias) + base.down_bias[expert]


@pytest.mark.parametrize("layouts", [("service",), ("own", "service"), ("own",)], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_gets_what_merged_weights_give_each_expert(kind: str, layouts: tuple[Layout, ...]) -> None:
    scales = TokenScales()
    experts = experts_of(kind, scales)
    leaves = load(experts, layouts)
    owners = [layout for layout in layouts for _ in range(TOKENS_OF[layout])]
    scales.scales_TR = torch.tensor(
        [[SCALE[owner] * (layout == owner) for layout in layouts for _ in range(RANKS[layout])] for owner in owners]
    ).double()
    hidden_TH = random(len(owners), HIDDEN).requires_grad_()
    weights_TK = random(len(owners), CHOSEN).requires_grad_()
    experts_TK = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in owners])  # one has no token
    ours_TH = experts(hidden_TH, experts_TK, weights_TK)
    theirs_TH = torch.stack(
        [
            sum(
                weight * one_token(experts, x_H, expert, {name: leaves[owner, name] for name in names}, SCALE[owner])
                for expert, weight in zip(chosen.tolist(), weights_K, strict=True)
            )
            for owner, x_H, chosen, weights_K in zip(owners, hidden_TH, experts_TK, weights_TK, strict=True)
            for names in [experts.adapters[owner]]
        ]
    )
    torch.testing.assert_close(ours_TH, theirs_TH, rtol=1e-10, atol=1e-12)
    grad_TH = random(*ours_TH.shape)
    halves = [half for pair in leaves.values() for half in pair]
    grad_hidden, grad_weights, *wanted = torch.autograd.grad(theirs_TH, [hidden_TH, weights_TK, *halves], grad_TH)
    got = torch.autograd.grad(ours_TH, [hidden_TH, weights_TK], grad_TH)
    torch.testing.assert_close(got, (grad_hidden, grad_weights), rtol=1e-9, atol=1e-12)
    found = [gradient for layout, name in leaves for gradient in experts.adapters[layout][name].all[2:]]
    begins = {layout: sum(RANKS[one] for one in layouts[:place]) for place, layout in enumerate(layouts)}
    ranks = [slice(begins[layout], begins[layout] + RANKS[layout]) for layout, _ in leaves for _ in range(2)]
    for gradient, part, expected in zip(found, ranks, wanted, strict=True):
        torch.testing.assert_close(
            gradient[..., part, :], expected.view(*gradient.shape[:-2], -1, expected.shape[-1]), rtol=1e-9, atol=1e-12
        )


def test_the_hidden_side_has_one_factor_for_all_experts() -> None:
    experts = experts_of("gated", TokenScales())
    counts = {name: adapters.num_matrices for name, adapters in experts.adapters["service"].items()}
    assert counts == {"gate_proj": (1, EXPERTS), "up_proj": (1, EXPERTS), "down_proj": (EXPERTS, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_is_given_shared_factors_and_gradients_not_what_they_are_parts_of(kind: str) -> None:
    """torch 2.11 adds the offset of such a part twice: a layer's gradient goes to another layer."""
    scales, seen = TokenScales(), []

    def keep(module: fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        for operator in (torch.ops.tinker_server.multiply_a.default, torch.ops.tinker_server.multiply_b.default):
            seen.extend(module.graph.find_nodes(op="call_function", target=operator))
        return module.forward

    experts = experts_of(kind, scales)
    load(experts, ("service",))
    scales.scales_TR = random(7, RANKS["service"])
    compiled = torch.compile(experts, backend=keep, dynamic=True)
    compiled(random(7, HIDDEN), torch.arange(7 * CHOSEN).view(7, CHOSEN) % EXPERTS, random(7, CHOSEN))
    assert len(seen) == 2
    for node in seen:
        assert all(tensor.op == "placeholder" for tensor in tree_leaves(node.args[1:3]))
