"""Models whose datums share packed microbatches: each computes as alone, fails alone, and waits for at most one.

pytest tests/contract/test_shared_microbatches.py
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.factories import (
    LOSS_INPUTS,
    MIXED,
    batch_for,
    cross_entropy,
    datum,
    prompt,
    words,
)
from tests.ranks import on_two_ranks
from tests.trainers import (
    LORA,
    SMOOTH,
    assert_same,
    assert_same_gradients,
    config,
    forward_backward,
    gradients,
    lora_model,
    perturb,
    together,
    trainer,
)
from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardOutput, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.processes.spans import ProcessSpan, spans_to
from tinker_server.backends.protocol import EncodedBatch, InvalidInput, LoadedModel
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.model import packing, token_logprobs
from tinker_server.backends.trainer.model.recompute import Recomputation
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.backends.trainer.step.batch_request import Members
from tinker_server.backends.trainer.step.losses import LOSSES
from tinker_server.backends.trainer.step.step import Failures

RANKS = (1, 4, 8, 32)


def add_model(rank: TrainerRank, name: str, lora_rank: int, seed: int) -> None:
    rank.create_model(name, Trainable(rank=lora_rank, seed=seed, train_unembed=seed % 2 == 0))
    perturb(rank, name)


class Rows:
    """Counts the passes of the computed microbatches."""

    def __init__(self, rank: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.companies: list[int] = []
        compute = rank._training_step.compute

        def counted(rows: list[Members]) -> Failures:
            self.companies.append(len({one.number for row in rows for one in row}))
            return compute(rows)

        monkeypatch.setattr(rank._training_step, "compute", counted)


@pytest.fixture
def rank(tiny_vl: Path) -> TrainerRank:
    return trainer(tiny_vl, max_tokens=1024)


def assert_as_alone(
    rank: TrainerRank, batches: list[tuple[str, EncodedBatch]], outputs: list[ForwardBackwardOutput | Exception | None]
) -> None:
    """`outputs` and the gradients that stand are those of one model after the other."""
    in_company = {name: gradients(rank, name) for name, _ in batches}
    for (name, alone), output in zip(batches, outputs, strict=True):
        assert isinstance(output, ForwardBackwardOutput), output
        rank.models[name].clear_gradient()
        expected = forward_backward(rank, name, alone)
        assert expected is not None
        for got, wanted in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            # Large ones carry float32's relative rounding, which depends on the processor.
            np.testing.assert_allclose(got["logprobs"], wanted["logprobs"], atol=1e-5, rtol=1e-6)
        assert output.metrics.keys() == expected.metrics.keys()
        for key, value in expected.metrics.items():
            assert output.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-4), (name, key)
        assert_same_gradients(in_company[name], gradients(rank, name))


@pytest.mark.parametrize("losses", [list(LOSS_INPUTS), [name for name in LOSS_INPUTS if LOSSES[name].by_token]])
def test_eight_models_of_any_rank_and_loss_with_text_and_images_are_each_as_alone(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, losses: list[str]
) -> None:
    batches = []
    for place in range(8):
        loss_fn = losses[place % len(losses)]
        inputs = [prompt(words(5 + 3 * place, place)), list(MIXED.values())[place % len(MIXED)]]
        add_model(rank, f"m{place}", RANKS[place % 4], place)
        batches.append((f"m{place}", batch_for(loss_fn, inputs, renderer, 10 * place)))
    rows = Rows(rank, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(token_logprobs, "MAX_LOGITS", 7 * 384)
        patch.setattr(token_logprobs, "MANY_TOKENS", 1)
        outputs = together(rank, batches)
    assert rows.companies == [8]
    assert_as_alone(rank, batches, outputs)


@settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(data=st.data())
def test_any_mix_in_microbatches_of_any_budget_equals_each_alone(
    data: st.DataObject, tiny_vl: Path, renderer: Renderer
) -> None:
    rank = trainer(tiny_vl, max_tokens=data.draw(st.sampled_from([16, 60, 200])))
    batches = []
    for place in range(data.draw(st.integers(2, 4))):
        lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
        inputs = [prompt(words(length, place)) for length in lengths]
        if data.draw(st.booleans()):
            inputs.insert(data.draw(st.integers(0, len(inputs))), data.draw(st.sampled_from(list(MIXED.values()))))
        add_model(rank, f"m{place}", data.draw(st.sampled_from(RANKS)), place)
        loss_fn = data.draw(st.sampled_from(sorted(LOSS_INPUTS)))
        batches.append((f"m{place}", batch_for(loss_fn, inputs, renderer, 10 * place)))
    layers = Recomputation(rank.base.scorer.model.get_decoder().layers)
    assert layers.num_layers == 2
    layers.use(data.draw(st.integers(0, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            token_logprobs, "MAX_LOGITS", data.draw(st.sampled_from([384, 11 * 384, token_logprobs.MAX_LOGITS]))
        )
        outputs = together(rank, batches)
    layers.use(0)
    assert_as_alone(rank, batches, outputs)


def test_several_targets_of_a_token_have_log_probabilities_of_their_own(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name in enumerate(("soft", "plain", "other")):
        add_model(rank, name, 4, place)
    plain = cross_entropy([datum(MIXED["text"], renderer)])
    batches = [("soft", cross_entropy([datum(MIXED["text"], renderer, k=3)])), ("plain", plain), ("other", plain)]
    rows = Rows(rank, monkeypatch)
    outputs = together(rank, batches)
    assert rows.companies == [1, 2]
    assert_as_alone(rank, batches, outputs)


def test_an_image_that_does_not_decode_fails_its_own_request_alone(rank: TrainerRank, renderer: Renderer) -> None:
    good = datum(MIXED["one image"], renderer)
    chunk = next(chunk for chunk in good.model_input.chunks if isinstance(chunk, ImageChunk))
    broken = good.model_copy(
        update={
            "model_input": ModelInput(
                chunks=[
                    one.model_copy(update={"data": one.data[:-40]}) if one is chunk else one  # type: ignore[attr-defined]
                    for one in good.model_input.chunks
                ]
            )
        }
    )
    for place, name in enumerate(("broken", "sound")):
        add_model(rank, name, 4, place)
    sound = cross_entropy([good])
    failure, output = together(rank, [("broken", cross_entropy([good, broken])), ("sound", sound)])
    assert isinstance(failure, InvalidInput) and "datum 1" in str(failure)
    assert_as_alone(rank, [("sound", sound)], [output])
    with pytest.raises(InvalidInput, match="incomplete"):
        rank.optim_step("broken", SMOOTH)
    rank.optim_step("sound", SMOOTH)


def diverge(rank: TrainerRank, model_id: str) -> None:
    """Finite weights whose activations are not."""
    with torch.no_grad():
        for tensor in lora_model(rank, model_id).tensors.values():
            tensor.fill_(1e30)


def test_a_model_that_has_diverged_harms_no_batch_mate(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    for place, name in enumerate(("sound", "diverged", "sound too")):
        add_model(rank, name, 4, place)
        batches.append((name, cross_entropy([datum(MIXED["text"], renderer, place)])))
    diverge(rank, "diverged")
    rows = Rows(rank, monkeypatch)
    first, failure, last = together(rank, batches)
    assert rows.companies == [3, 1, 1, 1]
    assert isinstance(failure, InvalidInput) and "datum 0: the model's log probabilities are not finite" in str(failure)
    assert_as_alone(rank, [batches[0], batches[2]], [first, last])


def test_a_gradient_that_is_not_finite_stays_in_its_own_model(rank: TrainerRank, renderer: Renderer) -> None:
    """Log probabilities may be finite where their gradient is not."""
    huge = datum(MIXED["text"], renderer)
    huge.loss_fn_inputs["weights"] = np.full_like(huge.loss_fn_inputs["weights"], 3e38)
    sound = cross_entropy([datum(MIXED["text"], renderer, 1)])
    for place, name in enumerate(("huge", "sound")):
        add_model(rank, name, 4, place)
    _, output = together(rank, [("huge", cross_entropy([huge])), ("sound", sound)])
    assert_as_alone(rank, [("sound", sound)], [output])
    with pytest.raises(InvalidInput, match="not finite"):
        rank.optim_step("huge", SMOOTH)


def test_a_microbatch_that_runs_out_of_memory_is_computed_model_by_model(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:

    def scarce(samples, family, device, trie=None):  # type: ignore[no-untyped-def]
        if len(samples) > 1:
            raise torch.OutOfMemoryError("tried to allocate 8 GiB")
        return packing.pack(samples, family, device, trie)

    batches = []
    for place in range(3):
        add_model(rank, f"m{place}", 4, place)
        batches.append((f"m{place}", cross_entropy([datum(MIXED["text"], renderer, place)])))
    with monkeypatch.context() as patch:
        patch.setattr("tinker_server.backends.trainer.step.parts.pack", scarce)
        outputs = together(rank, batches)
    assert_as_alone(rank, batches, outputs)


def shared_on_a_rank(world: World, source: Path, seed: int) -> list[tuple[dict[str, torch.Tensor], list[np.ndarray]]]:
    """Three models, one of which diverges, trained together for a step; the weights and log probabilities."""
    rank = TrainerRank(config(source, max_tokens=64, num_ranks=world.size), world)
    renderer = Renderer(str(source), image_cache_bytes=1 << 20, max_image_pixels=10**7)
    batches = []
    for place in range(3):
        add_model(rank, f"m{place}", RANKS[place], place)
        inputs = [prompt(words(length, place)) for length in (7, 12 + place, 30, 5)]
        batches.append((f"m{place}", batch_for("cross_entropy", inputs, renderer, seed + place)))
    diverge(rank, "m1")
    outputs = together(rank, batches)
    results = []
    for (name, _), output in zip(batches, outputs, strict=True):
        if name == "m1":
            assert isinstance(output, InvalidInput)
            with pytest.raises(InvalidInput, match="incomplete"):
                rank.optim_step(name, SMOOTH)
            continue
        rank.optim_step(name, SMOOTH)
        logprobs = [] if output is None else [row["logprobs"] for row in output.loss_fn_outputs]  # type: ignore[union-attr]
        results.append((dict(lora_model(rank, name).tensors), logprobs))
    return results


def test_two_ranks_share_microbatches_as_one_does(tiny_text: Path) -> None:
    ranks = on_two_ranks(shared_on_a_rank, tiny_text, 5)
    alone = shared_on_a_rank(World(0, 1, torch.device("cpu")), tiny_text, 5)
    for of_rank in ranks:
        for (weights, _), (wanted, _) in zip(of_rank, alone, strict=True):
            assert_same(weights, wanted)
    for (_, got), (_, wanted_logprobs) in zip(ranks[0], alone, strict=True):
        for one, other in zip(got, wanted_logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nobody sets an event
        await asyncio.sleep(0)


@pytest.mark.usefixtures("forked_ranks")
async def test_a_flood_delays_anothers_small_request_by_no_more_than_a_microbatch(
    tiny_text: Path, renderer: Renderer
) -> None:
    large = cross_entropy([datum(prompt(words(64, seed)), renderer, seed) for seed in range(64)])
    small = cross_entropy([datum(prompt(words(8)), renderer)])
    client = TrainerClient(dataclasses.replace(config(tiny_text, 64), shares_microbatches=True))
    await client.start()
    try:
        flooding = await client.create_model("flood", LORA, "a")
        quiet = await client.create_model("small", LORA, "b")
        flood = asyncio.create_task(client.forward_backward(flooding, large, backward=True))
        rows = 0
        call_or_end = client._call_or_end

        async def counted(command):  # type: ignore[no-untyped-def]
            nonlocal rows
            rows += 1
            return await call_or_end(command)

        await until(lambda: flooding.latest_work > quiet.latest_work)
        client._call_or_end = counted  # type: ignore[method-assign]
        await client.forward_backward(quiet, small, backward=True)
        assert rows <= 3 and not flood.done()
        before = rows
        await client.optim_step(quiet, SMOOTH)
        assert rows <= before + 3 and not flood.done()
        assert len((await flood).loss_fn_outputs) == 64
        await client.optim_step(flooding, SMOOTH)
    finally:
        await client.stop()


@pytest.mark.slow
async def test_each_request_gets_the_spans_of_the_microbatches_with_its_datums(
    tiny_text: Path, renderer: Renderer
) -> None:
    long = cross_entropy([datum(prompt(words(64, seed)), renderer, seed) for seed in range(4)])
    short = cross_entropy([datum(prompt(words(24)), renderer)])
    client = TrainerClient(dataclasses.replace(config(tiny_text, 64), shares_microbatches=True))
    spans: dict[str, list[ProcessSpan]] = {"long": [], "short": [], "shorter": []}
    models: dict[str, LoadedModel] = {}

    async def compute(name: str, batch: EncodedBatch) -> None:
        with spans_to(spans[name].append):
            await client.forward_backward(models[name], batch, backward=True)

    await client.start()
    try:
        for name, owner in zip(spans, "abb", strict=True):
            models[name] = await client.create_model(name, LORA, owner)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(compute("long", long))
            await until(lambda: models["long"].latest_work > models["shorter"].latest_work)
            for name in ("short", "shorter"):
                group.create_task(compute(name, short))
    finally:
        await client.stop()
    (shared,) = spans["short"]
    assert spans["shorter"] == [shared] and len(spans["long"]) == 4
    times = sorted((one.began_ns, one.ended_ns) for one in [shared, *spans["long"]])
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    assert {(one.process, one.command, one.outcome) for one in [shared, *spans["long"]]} == {
        ("trainer tiny rank 0", "ComputeMicrobatch", "value")
    }


async def test_a_cancelled_caller_harms_no_batch_mate(tiny_text: Path, renderer: Renderer) -> None:
    data = cross_entropy([datum(prompt(words(64, seed)), renderer, seed) for seed in range(16)])
    client = TrainerClient(dataclasses.replace(config(tiny_text, 256), shares_microbatches=True))
    await client.start()
    try:
        models = [await client.create_model(name, LORA, name) for name in ("leaves", "stays")]
        leaving, staying = (
            asyncio.create_task(client.forward_backward(model, data, backward=True)) for model in models
        )
        await until(lambda: any(one.admitted for one in client._requests.values()))
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert len((await asyncio.wait_for(staying, 60)).loss_fn_outputs) == 16
        await client.optim_step(models[1], SMOOTH)
        with pytest.raises(InvalidInput, match="incomplete"):
            await client.optim_step(models[0], SMOOTH)
        assert not client._requests
    finally:
        await client.stop()
