"""Models that share packed microbatches against transformers, PEFT and torch.optim, which compute each model alone.

pytest tests/contract/test_shared_against_peft.py
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.double_precision import in_float64
from tests.factories import MIXED, batch, datum_for, make_renderer, present, succeeded
from tests.reference import Reference, Steps
from tests.trainers import gradients as gradients_of
from tests.trainers import lora_model, trained, trainer
from tests.trainers import together as compute_together
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.training import AdamParams, ForwardBackwardOutput, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.backends.trainer.step.batch_request import Members

RTOL = {"float64": 1e-10, "float32": 5e-4}
"""Of a tensor's largest entry, and as far in log probabilities, nats. References are in float64. With the trainer in
float64 too, no rounding hides an error: 5e-12 is measured. In float32, as it is served, its rounding is 2e-4."""


BOUNDS = {"clip_low_threshold": 0.75, "clip_high_threshold": 1.25}
"""The same numbers in float32, which the trainer holds them in."""


class Run(NamedTuple):
    lora: Trainable
    loss_fn: str
    inputs: Sequence[str]
    """Of `MIXED`."""
    adam: AdamParams
    """With an `eps` as large as gradients: a step that is nearly their sign would blow rounding up."""
    config: Mapping[str, float] = MappingProxyType({})


def make_runs(last_loss: str) -> dict[str, Run]:
    """Return models of different ranks, so different scales, parts, losses, datums and optimizers."""
    return {
        "all parts": Run(
            Trainable(rank=8, seed=1),
            "cross_entropy",
            ["text", "three images of different sizes"],
            AdamParams(learning_rate=0.1, eps=1.0),
        ),
        "no head": Run(
            Trainable(rank=3, seed=2, train_unembed=False),
            "ppo",
            ["image last", "text", "one image"],
            AdamParams(learning_rate=0.03, beta1=0.5, beta2=0.8, eps=0.5, weight_decay=0.1),
            BOUNDS,
        ),
        "no attention": Run(
            Trainable(rank=32, seed=3, train_attn=False),
            "dro",
            ["text"],
            AdamParams(learning_rate=0.2, beta1=0.8, beta2=0.99, eps=2.0, grad_clip_norm=0.5),
        ),
        "attention alone": Run(
            Trainable(rank=1, seed=4, train_mlp=False, train_unembed=False),
            last_loss,
            ["image first", "text"],
            AdamParams(learning_rate=0.05, beta1=0.95, beta2=0.9, eps=1.5),
            BOUNDS if last_loss == "gspo" else {},
        ),
    }


class Recorder:
    """Notes how many models each microbatch has."""

    def __init__(self, rank: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_models: list[int] = []
        compute = rank._training_step.compute

        def noted(chosen: Sequence[Members]):  # type: ignore[no-untyped-def]
            self.num_models += [len({one.model for one in members}) for members in chosen]
            return compute(chosen)

        monkeypatch.setattr(rank._training_step, "compute", noted)


def data_of(run: Run, renderer: Renderer, seed: int) -> list[Datum]:
    return [datum_for(run.loss_fn, MIXED[name], renderer, seed + index) for index, name in enumerate(run.inputs)]


def assert_close_outputs(output: ForwardBackwardOutput, logprobs: Sequence[Tensor], loss: float, rtol: float) -> None:
    for got, wanted in zip(output.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_allclose(got["logprobs"], wanted.numpy(), atol=rtol, rtol=0)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=rtol, abs=rtol)


def assert_close_tensors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        largest = tensor.abs().max().item()
        assert largest > 0, f"{name}: a tensor of zeros proves nothing"
        assert (got[name] - tensor).abs().max().item() <= rtol * largest, name


@pytest.mark.parametrize(
    ("dtype", "last_loss"),
    [("float64", "importance_sampling"), ("float64", "gspo"), ("float32", "importance_sampling")],
)
def test_models_in_one_microbatch_train_as_each_does_by_transformers_peft_and_torch_optim(
    dtype: str, last_loss: str, tiny_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gspo` has no gradient by token: that of the head is then known in backward alone."""
    with in_float64() if dtype == "float64" else nullcontext():
        compare(tiny_vl, make_runs(last_loss), dtype, monkeypatch)


def compare(source: Path, runs: Mapping[str, Run], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take two steps of all models together, and of each by its reference."""
    rtol = RTOL[dtype]
    rank = trained(trainer(source, dtype=dtype), {name: run.lora for name, run in runs.items()})
    renderer = make_renderer(source, pixel_dtype=getattr(torch, dtype))
    references = {name: Reference(source, renderer, run.lora, torch.float64) for name, run in runs.items()}
    for name, reference in references.items():
        reference.take(lora_model(rank, name).tensors)
    steps = {name: Steps(references[name], run.adam) for name, run in runs.items()}
    recorder = Recorder(rank, monkeypatch)
    for seed in (0, 100):
        data = {name: data_of(run, renderer, seed + 10 * place) for place, (name, run) in enumerate(runs.items())}
        outputs = compute_together(
            rank, [(name, batch(data[name], run.loss_fn, run.config)) for name, run in runs.items()]
        )
        for (name, run), output in zip(runs.items(), outputs, strict=True):
            logprobs, loss = steps[name].forward_backward(run.loss_fn, data[name], run.config)
            assert_close_outputs(succeeded(output), logprobs, loss, rtol)
            wanted = {key: present(tensor.grad) for key, tensor in references[name].adapter.items()}
            assert_close_tensors(gradients_of(rank, name), wanted, rtol)
        for name, run in runs.items():
            before = {key: tensor.detach().clone() for key, tensor in references[name].adapter.items()}
            norm = present(rank.optim_step(name, run.adam).metrics)["grad_norm"]
            assert norm == pytest.approx(steps[name].optim_step(), rel=rtol)
            theirs, own = (
                {key: tensor.detach() - before[key] for key, tensor in tensors.items()}
                for tensors in (lora_model(rank, name).tensors, references[name].adapter)
            )
            assert_close_tensors(theirs, own, rtol)
    assert recorder.num_models == [4, 4]
