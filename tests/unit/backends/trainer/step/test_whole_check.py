"""The first microbatches in which datums share beginnings are computed whole too: what differs is not used."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories import VOCAB, batch, image, make_renderer, prompt, succeeded, text
from tests.trainers import LORA, gradients, together, trained, trainer
from tests.tries import datums_of
from tinker_server.api_schemas.inputs import Chunk, Datum, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardOutput, Trainable
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.packing import Microbatch
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.backends.trainer.step.whole_check import WholeCheck

MODELS = {"m": LORA, "other": Trainable(rank=4, seed=2)}
GROUP = (150, 40), (150, 41), (150, 42), (150,)
DEEP = (150, 130, 9), (150, 130, 8), (150, 7), (60,)
Found = tuple[list[ForwardBackwardOutput], dict[str, dict[str, torch.Tensor]]]


def encode(inputs: Sequence[ModelInput], renderer: Renderer, advantages: Sequence[float] | None = None) -> EncodedBatch:
    """`advantages`: by datum, that of all its tokens; None: each token has its own."""
    random = np.random.default_rng(0)
    data: list[Datum] = []
    for model_input in inputs:
        length = renderer.layout(model_input, "datum").num_tokens
        given: dict[str, np.ndarray] = {
            "target_tokens": random.integers(0, VOCAB, length),
            "advantages": random.normal(size=length).astype(np.float32),
            "logprobs": np.full(length, -5.5, np.float32),
        }
        if advantages is not None:
            given["advantages"] = np.full(length, advantages[len(data)], np.float32)
        data.append(Datum(model_input=model_input, loss_fn_inputs=given))
    return batch(data, "ppo")


def texts(*parts: tuple[int, ...]) -> list[ModelInput]:
    return [prompt(text(*tokens)) for tokens in datums_of(*parts)]


def rank_of(source: Path, max_tokens: int = 4096) -> TrainerRank:
    return trained(trainer(source, max_tokens, max_context_length=4096), MODELS)


def compute(rank: TrainerRank, of: EncodedBatch, backward: bool = True) -> Found:
    """By both models, in common microbatches."""
    outputs = [succeeded(output) for output in together(rank, [(name, of) for name in MODELS], backward)]
    found = {name: gradients(rank, name) for name in MODELS} if backward else {}
    for model in rank.models.values():
        model.clear_gradient()
    return outputs, found


def assert_equal(found: Found, wanted: Found) -> None:
    for output, other in zip(found[0], wanted[0], strict=True):
        for own, of_other in zip(output.loss_fn_outputs, other.loss_fn_outputs, strict=True):
            np.testing.assert_array_equal(own["logprobs"], of_other["logprobs"])
    for name, tensors in wanted[1].items():
        assert all(torch.equal(found[1][name][key], tensor) for key, tensor in tensors.items())


def break_values(patch: pytest.MonkeyPatch) -> None:
    """Let tokens see their own segment alone."""
    patch.setattr(attention, "prefixes_of", lambda *_: [])


def break_gradients(patch: pytest.MonkeyPatch) -> None:
    """Double the gradient of what is gathered for datums that share tokens, and of nothing else."""
    own = Microbatch.of_samples

    def double(batch: Microbatch, values_TK: torch.Tensor) -> torch.Tensor:
        values = own(batch, values_TK)
        return values if batch.places_NK is None else values + values - values.detach()

    patch.setattr(Microbatch, "of_samples", double)


@pytest.mark.parametrize("max_tokens", [4096, 300])
@pytest.mark.parametrize("broken", [break_values, break_gradients])
def test_where_sharing_gives_other_numbers_datums_get_those_that_they_have_whole(
    broken, max_tokens: int, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank, of = rank_of(tiny_text, max_tokens), encode(texts(*GROUP, *DEEP), make_renderer(tiny_text))
    broken(monkeypatch)
    found = compute(rank, of)
    assert "datums that begin alike are computed whole from now on (" in caplog.text
    assert ("log probabilities of what follows beginnings differ by" in caplog.text) == (broken is break_values)
    assert ("gradients differ by 1 of their norm" in caplog.text) == (broken is break_gradients)
    for output in found[0]:
        assert output.metrics["sharing_off:max"] == 1 and "shared_tokens:sum" not in output.metrics
    later = compute(rank, of)
    assert_equal(found, later)
    fresh = rank_of(tiny_text, max_tokens)
    fresh.base.whole_below = None
    assert_equal(found, compute(fresh, of))
    assert all("sharing_off:max" not in output.metrics for output in later[0])
    assert caplog.text.count("from now on") == 1


def test_log_probabilities_alone_are_compared_too(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank, of = rank_of(tiny_text), encode(texts(*GROUP), make_renderer(tiny_text))
    break_values(monkeypatch)
    found = compute(rank, of, backward=False)
    assert "computed whole from now on (a level, text, several models): log probabilities" in caplog.text
    fresh = rank_of(tiny_text)
    fresh.base.whole_below = None
    assert_equal(found, compute(fresh, of, backward=False))


def test_the_microbatch_that_is_compared_has_the_bits_of_those_that_are_not(tiny_text: Path) -> None:
    rank, of = rank_of(tiny_text), encode(texts(*GROUP, *DEEP), make_renderer(tiny_text))
    sizes: list[int] = []
    rank.base.scorer.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0].targets_TK)))
    first, num_first = compute(rank, of), len(sizes)
    second = compute(rank, of)
    assert_equal(first, second)
    assert num_first > 2 and len(sizes) == num_first + 1, "both models' datums are in a microbatch"
    assert max(sizes) == sizes[0], "what is computed whole takes no more memory"
    assert first[0][0].metrics["shared_tokens:sum"] == second[0][0].metrics["shared_tokens:sum"] > 0


def test_each_kind_is_compared_once(tiny_vl: Path) -> None:
    rank, renderer = rank_of(tiny_vl), make_renderer(tiny_vl)
    begin: list[Chunk] = [text(*range(30)), image(256, 320, 1), text(*range(120))]
    kinds = {
        "a level": texts(*GROUP),
        "several levels": texts(*DEEP),
        "an image": [prompt(*begin, text(*range(number, number + 9))) for number in range(3)],
    }
    sizes: list[int] = []
    rank.base.scorer.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0].targets_TK)))
    for backward in (True, False):
        for of in (encode(inputs, renderer) for inputs in kinds.values()):
            before = len(sizes)
            compute(rank, of, backward)
            once = len(sizes)
            compute(rank, of, backward)
            assert once - before > 1 and len(sizes) - once == 1


def test_the_numbers_of_a_model_that_has_diverged_are_no_reason_to_end_sharing(tiny_text: Path) -> None:
    rank, of = rank_of(tiny_text), encode(texts(*GROUP), make_renderer(tiny_text))
    for stack in rank.models["m"].stacks:
        stack.a_LrI.data.fill_(torch.nan)
    failed, _ = together(rank, [("m", of), ("other", of)])
    assert "have diverged" in str(failed) and rank.base.whole_below == 0


@pytest.mark.parametrize("first", ["advantages of 0", "weights that diverged"])
def test_a_microbatch_without_a_gradient_to_compare_does_not_stand_for_others(
    first: str, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank, renderer = rank_of(tiny_text), make_renderer(tiny_text)
    if first == "advantages of 0":
        sizes: list[int] = []
        rank.base.scorer.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0].targets_TK)))
        compute(rank, encode(texts(*GROUP), renderer, [0.0] * 4))
        before = len(sizes)
        compute(rank, encode(texts(*GROUP), renderer, [0.0] * 4))
        assert len(sizes) == before + 1, "log probabilities are compared once"
    else:
        for name in MODELS:
            kept = [stack.a_LrI.data.clone() for stack in rank.models[name].stacks]
            for stack in rank.models[name].stacks:
                stack.a_LrI.data.fill_(torch.nan)
            together(rank, [(name, encode(texts(*GROUP), renderer))])
            for stack, own in zip(rank.models[name].stacks, kept, strict=True):
                stack.a_LrI.data.copy_(own)
    break_gradients(monkeypatch)
    compute(rank, encode(texts(*GROUP), renderer))
    assert "gradients differ by 1 of their norm" in caplog.text and rank.base.whole_below is None


@pytest.mark.parametrize("cause", ["no memory", "a gradient that is not finite"])
def test_what_could_not_be_compared_is_compared_in_another_microbatch(
    cause: str, tiny_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank, of = rank_of(tiny_text), encode(texts(*GROUP), make_renderer(tiny_text))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        if cause == "no memory":
            patch.setattr(WholeCheck, "_compute_whole", fail)
        else:
            patch.setattr(torch.Tensor, "norm", lambda _: torch.tensor(torch.nan))
        first = compute(rank, of)
    assert rank.base.whole_below == 0 and "shared_tokens:sum" in first[0][0].metrics
    break_gradients(monkeypatch)
    compute(rank, of)
    assert "gradients differ by 1 of their norm" in caplog.text and rank.base.whole_below is None


def test_of_a_kind_that_cannot_be_compared_some_microbatches_are_tried(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank, of = rank_of(tiny_text), encode(texts(*GROUP), make_renderer(tiny_text))
    tried = 0

    def fail(*_: object) -> None:
        nonlocal tried
        tried += 1
        raise torch.OutOfMemoryError

    monkeypatch.setattr(WholeCheck, "_compute_whole", fail)
    for _ in range(5):
        compute(rank, of)
    assert (
        tried == 3 and caplog.text.count("not compared with whole ones: a level, text, several models, gradients") == 1
    )


@pytest.mark.filterwarnings("error:The .grad attribute of a Tensor")
def test_a_rank_whose_datums_share_nothing_waits_for_those_that_compare(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of its log probabilities is not kept, so it is not read."""
    rank, of = rank_of(tiny_text), encode(texts((40,), (50,)), make_renderer(tiny_text))
    wanted = compute(rank, of)
    monkeypatch.setattr(WholeCheck, "is_due", lambda *_: True)  # of another rank's microbatch
    assert_equal(compute(rank, of), wanted)


def test_microbatches_of_a_model_and_of_several_are_compared(tiny_text: Path) -> None:
    rank, of = rank_of(tiny_text), encode(texts(*GROUP), make_renderer(tiny_text))
    sizes: list[int] = []
    rank.base.scorer.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0].targets_TK)))
    compute(rank, of)
    for compares in (True, False):
        before = len(sizes)
        together(rank, [("m", of)])
        assert (len(sizes) - before > 1) == compares
