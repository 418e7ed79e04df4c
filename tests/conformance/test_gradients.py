"""forward, forward_backward and every loss against transformers, PEFT and autograd; numbers are the checklist's.

pytest tests/conformance/test_gradients.py
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from tests.conformance.failures import bad
from tests.conformance.reference import PLAIN, Trained, assert_gradients
from tests.factories import MIXED, datum
from tests.loss_formulas import cispo, dro, gspo, importance_sampling, ppo
from tests.reference import Reference
from tests.servers import MODEL, sdk_datum
from tests.training import batch, step
from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.inputs.rendering import Renderer


def weights(item: Datum) -> Tensor:
    return torch.from_numpy(item.loss_fn_inputs["weights"])


def cross_entropy(reference: Reference, data: list[Datum]) -> Tensor:
    return sum((-(weights(item) * reference.logprobs(item)).sum() for item in data), torch.zeros(()))


def logprobs(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]


def assert_logprobs(output: types.ForwardBackwardOutput, reference: Reference, data: list[Datum]) -> None:
    assert len(output.loss_fn_outputs) == len(data)
    for got, item in zip(logprobs(output), data, strict=True):
        assert got.shape == item.loss_fn_inputs["target_tokens"].shape
        np.testing.assert_allclose(got, reference.logprobs(item).detach().numpy(), atol=1e-4)


def assert_elementwise_losses(output: types.ForwardBackwardOutput, data: list[Datum]) -> None:
    """Of every target, minus its weight times its log probability; together they are the loss."""
    losses = [row["elementwise_loss"].to_numpy() for row in output.loss_fn_outputs]
    for loss, logprob, item in zip(losses, logprobs(output), data, strict=True):
        assert loss.dtype == np.float32
        np.testing.assert_array_equal(loss, -item.loss_fn_inputs["weights"] * logprob)
    assert output.metrics["loss:sum"] == pytest.approx(sum(map(np.sum, losses)), rel=1e-5)


def test_028_logprobs_loss_and_gradient_are_those_of_autograd(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    before, data = trained.adapter(), batch(renderer)
    reference.take(before)
    output = trained.client.forward_backward([sdk_datum(item) for item in data], "cross_entropy").result()
    assert_logprobs(output, reference, data)
    assert_elementwise_losses(output, data)
    loss = cross_entropy(reference, data)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert all(key.count(":") == 1 for key in output.metrics)
    assert_gradients(trained.gradient(before), reference.gradient(loss))


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
async def test_029_forward_leaves_the_gradient_alone(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    before, data, other = trained.adapter(), batch(renderer), batch(renderer, 5)
    reference.take(before)
    await trained.client.forward_backward([sdk_datum(item) for item in data], "cross_entropy")
    for forward in (
        trained.client.forward([sdk_datum(item) for item in other], "cross_entropy"),
        await trained.client.forward_async([sdk_datum(item) for item in other], "cross_entropy"),
    ):
        output = await forward
        assert_logprobs(output, reference, other)
        assert_elementwise_losses(output, other)
        assert output.metrics["loss:sum"] == pytest.approx(cross_entropy(reference, other).item(), rel=1e-4)
    assert_gradients(trained.gradient(before), reference.gradient(cross_entropy(reference, data)))


def test_030_requests_before_a_step_add_up_and_the_step_clears_them(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    before, data = trained.adapter(), batch(renderer)
    reference.take(before)
    for item in data:
        trained.client.forward_backward([sdk_datum(item)], "cross_entropy")
    assert_gradients(trained.gradient(before), reference.gradient(cross_entropy(reference, data)))
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        trained.client.optim_step(types.AdamParams()).result()


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "nonsense"])
def test_088_after_a_failed_request_a_step_is_refused_and_the_next_gradient_is_whole(
    trained: Trained, reference: Reference, renderer: Renderer, loss_fn: str
) -> None:
    """A failed datum of a known loss, or an unknown loss: what was added before it is no part of a later step."""
    before, data = trained.adapter(), batch(renderer)
    reference.take(before)
    lost = batch(renderer, 5)
    trained.client.forward_backward([sdk_datum(item) for item in lost], "cross_entropy").result()
    broken = bad(target_tokens=np.full(5, 999)) if loss_fn == "cross_entropy" else bad()
    failing = trained.client.forward_backward([sdk_datum(lost[0]), broken], loss_fn)  # type: ignore[arg-type]
    stepping = trained.client.optim_step(PLAIN)
    for future, message in ((failing, "999|nonsense"), (stepping, "incomplete")):
        with pytest.raises(tinker.RequestFailedError, match=message):
            future.result()
    for name, tensor in trained.adapter().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    output = trained.client.forward_backward([sdk_datum(item) for item in data], "cross_entropy").result()
    assert_logprobs(output, reference, data)
    assert_gradients(trained.gradient(before), reference.gradient(cross_entropy(reference, data)))


def sparse(array: np.ndarray) -> types.TensorData:
    """As CSR, whatever its size."""
    rows, columns = np.nonzero(array)
    kind: Literal["int64", "float32"] = "int64" if np.issubdtype(array.dtype, np.integer) else "float32"
    starts = [0, *np.bincount(rows, minlength=len(array)).cumsum().tolist()]
    return types.TensorData(
        data=array[rows, columns].tolist(),
        dtype=kind,
        shape=list(array.shape),
        sparse_crow_indices=starts,
        sparse_col_indices=columns.tolist(),
    )


def test_035_soft_targets_dense_sparse_and_of_mixed_width(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    """The cells of targets and weights that hold something are not the same ones."""
    data = [
        datum(MIXED["text"], renderer, 1, k=3),
        datum(MIXED["one image"], renderer, 2),
        datum(MIXED["text"], renderer, 3, k=20),
        datum(MIXED["image last"], renderer, 4, k=1),
    ]
    random = np.random.default_rng(0)
    for item in data:
        inputs = item.loss_fn_inputs
        if inputs["weights"].ndim == 2:
            inputs["weights"][random.random(inputs["weights"].shape) < 0.7] = 0
            inputs["target_tokens"][random.random(inputs["weights"].shape) < 0.5] = 0
    before = trained.adapter()
    reference.take(before)
    loss = cross_entropy(reference, data)
    forms = {
        "dense": [sdk_datum(item) for item in data],
        "sparse": [
            types.Datum(
                model_input=sdk_datum(item).model_input,
                loss_fn_inputs={name: sparse(array) for name, array in item.loss_fn_inputs.items()},
            )
            if item.loss_fn_inputs["weights"].ndim == 2
            else sdk_datum(item)
            for item in data
        ],
        "torch": [
            types.Datum(
                model_input=sdk_datum(item).model_input,
                loss_fn_inputs={name: torch.from_numpy(array) for name, array in item.loss_fn_inputs.items()},  # type: ignore[misc]
            )
            for item in data
        ],
    }
    assert forms["sparse"][2].loss_fn_inputs["weights"].sparse_crow_indices is not None
    assert forms["torch"][2].loss_fn_inputs["weights"].sparse_crow_indices is not None, "the SDK's own choice"
    outputs = {form: trained.client.forward_backward(sent, "cross_entropy").result() for form, sent in forms.items()}
    for output in outputs.values():
        assert_logprobs(output, reference, data)
        assert_elementwise_losses(output, data)
        assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    thrice = {name: 3 * tensor for name, tensor in reference.gradient(loss).items()}
    assert_gradients(trained.gradient(before), thrice)


def test_036_negative_and_large_weights_are_weights_like_others(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    data = batch(renderer)
    for number, item in enumerate(data):
        item.loss_fn_inputs["weights"][:] *= (-100.0, 1e-3, -1.0, 50.0, 1.0)[number % 5]
        item.loss_fn_inputs["weights"][0] = -7
    before = trained.adapter()
    reference.take(before)
    output = trained.client.forward_backward([sdk_datum(item) for item in data], "cross_entropy").result()
    assert_logprobs(output, reference, data)
    assert_gradients(trained.gradient(before), reference.gradient(cross_entropy(reference, data)))


def test_036_weights_of_zero_have_logprobs_and_no_gradient(
    trained: Trained, reference: Reference, renderer: Renderer
) -> None:
    data = batch(renderer)
    for item in data:
        item.loss_fn_inputs["weights"][:] = 0
    before = trained.adapter()
    reference.take(before)
    output = trained.client.forward_backward([sdk_datum(item) for item in data], "cross_entropy").result()
    assert_logprobs(output, reference, data)
    assert output.metrics["loss:sum"] == 0
    assert all((moved == 0).all() for moved in trained.gradient(before).values())


BOUNDS: dict[str, float | str] = {"clip_low_threshold": 0.7, "clip_high_threshold": "1.5"}
RL: dict[str, tuple[str, Mapping[str, float | str], Callable[..., Tensor]]] = {
    "importance_sampling": ("importance_sampling", {}, lambda new, old, A, _: importance_sampling(new, old, A)),
    "ppo": ("ppo", {}, lambda new, old, A, _: ppo(new, old, A)),
    "ppo with bounds": ("ppo", BOUNDS, lambda new, old, A, _: ppo(new, old, A, 0.7, 1.5)),
    "cispo": ("cispo", {}, lambda new, old, A, _: cispo(new, old, A)),
    "cispo with bounds": ("cispo", BOUNDS, lambda new, old, A, _: cispo(new, old, A, 0.7, 1.5)),
    "dro": ("dro", {}, lambda new, old, A, _: dro(new, old, A)),
    "dro with beta": ("dro", {"beta": 0.3}, lambda new, old, A, _: dro(new, old, A, 0.3)),
    "gspo": ("gspo", {}, gspo),
    "gspo with bounds": ("gspo", BOUNDS, lambda new, old, A, mask: gspo(new, old, A, mask, 0.7, 1.5)),
}
"""One bound is text, as the wire has allowed since 0.35."""
SHIFTS = (-1.6, -0.6, -0.1, 0.1, 0.6)
"""From the current log probabilities to the sampler's: no ratio is near any bound, where rounding would decide."""

NARROW = (-5e-4, -3e-4, 1e-4, 2e-4, 4e-4)
"""The same for the narrow default bounds of gspo: the outer two are clipped."""


@pytest.mark.parametrize("name", RL)
def test_037_rl_losses_are_those_of_the_formulas(
    trained: Trained, reference: Reference, renderer: Renderer, name: str
) -> None:
    loss_fn, config, formula = RL[name]
    before = trained.adapter()
    reference.take(before)
    random = np.random.default_rng(3)
    data, losses = [], []
    for index, model_input in enumerate(MIXED.values()):
        item = datum(model_input, renderer, index)
        del item.loss_fn_inputs["weights"]
        current = reference.logprobs(item)
        # gspo takes the mean over a datum, so that it is whole datums that are clipped or not.
        shifts = [(NARROW if name == "gspo" else SHIFTS)[index]] if loss_fn == "gspo" else SHIFTS
        shift = random.choice(shifts, len(current)).astype(np.float32)
        item.loss_fn_inputs["logprobs"] = current.detach().numpy() + shift
        item.loss_fn_inputs["advantages"] = random.normal(size=len(current)).astype(np.float32)
        mask = (random.random(len(current)) < 0.7).astype(np.float32)
        if loss_fn == "gspo":
            item.loss_fn_inputs["sequence_ratio_mask"] = mask
        given = [torch.from_numpy(item.loss_fn_inputs[key]) for key in ("logprobs", "advantages")]
        losses.append(formula(current, *given, torch.from_numpy(mask)))
        data.append(item)
    loss = torch.stack(losses).sum()
    sent = [sdk_datum(item) for item in data]
    output = trained.client.forward_backward(sent, loss_fn, dict(config) or None).result()  # type: ignore[arg-type]
    assert_logprobs(output, reference, data)
    assert [{*row} for row in output.loss_fn_outputs] == [{"logprobs"}] * len(data)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-3)
    assert_gradients(trained.gradient(before), reference.gradient(loss))


def test_016_models_of_one_session_are_independent(service: tinker.ServiceClient, renderer: Renderer) -> None:
    first, second = (service.create_lora_training_client(MODEL, rank=8, seed=1).result() for _ in range(2))
    assert (first.model_id[-8:], second.model_id[-8:]) == (":train:0", ":train:1")
    data = [sdk_datum(item) for item in batch(renderer)]
    before = logprobs(second.forward(data, "cross_entropy").result())
    step(first, batch(renderer))
    for one, other in zip(logprobs(second.forward(data, "cross_entropy").result()), before, strict=True):
        np.testing.assert_array_equal(one, other)
    moved = logprobs(first.forward(data, "cross_entropy").result())
    assert max(np.abs(one - other).max() for one, other in zip(moved, before, strict=True)) > 1e-2
