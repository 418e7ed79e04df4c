"""Layers that recompute: their inputs wait in main memory where the plan says so."""

import weakref

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tinker_server.backends.trainer.model.recompute import Recomputation


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
