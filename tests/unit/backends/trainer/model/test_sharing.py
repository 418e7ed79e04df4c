"""Datums that begin alike give the numbers that they have whole: log probabilities, and every gradient."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.double_precision import in_float64
from tests.factories import VOCAB, batch, image, make_renderer, present, prompt, succeeded, text
from tests.loss_formulas import loss_of
from tests.models import (
    make_tiny_deepseek_v3,
    make_tiny_gemma3,
    make_tiny_gpt_oss,
    make_tiny_internvl,
    make_tiny_moe,
    make_tiny_nemotron_h,
    make_tiny_of,
    make_tiny_qwen3_5,
    make_tiny_qwen3_next,
)
from tests.reference import Reference
from tests.trainers import (
    assert_same,
    assert_same_gradients,
    forward_backward,
    gradients,
    lora_model,
    together,
    trained,
    trainer,
)
from tests.tries import datums_of, put_images, random_trie
from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardOutput, Trainable
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.backends.trainer.model.shared_prefixes import SAVED_PER_STATE, Prefixes
from tinker_server.backends.trainer.rank import TrainerRank
from tinker_server.backends.trainer.step.losses import LOSSES

MODELS = {"m": Trainable(rank=8, seed=1), "other": Trainable(rank=4, seed=2)}
Outputs = Sequence[ForwardBackwardOutput | Exception | None]


def rank_of(source: Path, dtype: str = "float32") -> TrainerRank:
    rank = trained(trainer(source, 4096, max_context_length=4096, dtype=dtype), MODELS)
    assert rank.base.whole_below == 0
    return rank


def datum_of(model_input: ModelInput, length: int, loss_fn: str, seed: int, k: int | None = None) -> Datum:
    """Targets, weights and all else are a datum's own at each token, in a common beginning too."""
    random = np.random.default_rng(seed)
    shape = (length,) if k is None else (length, k)
    targets = random.integers(0, VOCAB, shape)
    if k is None:
        targets[: length // 2] = np.arange(length // 2) % VOCAB  # and some equal
    signed = (random.normal(size=shape) * (random.random(shape) < 0.8)).astype(np.float32)
    inputs: dict[str, np.ndarray] = {"target_tokens": targets}
    if loss_fn == "cross_entropy":
        inputs["weights"] = signed
    else:
        inputs |= {"advantages": signed, "logprobs": (random.normal(size=shape) * 0.1 - 5.5).astype(np.float32)}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = (random.random(shape) < 0.5).astype(np.float32)
    return Datum(model_input=model_input, loss_fn_inputs=inputs)


def data_of(texts: Sequence[np.ndarray], loss_fn: str, seed: int, k: int | None = None) -> list[Datum]:
    return [datum_of(prompt(text(*one)), len(one), loss_fn, seed + number, k) for number, one in enumerate(texts)]


def computed(
    rank: TrainerRank, batches: list[tuple[str, EncodedBatch]], backward: bool = True
) -> tuple[list[ForwardBackwardOutput], dict[str, dict[str, torch.Tensor]]]:
    outputs = [succeeded(one) for one in together(rank, batches, backward)]
    found = {name: gradients(rank, name) for name, _ in batches} if backward else {}
    for model in rank.models.values():
        model.clear_gradient()
    return outputs, found


def same_as_whole(
    rank: TrainerRank,
    batches: list[tuple[str, EncodedBatch]],
    backward: bool = True,
    bound: float = 1e-5,
    noise: float = 1e-6,
) -> list[ForwardBackwardOutput]:
    """Compute both ways; return what sharing gives. Gradients may differ by `noise` of the largest too: one of a decay
    is a small sum of large numbers."""
    outputs, found = computed(rank, batches, backward)
    assert rank.base.whole_below is not None, "the check in service has found other numbers, and hides them"
    shares, rank.base.whole_below = rank.base.whole_below, None
    try:
        expected, wanted = computed(rank, batches, backward)
    finally:
        rank.base.whole_below = shares
    for output, other in zip(outputs, expected, strict=True):
        assert "shared_tokens:sum" not in other.metrics
        for own, of_other in zip(output.loss_fn_outputs, other.loss_fn_outputs, strict=True):
            assert own.keys() == of_other.keys()
            for name, values in own.items():
                np.testing.assert_allclose(values, of_other[name], rtol=bound, atol=bound)
        for name, value in other.metrics.items():
            atol = 3e-4 if name == "loss:sum" else 1e-4  # it adds up what rounding makes of every token
            assert output.metrics[name] == pytest.approx(value, rel=1e-4, abs=atol), name
    for name, tensors in wanted.items():
        assert_same_gradients(found[name], tensors, bound, noise)
    return outputs


@pytest.fixture(scope="module")
def rank(tiny_text: Path) -> TrainerRank:
    return rank_of(tiny_text)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1))
def test_random_tries_have_the_numbers_of_whole_datums(rank: TrainerRank, seed: int) -> None:
    texts = random_trie(seed)
    other = random_trie(seed + 1)[:3]
    batches = [("m", batch(data_of(texts, "cross_entropy", seed), "cross_entropy"))]
    batches.append(("other", batch(data_of(other, "importance_sampling", seed), "importance_sampling")))
    (of_texts, _) = same_as_whole(rank, batches)
    assert of_texts.metrics.get("shared_tokens:sum", 0) == saved(texts)


@pytest.fixture(scope="module")
def seeing(tiny_vl: Path) -> TrainerRank:
    """A rank that takes images."""
    return rank_of(tiny_vl)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.sampled_from([*LOSSES, "soft targets"]), st.booleans())
def test_random_tries_of_every_loss_have_the_numbers_of_whole_datums_with_images(
    seeing: TrainerRank, seed: int, loss: str, backward: bool
) -> None:
    renderer, k = seeing.base.renderer, 3 if loss == "soft targets" else None
    loss_fn = "cross_entropy" if k else loss
    batches = []
    for name, texts in (("m", random_trie(seed)[:16]), ("other", random_trie(seed + 1)[:3])):
        inputs = [prompt(*put_images(tokens, place % 3)) for place, tokens in enumerate(texts)]
        lengths = [renderer.layout(model_input, "datum").num_tokens for model_input in inputs]
        data = [
            datum_of(*given, loss_fn, seed + place, k) for place, given in enumerate(zip(inputs, lengths, strict=True))
        ]
        batches.append((name, batch(data, loss_fn)))
    same_as_whole(seeing, batches, backward)


def saved(texts: Sequence[np.ndarray], saved_per_segment: int = 0) -> int:
    """Where all fit into one microbatch."""
    return Prefixes(texts, saved_per_segment=saved_per_segment).trie(range(len(texts))).saved


CARRYING: dict[str, Callable[[Path], Path]] = {
    "linear attention": make_tiny_qwen3_5,
    "linear attention in groups": make_tiny_qwen3_next,
    "Mamba": make_tiny_nemotron_h,
}


@pytest.fixture(scope="module", params=CARRYING)
def carrying(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainerRank:
    """A rank whose layers carry states from token to token."""
    return rank_of(CARRYING[request.param](tmp_path_factory.mktemp("carrying") / "model"))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1))
def test_random_tries_carry_the_states_of_whole_datums(carrying: TrainerRank, seed: int) -> None:
    texts = random_trie(seed)
    other = random_trie(seed + 1)[:3]
    batches = [("m", batch(data_of(texts, "cross_entropy", seed), "cross_entropy"))]
    batches.append(("other", batch(data_of(other, "importance_sampling", seed), "importance_sampling")))
    (of_texts, _) = same_as_whole(carrying, batches, noise=1e-5)
    assert of_texts.metrics.get("shared_tokens:sum", 0) == saved(texts, SAVED_PER_STATE)


@pytest.mark.parametrize("kind", CARRYING)
def test_in_double_precision_carried_states_have_the_gradients_of_whole_datums(kind: str, tmp_path: Path) -> None:
    texts = datums_of((150, 30), (150, 31), (150, 1), (150, 120, 1), (150, 120, 90), (150, 120, 3), (150,), (60,))
    with in_float64():
        rank = rank_of(CARRYING[kind](tmp_path / "model"), "float64")
        batches = [("m", batch(data_of(texts, "ppo", 5), "ppo"))]
        (output,) = same_as_whole(rank, batches, bound=1e-9, noise=1e-10)
    assert output.metrics["shared_tokens:sum"] == 6 * 150 + 2 * 120


def grouped(num: int, prompt_tokens: int = 150, answer_tokens: int = 40) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    begin = random.integers(0, VOCAB, prompt_tokens)
    return [np.concatenate([begin, random.integers(0, VOCAB, answer_tokens + one)]) for one in range(num)]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    ("loss_fn", "k"),
    [*((name, None) for name in LOSSES), ("cross_entropy", 3)],
    ids=lambda value: str(value),
)
def test_every_loss_of_a_group_is_that_of_whole_datums(
    rank: TrainerRank, loss_fn: str, k: int | None, backward: bool
) -> None:
    texts = grouped(4)
    texts += [texts[0][:150], texts[1], texts[2][:170]]
    data = data_of(texts, loss_fn, 5, k)
    (output,) = same_as_whole(rank, [("m", batch(data, loss_fn))], backward)
    assert output.metrics["shared_tokens:sum"] == 3 * 150 + 150 + len(texts[1]) + 170


def test_datums_without_a_common_beginning_have_the_same_bits(rank: TrainerRank) -> None:
    texts = [np.random.default_rng(seed).integers(0, VOCAB, 30 * seed) for seed in range(1, 9)]
    batches = [(name, batch(data_of(texts, "ppo", 3), "ppo")) for name in MODELS]
    found = computed(rank, batches)
    shares, rank.base.whole_below = rank.base.whole_below, None
    wanted = computed(rank, batches)
    rank.base.whole_below = shares
    assert [one.metrics for one in found[0]] == [one.metrics for one in wanted[0]]
    for name, tensors in wanted[1].items():
        assert all(torch.equal(found[1][name][key], tensor) for key, tensor in tensors.items())


def test_a_step_is_repeated_to_the_bit(rank: TrainerRank) -> None:
    batches = [("m", batch(data_of(grouped(4), "ppo", 3), "ppo"))]
    first, second = computed(rank, batches), computed(rank, batches)
    assert first[0][0].metrics == second[0][0].metrics
    assert all(torch.equal(second[1]["m"][key], tensor) for key, tensor in first[1]["m"].items())


def with_images(lengths: Sequence[int], seed: int = 0) -> list[ModelInput]:
    """A prompt with two images; an answer behind it; in one an image again, and one of another image."""
    random = np.random.default_rng(seed)

    def more(count: int) -> EncodedTextChunk:
        return text(*random.integers(0, VOCAB, count))

    begin = (more(20), image(256, 320, 1), more(90), image(160, 160, 2))
    answers = [prompt(*begin, more(length)) for length in lengths]
    other = prompt(begin[0], image(256, 320, 3), *begin[2:], more(5))
    return [*answers, prompt(*begin, more(7), image(96, 96, 4), more(3)), prompt(*begin), other]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("kind", ["full attention", "linear attention"])
def test_images_in_common_beginnings_are_computed_once(
    kind: str, loss_fn: str, train_vision: bool, tiny_vl: Path, tmp_path: Path
) -> None:
    source = tiny_vl if kind == "full attention" else make_tiny_qwen3_5(tmp_path / "model")
    lora = {"m": MODELS["m"].model_copy(update={"train_vision": train_vision}), "other": MODELS["other"]}
    rank = trained(trainer(source, 4096, max_context_length=4096, trains_vision=train_vision), lora)
    renderer = make_renderer(source)
    data = [
        datum_of(one, renderer.layout(one, "datum").num_tokens, loss_fn, seed)
        for seed, one in enumerate(with_images([30, 1, 60]))
    ]
    batches = [("m", batch(data, loss_fn)), ("other", batch(data[:2], loss_fn))]
    outputs = same_as_whole(rank, batches, noise=1e-6 if kind == "full attention" else 1e-5)
    assert outputs[0].metrics["shared_tokens:sum"] > outputs[1].metrics["shared_tokens:sum"] > 100


@pytest.mark.parametrize(
    ("loss_fn", "kind"),
    [("cross_entropy", None), ("ppo", None), ("ppo", "linear attention")],
)
def test_shared_datums_have_the_numbers_of_transformers_and_peft(
    loss_fn: str, kind: str | None, tiny_vl: Path, tmp_path: Path
) -> None:
    source = tiny_vl if kind is None else CARRYING[kind](tmp_path / "model")
    rank = trained(trainer(source, 4096, max_context_length=4096), {"m": MODELS["m"]})
    renderer = make_renderer(source)
    inputs = [*with_images([30, 1, 60]), *(prompt(text(*one)) for one in grouped(3))]
    data = [datum_of(one, renderer.layout(one, "datum").num_tokens, loss_fn, seed) for seed, one in enumerate(inputs)]
    reference = Reference(source, renderer, MODELS["m"])
    reference.take({name: tensor.clone() for name, tensor in lora_model(rank, "m").masters().items()})
    output = present(forward_backward(rank, "m", batch(data, loss_fn)))
    assert output.metrics["shared_tokens:sum"] > 400
    own, losses = [reference.logprobs(item) for item in data], []
    for item, found, expected in zip(data, output.loss_fn_outputs, own, strict=True):
        np.testing.assert_allclose(found["logprobs"], expected.detach(), rtol=0, atol=1e-4)
        losses.append(loss_of(loss_fn, expected, item.loss_fn_inputs, {}))
    wanted = reference.gradient(torch.stack(losses).sum())
    if kind is None:
        assert_same(gradients(rank, "m"), wanted)
    else:  # a gradient of a decay is a small sum of large numbers
        assert_same_gradients(gradients(rank, "m"), wanted, rtol=1e-4)


KINDS: dict[str, Callable[[Path], Path]] = {
    "experts": make_tiny_moe,
    "latent attention": make_tiny_deepseek_v3,
    "a cap of scores": lambda directory: make_tiny_of("gemma2", directory, sliding_window=4096),
    "tiles": make_tiny_internvl,
    "linear attention and experts": lambda directory: make_tiny_qwen3_5(directory, moe=True),
    "a window that no layer has": lambda directory: make_tiny_qwen3_5(directory, sliding_window=8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models_share_too(kind: str, tmp_path: Path) -> None:
    rank = rank_of(KINDS[kind](tmp_path / "model"))
    (output,) = same_as_whole(rank, [("m", batch(data_of(grouped(4), "cross_entropy", 5), "cross_entropy"))])
    assert output.metrics["shared_tokens:sum"] == 450


WHOLE: dict[str, Callable[[Path], Path]] = {
    "sinks and windows": make_tiny_gpt_oss,
    "images seen as a whole": make_tiny_gemma3,
    "windows": lambda directory: make_tiny_of("mistral", directory, sliding_window=8),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_models_whose_tokens_see_more_or_less_than_all_before_compute_datums_whole(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rank = trained(trainer(WHOLE[kind](tmp_path / "model"), 4096, max_context_length=4096), {"m": MODELS["m"]})
    assert rank.base.whole_below is None and "datums that begin alike are computed whole: " in caplog.text
    data = data_of(grouped(4), "cross_entropy", 5)
    output = present(forward_backward(rank, "m", batch(data, "cross_entropy")))
    assert "shared_tokens:sum" not in output.metrics


def test_a_model_whose_shared_beginnings_change_numbers_computes_datums_whole(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tinker_server.backends.trainer.model.attention.prefixes_of", lambda *_: [])
    assert trainer(tiny_text).base.whole_below is None
    assert "sharing changes log probabilities here" in caplog.text


def test_microbatches_are_as_large_as_what_is_computed(tiny_text: Path) -> None:
    rank = trained(trainer(tiny_text, 400, max_context_length=4096), {"m": MODELS["m"]})
    sizes: list[int] = []
    data = data_of(grouped(8), "cross_entropy", 5)  # 150 + 8 * 43.5
    forward_backward(rank, "m", batch(data, "cross_entropy"))  # whose first microbatch is computed whole too
    rank.base.scorer.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0].targets_TK)))
    output = present(forward_backward(rank, "m", batch(data, "cross_entropy")))
    assert len(sizes) == 2 and max(sizes) <= 400 and sum(sizes) == 2 * 150 + 8 * 40 + 28
    assert output.metrics["shared_tokens:sum"] == 6 * 150
