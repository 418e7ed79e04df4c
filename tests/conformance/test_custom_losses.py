"""Losses that are written on the client, against direct autograd; numbers are the checklist's.

pytest tests/conformance/test_custom_losses.py
"""

from typing import Any

import pytest
import tinker
import torch
from tinker import types
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.conformance.reference import PLAIN, Trained, assert_gradients
from tests.factories import MIXED, datum, present
from tests.reference import Reference
from tests.servers import sdk_datum
from tests.training import batch
from tinker_server.backends.inputs.rendering import Renderer

KINDS = [pytest.param(None, id="one target"), pytest.param(3, id="three targets")]


def curved(logprobs: list[Tensor]) -> Tensor:
    """Neither a sum over tokens nor over datums."""
    means = torch.stack([one.mean() for one in logprobs])
    return (means**2).sum() + (logprobs[0] * logprobs[0].detach().cos()).sum() - logsigmoid(means[0] - means[1])


def loss_of(_: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    return curved(logprobs), {"custom_metric": 7.0}


@pytest.mark.parametrize("k", KINDS)
@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
async def test_047_and_048_a_custom_loss_has_the_gradient_of_autograd(
    trained: Trained, reference: Reference, renderer: Renderer, k: int | None, twin: bool
) -> None:
    data = [datum(model_input, renderer, index, k=k) for index, model_input in enumerate(MIXED.values())]
    sent = []
    for item in data:
        one = sdk_datum(item)
        targets = {"target_tokens": one.loss_fn_inputs["target_tokens"]}
        sent.append(types.Datum(model_input=one.model_input, loss_fn_inputs=targets))
    before = trained.adapter()
    reference.take(before)
    if twin:
        future = await trained.client.forward_backward_custom_async(sent, loss_of)
    else:
        future = trained.client.forward_backward_custom(sent, loss_of)
    output = await future
    logprobs = [reference.logprobs(item) for item in data]
    expected = curved(logprobs)
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    assert output.metrics["custom_metric"] == 7
    for row, wanted in zip(output.loss_fn_outputs, logprobs, strict=True):
        torch.testing.assert_close(row["logprobs"].to_torch(), wanted.detach(), atol=1e-4, rtol=0)
    assert_gradients(trained.gradient(before), reference.gradient(expected))


def test_047_a_step_submitted_before_the_loss_is_known_uses_its_gradient(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    data = batch(renderer)
    before = trained.adapter()
    reference.take(before)
    passed = trained.client.forward_backward_custom([sdk_datum(item) for item in data], loss_of)
    stepped = trained.client.optim_step(PLAIN)
    metrics = present(stepped.result().metrics)
    wanted = reference.gradient(curved([reference.logprobs(item) for item in data]))
    norm = torch.stack([one.norm() for one in wanted.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4) and passed.result().metrics["custom_metric"] == 7
    assert_gradients(trained.stepped(before), wanted)


def test_049_a_traced_loss_has_the_gradient_of_autograd(
    trained: Trained, reference: Reference, renderer: Renderer, service: tinker.ServiceClient
) -> None:
    def squared(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss = (logprobs * weights).pow(2).sum()
        return loss, {"custom/squared:sum": loss}

    data = batch(renderer)
    before = trained.adapter()
    reference.take(before)
    handle = service.create_custom_loss(squared, input_ranks={"logprobs": 1, "weights": 1}).result()
    output = trained.client.forward_backward_custom([sdk_datum(item) for item in data], handle).result()
    losses = [
        (reference.logprobs(item) * torch.from_numpy(item.loss_fn_inputs["weights"])).pow(2).sum() for item in data
    ]
    expected = torch.stack(losses).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    assert output.metrics["custom/squared:sum"] == pytest.approx(expected.item(), rel=1e-4)
    assert_gradients(trained.gradient(before), reference.gradient(expected))
