"""Layers that recompute: their inputs wait in main memory where the plan says so."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tinker_server.backends.trainer.model.recompute import GIB, ActivationCosts, Recomputation, measure_costs


class Layer(GradientCheckpointingLayer):  # type: ignore[misc]
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(8, 8, generator=generator))

    def forward(self, hidden: Tensor, scale: float) -> Tensor:
        return hidden + torch.tanh(hidden @ self.weight) * scale


def run(layers: list[Layer]) -> tuple[Tensor, list[Tensor], list[bool]]:
    """The sum, the gradients, and whether each layer's input is still there before the backward."""
    start = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
    hidden, inputs = start * 1, []
    for layer in layers:
        inputs.append(weakref.ref(hidden.untyped_storage()))
        hidden = layer(hidden, scale=0.5)
    total = hidden.square().sum()
    del hidden
    are_there = [one() is not None for one in inputs]
    total.backward()
    gradients = [layer.weight.grad for layer in layers]
    return total.detach(), [one.clone() for one in (start.grad, *gradients) if one is not None], are_there


@pytest.mark.parametrize("num_recomputed", [2, 4])
def test_inputs_in_main_memory_are_no_longer_on_the_device_and_give_the_same_gradients(num_recomputed: int) -> None:
    found = []
    for offloads in (False, True):
        layers = [Layer(seed) for seed in range(4)]
        recomputation = Recomputation(layers, offloads=offloads)
        recomputation.use(num_recomputed)
        found.append(run(layers))
    (total, gradients, are_there), (offloaded, same, are_left) = found
    assert offloaded.equal(total) and all(one.equal(other) for one, other in zip(gradients, same, strict=True))
    assert len(gradients) == 5
    assert all(are_there) and not any(are_left[:num_recomputed])


MIB = 2**20


@pytest.mark.parametrize("free_gib", [6, 24, 60])
def test_what_a_head_takes_at_once_is_no_amount_per_token_however_little_is_free(free_gib: float) -> None:
    """As of 4 billion parameters: logits of at most 1,024 tokens at once, and from there on a copy of the weight."""
    ran: list[float] = []

    def peak(num_tokens: int, recomputing: int) -> float:
        head = 0.9 * MIB * min(num_tokens, 1024) + (0.8 * GIB if num_tokens >= 1024 else 0)
        ran.append(head + num_tokens * (0.3 * MIB + (36 - recomputing) * MIB / 12))
        return ran[-1]

    costs = measure_costs(peak, 36, free_gib * GIB, float)
    assert max(ran) <= free_gib * GIB
    assert costs.constant == pytest.approx(1.7 * GIB, rel=0.01)
    assert costs.least_per_token == pytest.approx(0.3 * MIB, rel=0.01)
    assert costs.saved_per_token == pytest.approx(MIB / 12, rel=0.01)
    assert costs.longest(free_gib * GIB) == pytest.approx((free_gib - 1.7) * 1024 / 0.3, rel=0.01)


def test_nothing_is_run_that_needs_more_than_is_free() -> None:
    ran: list[float] = []

    def peak(num_tokens: int, recomputing: int) -> float:
        ran.append(num_tokens * (0.3 * MIB + (36 - recomputing) * MIB / 12))
        return ran[-1]

    costs = measure_costs(peak, 36, 500 * MIB, float)
    assert max(ran) <= 500 * MIB
    assert costs.longest(500 * MIB) == pytest.approx(500 / 0.3, rel=0.01)


def test_ranks_that_wait_for_each_other_run_the_same_microbatches() -> None:
    """Two ranks that share a base, of which one has so little less free that it alone would not run a microbatch."""
    barrier, values = threading.Barrier(2), [0.0, 0.0]

    def measure(rank: int) -> tuple[list[tuple[int, int]], ActivationCosts]:
        ran: list[tuple[int, int]] = []

        def peak(num_tokens: int, recomputing: int) -> float:
            ran.append((num_tokens, recomputing))
            return num_tokens * (0.3 * MIB + (36 - recomputing) * MIB / 12) + rank * MIB

        def largest(value: float) -> float:
            values[rank] = value
            barrier.wait(timeout=10)
            found = max(values)
            barrier.wait(timeout=10)
            return found

        return ran, measure_costs(peak, 36, (2048 * 0.3 + 2.5 * (1 - rank)) * MIB, largest)

    with ThreadPoolExecutor(2) as threads:
        (ran, costs), (also_ran, also_costs) = threads.map(measure, range(2))
    assert ran == also_ran and costs == also_costs
    assert max(num_tokens for num_tokens, _ in ran) == 1024
