"""The trainer against plain transformers, PEFT and torch.optim, in float32.

pytest tests/contract/test_trainer.py
"""

import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.factories import MIXED, batch, cross_entropy, datum, image, make_renderer, present, prompt, words
from tests.models import make_tiny_of, make_tiny_vl
from tests.reference import Reference, Steps
from tests.servers import variables_of
from tests.trainers import (
    LORA,
    SMOOTH,
    assert_same,
    config,
    forward_backward,
    gradients,
    logprobs,
    lora_model,
    perturb,
    reference_inputs,
    reference_logprobs,
    relative_distance,
    trainer,
)
from tinker_server.api_schemas.inputs import MAX_COLUMNS, Chunk, Datum, ImageChunk
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.families.qwen import mrope_positions
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed, InvalidInput
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.model import token_logprobs
from tinker_server.backends.trainer.rank import TrainerRank


@pytest.fixture(scope="module")
def rank(tiny_vl: Path) -> TrainerRank:
    return trainer(tiny_vl)


@pytest.fixture(scope="module")
def reference(tiny_vl: Path):
    return AutoModelForImageTextToText.from_pretrained(tiny_vl).eval()


@pytest.mark.parametrize("name", MIXED)
def test_logprobs_are_those_of_transformers(rank, reference, renderer, name):
    rank.create_model("m", LORA)
    item = datum(MIXED[name], renderer)
    output = forward_backward(rank, "m", cross_entropy([item]), False)
    with torch.no_grad():
        expected = reference_logprobs(renderer, item, reference)[:, 0]
    np.testing.assert_allclose(present(output).loss_fn_outputs[0]["logprobs"], expected, atol=1e-4)


def test_positions_are_those_of_transformers(renderer, reference):
    for model_input in MIXED.values():
        rendered = renderer.render(model_input, "datum")
        inputs = reference_inputs(renderer, model_input, reference)
        inputs.setdefault("mm_token_type_ids", torch.zeros_like(inputs["input_ids"]))
        expected, _ = reference.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs.get("image_grid_thw")
        )
        np.testing.assert_array_equal(mrope_positions(len(rendered.token_ids_T), rendered.spans), expected[:, 0])


def test_two_images_with_no_text_between_keep_positions_of_their_own(renderer):
    """transformers' get_rope_index takes them for one image; the sampler does not."""
    rendered = renderer.render(prompt(words(2), image(64, 64, 1), image(64, 64, 2), words(1)), "datum")
    positions = mrope_positions(len(rendered.token_ids_T), rendered.spans)
    assert positions[:, 2].tolist() == [2, 2, 2]
    assert positions[:, 6].tolist() == [4, 4, 4]
    assert positions[:, -1].tolist() == [6, 6, 6]


def test_packed_samples_are_as_one_by_one_and_as_transformers_pads_them(tiny_vl, reference, renderer):
    data = [datum(model_input, renderer, seed) for seed, model_input in enumerate(MIXED.values())]
    results = []
    for max_tokens in (1024, 1):
        rank = trainer(tiny_vl, max_tokens)
        rank.create_model("m", LORA)
        perturb(rank, "m")
        output = forward_backward(rank, "m", cross_entropy(data), True)
        results.append((output, gradients(rank, "m")))
    (packed, packed_gradients), (single, single_gradients) = results
    for one, other in zip(present(packed).loss_fn_outputs, present(single).loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-4)
    assert present(packed).metrics["loss:sum"] == pytest.approx(present(single).metrics["loss:sum"], rel=1e-5)
    assert_same(packed_gradients, single_gradients)

    fresh = trainer(tiny_vl)
    fresh.create_model("m", LORA)
    unpadded = forward_backward(fresh, "m", cross_entropy(data), False)
    for index, wanted in enumerate(padded_logprobs(data, renderer, reference)):
        np.testing.assert_allclose(present(unpadded).loss_fn_outputs[index]["logprobs"], wanted, atol=1e-4)


def padded_logprobs(data: list[Datum], renderer: Renderer, model) -> list[np.ndarray]:
    """All samples in one right-padded batch, by transformers alone."""
    inputs = [reference_inputs(renderer, item.model_input, model) for item in data]
    lengths = [one["input_ids"].shape[1] for one in inputs]
    ids = torch.zeros(len(data), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(inputs):
        ids[row, : lengths[row]] = one["input_ids"][0]
        mask[row, : lengths[row]] = 1
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            mm_token_type_ids=((ids == model.config.image_token_id) & mask.bool()).int(),
            pixel_values=torch.cat([one["pixel_values"] for one in inputs if "pixel_values" in one]),
            image_grid_thw=torch.cat([one["image_grid_thw"] for one in inputs if "pixel_values" in one]),
            use_cache=False,
        ).logits.log_softmax(-1)
    return [
        logits[row, np.arange(length), item.loss_fn_inputs["target_tokens"]].numpy()
        for row, (item, length) in enumerate(zip(data, lengths, strict=True))
    ]


def test_many_text_chunks_are_as_one(rank, renderer):
    whole, picture = words(12, 3), image(80, 60, 2)
    pieces: list[Chunk] = [words(0), *(type(whole)(tokens=whole.tokens[i : i + 5]) for i in (0, 5, 10)), picture]
    results = []
    for chunks in ([whole, picture], pieces):
        rank.create_model("m", LORA)
        perturb(rank, "m")
        item = datum(prompt(*chunks), renderer)
        output = forward_backward(rank, "m", cross_entropy([item]), True)
        results.append((present(output).loss_fn_outputs[0]["logprobs"], gradients(rank, "m")))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1], rtol=0)


def test_soft_targets_and_ragged_k_keep_their_shapes(rank, reference, renderer):
    rank.create_model("m", LORA)
    data = [
        datum(MIXED["text"], renderer, 1, k=3),
        datum(MIXED["one image"], renderer, 2),
        datum(MIXED["text"], renderer, 3, k=5),
    ]
    output = forward_backward(rank, "m", cross_entropy(data), True)
    loss = 0.0
    for item, got in zip(data, present(output).loss_fn_outputs, strict=True):
        with torch.no_grad():
            expected = reference_logprobs(renderer, item, reference).numpy()
        assert got["logprobs"].shape == item.loss_fn_inputs["target_tokens"].shape
        np.testing.assert_allclose(got["logprobs"], expected.reshape(got["logprobs"].shape), atol=1e-4)
        loss -= (item.loss_fn_inputs["weights"] * got["logprobs"]).sum()
    assert present(output).metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)


def test_a_datum_with_too_many_targets_for_a_token_is_refused(rank, renderer):
    """All tokens of its microbatch would be padded to them: a megabyte became gigabytes."""
    rank.create_model("m", LORA)
    wide = [datum(MIXED["text"], renderer, 1, k=k) for k in (MAX_COLUMNS, MAX_COLUMNS + 1)]
    forward_backward(rank, "m", cross_entropy(wide[:1]), False)
    with pytest.raises(InvalidInput, match=r"datum 1: target_tokens has K = 1025; at most 1024 are supported"):
        forward_backward(rank, "m", cross_entropy(wide), False)


def test_buffers_of_the_largest_rank_alone_stay_on_the_cpu(tiny_text):
    """So many are planned."""
    rank = trainer(tiny_text)
    data = cross_entropy([datum(MIXED["text"], rank.base.renderer, 1)])
    for rank_of_model, largest in ((4, 4), (7, 7), (2, 7)):
        rank.create_model("m", LORA.model_copy(update={"rank": rank_of_model}))
        forward_backward(rank, "m", data)
        rank.delete_model("m")
        assert {buffers.width for buffers in rank.base.weights._buffers.values()} == {largest}


def test_logits_in_chunks_change_nothing(tiny_vl, renderer, monkeypatch):
    data = [datum(model_input, renderer, seed) for seed, model_input in enumerate(MIXED.values())]
    results = []
    for limit in (token_logprobs.MAX_LOGITS, 384 * 7):
        monkeypatch.setattr(token_logprobs, "MAX_LOGITS", limit)
        rank = trainer(tiny_vl)
        rank.create_model("m", LORA)
        perturb(rank, "m")
        output = forward_backward(rank, "m", cross_entropy(data), True)
        results.append((output, gradients(rank, "m")))
    for one, other in zip(present(results[0][0]).loss_fn_outputs, present(results[1][0]).loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-5)
    assert_same(results[1][1], results[0][1])


ALL_FIELDS = AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)


@pytest.mark.parametrize(
    ("adam", "tie"),
    [(AdamParams(learning_rate=3e-3), False), (ALL_FIELDS, False), (AdamParams(learning_rate=3e-3), True)],
    ids=["plain", "every field", "tied head"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_five_steps_are_those_of_peft_and_torch_optim(tmp_path, renderer, adam, tie):
    source = make_tiny_vl(tmp_path / "model", tie=tie)
    rank = trainer(source)
    rank.create_model("m", LORA)
    # The reference is in float64. In float32 PEFT's own rounding, blown up by Adam, is about as large as the tolerance,
    # by how much depends on the processor's kernels: it is measured, and no nearer is asked for.
    exact, rounded = references = [Reference(source, renderer, LORA, kind) for kind in (torch.float64, torch.float32)]
    for reference in references:
        reference.take(lora_model(rank, "m").tensors)
    trained = [Steps(reference, adam) for reference in references]
    for step in range(5):
        data = [datum(model_input, renderer, 10 * step + i) for i, model_input in enumerate(MIXED.values())]
        forward_backward(rank, "m", cross_entropy(data), True)
        metrics = rank.optim_step("m", adam).metrics
        for steps in trained:
            steps.forward_backward("cross_entropy", data)
        norm, _ = (steps.optim_step() for steps in trained)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    theirs, own = lora_model(rank, "m").tensors, exact.adapter
    assert own.keys() == theirs.keys()
    # Adam divides by the gradient's own size, so that rounding (packed here, one by one there) in a
    # coordinate of hardly any gradient is blown up: tensors are compared as a whole.
    rounding = relative_distance(rounded.adapter.values(), own.values())
    assert relative_distance(theirs.values(), own.values()) <= max(1e-5, 3 * rounding)
    for name, tensor in own.items():
        of_tensor = relative_distance([rounded.adapter[name]], [tensor])
        assert relative_distance([theirs[name]], [tensor]) <= max(5e-5, 3 * of_tensor), name


def test_two_interleaved_models_of_different_ranks_are_each_as_alone(tiny_vl, renderer):
    data = {
        name: [datum(model_input, renderer, seed) for model_input in MIXED.values()]
        for seed, name in enumerate(("small", "large"))
    }
    loras = {
        "small": Trainable(rank=4, seed=1, train_unembed=False),
        "large": Trainable(rank=16, seed=2, train_attn=False),
    }

    def run(names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
        rank = trainer(tiny_vl)
        for name in names:
            rank.create_model(name, loras[name])
        for _ in range(3):
            for name in names:
                forward_backward(rank, name, cross_entropy(data[name]), True)
            for name in names:
                rank.optim_step(name, SMOOTH)
        return {name: dict(lora_model(rank, name).tensors) for name in names}

    together = run(["small", "large"])
    for name in ("small", "large"):
        assert_same(together[name], run([name])[name], rtol=1e-6)


def test_a_dropped_model_leaves_the_others_as_they_are(rank, renderer):
    rank.create_model("kept", LORA)
    perturb(rank, "kept")
    item = datum(MIXED["one image"], renderer)
    before = forward_backward(rank, "kept", cross_entropy([item]), False)
    rank.create_model("dropped", Trainable(rank=4, seed=9))
    forward_backward(rank, "dropped", cross_entropy([item]), True)
    rank.delete_model("dropped")
    after = forward_backward(rank, "kept", cross_entropy([item]), False)
    np.testing.assert_array_equal(
        present(before).loss_fn_outputs[0]["logprobs"], present(after).loss_fn_outputs[0]["logprobs"]
    )


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(rank):
    drawn = []
    for seed in (5, 5, 6):
        rank.create_model("m", Trainable(rank=4, seed=seed))
        drawn.append({name: tensor.detach().clone() for name, tensor in lora_model(rank, "m").tensors.items()})
    assert_same(drawn[0], drawn[1], rtol=0)
    assert any((drawn[0][name] != drawn[2][name]).any() for name in drawn[0])


def test_the_flags_choose_the_modules(rank):
    for flag, modules in (
        ("train_attn", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("train_mlp", {"gate_proj", "up_proj", "down_proj"}),
        ("train_unembed", {"lm_head"}),
    ):
        flags = {"train_attn": False, "train_mlp": False, "train_unembed": False, flag: True}
        rank.create_model("m", Trainable(rank=2, seed=1).model_copy(update=flags))
        names = lora_model(rank, "m").tensors
        assert {name.split(".")[-3] for name in names} == modules
        assert not any("visual" in name for name in names)


@pytest.mark.parametrize("rank_of_lora", [0, -3, 65])
def test_a_rank_out_of_range_is_refused(rank, rank_of_lora):
    with pytest.raises(InvalidInput, match="1 to 64"):
        rank.create_model("bad", Trainable(rank=rank_of_lora, seed=1))


def test_forward_only_leaves_the_gradient_alone(rank, renderer):
    rank.create_model("m", LORA)
    item = datum(MIXED["text"], renderer)
    forward_backward(rank, "m", cross_entropy([item]), True)
    before = gradients(rank, "m")
    forward_backward(rank, "m", cross_entropy([item]), False)
    assert_same(gradients(rank, "m"), before, rtol=0)


def test_a_step_without_a_gradient_is_refused(rank, renderer):
    rank.create_model("m", LORA)
    with pytest.raises(InvalidInput, match="no gradient"):
        rank.optim_step("m", SMOOTH)
    forward_backward(rank, "m", cross_entropy([datum(MIXED["text"], renderer)]), False)
    with pytest.raises(InvalidInput, match="no gradient"):
        rank.optim_step("m", SMOOTH)


def test_a_failed_forward_backward_fails_the_next_step_and_the_run_goes_on(rank, renderer):
    rank.create_model("m", LORA)
    good = datum(MIXED["text"], renderer)
    truncated = image(64, 64, 3)
    broken = datum(prompt(words(3), truncated), renderer)
    cut = type(truncated)(data=truncated.data[: len(truncated.data) // 2], format="png")
    broken = Datum(model_input=prompt(words(3), cut), loss_fn_inputs=broken.loss_fn_inputs)
    forward_backward(rank, "m", cross_entropy([good]), True)
    with pytest.raises(InvalidInput, match="datum 1, chunk 1: the image does not decode"):
        forward_backward(rank, "m", cross_entropy([good, broken]), True)
    with pytest.raises(InvalidInput, match="incomplete"):
        rank.optim_step("m", SMOOTH)
    forward_backward(rank, "m", cross_entropy([good]), True)
    assert rank.optim_step("m", SMOOTH).metrics["grad_norm"] > 0


def test_saved_state_goes_on_as_if_never_interrupted(tiny_vl, renderer, tmp_path):
    data = cross_entropy([datum(model_input, renderer) for model_input in MIXED.values()])
    # Three fresh trainers: image features that other tests left were computed beside other images, and round apart.
    rank = trainer(tiny_vl)
    rank.create_model("m", LORA)
    for _ in range(2):
        forward_backward(rank, "m", data, True)
        rank.optim_step("m", AdamParams(learning_rate=1e-2))
    rank.save_state("m", tmp_path / "state")

    other = trainer(tiny_vl)
    other.create_model("n", Trainable(rank=8, seed=99))
    other.load_state("n", tmp_path / "state", True)
    fresh = trainer(tiny_vl)
    fresh.create_model("n", Trainable(rank=8, seed=99))
    fresh.load_state("n", tmp_path / "state", False)
    for one, name in ((rank, "m"), (other, "n"), (fresh, "n")):
        forward_backward(one, name, data, True)
        one.optim_step(name, AdamParams(learning_rate=1e-2))
    tensors = [dict(lora_model(one, name).tensors) for one, name in ((rank, "m"), (other, "n"), (fresh, "n"))]
    assert_same(tensors[1], tensors[0], rtol=0)
    assert any((tensors[2][name] != tensors[0][name]).any() for name in tensors[0])


def test_a_checkpoint_of_another_rank_is_refused(rank, tmp_path):
    rank.create_model("m", LORA)
    rank.save_state("m", tmp_path / "state")
    rank.create_model("n", Trainable(rank=4, seed=1))
    with pytest.raises(InvalidInput, match="the LoRA ranks differ"):
        rank.load_state("n", tmp_path / "state", False)


def test_sampler_weights_hold_no_optimizer_and_say_so(rank, tmp_path):
    rank.create_model("m", LORA)
    rank.save_sampler_weights("m", tmp_path / "weights", for_elsewhere=True)
    with pytest.raises(InvalidInput, match="not saved for training"):
        rank.load_state("m", tmp_path / "weights", True)


def test_text_models_train_as_transformers_scores_them(tiny_text):
    rank, renderer = trainer(tiny_text), make_renderer(tiny_text)
    rank.create_model("m", LORA)
    data = [datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 23)]
    output = forward_backward(rank, "m", cross_entropy(data), True)
    model = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    for item, got in zip(data, present(output).loss_fn_outputs, strict=True):
        with torch.no_grad():
            expected = reference_logprobs(renderer, item, model)[:, 0]
        np.testing.assert_allclose(got["logprobs"], expected, atol=1e-4)
    rank.optim_step("m", SMOOTH)


def test_a_sliding_window_stays_the_models_own_in_packed_microbatches(tmp_path):
    kinds: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    source = make_tiny_of("gemma3_text", tmp_path / "windowed", query_pre_attn_scalar=32, **kinds)
    unwindowed = shutil.copytree(source, tmp_path / "unwindowed")
    path = unwindowed / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": ["full_attention"] * 2}))
    rank, renderer = trainer(source), make_renderer(source)
    assert rank.base.packs
    rank.create_model("m", LORA)
    data = [datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 23)]
    output = forward_backward(rank, "m", cross_entropy(data), False)
    model, everywhere = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (source, unwindowed))
    with torch.no_grad():
        for item, got in zip(data, present(output).loss_fn_outputs, strict=True):
            np.testing.assert_allclose(got["logprobs"], reference_logprobs(renderer, item, model)[:, 0], atol=1e-4)
        assert np.abs(got["logprobs"] - reference_logprobs(renderer, item, everywhere)[:, 0].numpy()).max() > 0.01


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tiny_text, monkeypatch):
    from transformers import Qwen3ForCausalLM

    plain = Qwen3ForCausalLM.forward

    def softcapped(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", softcapped)
    with pytest.raises(BackendFailed, match="not supported"):
        trainer(tiny_text)


def test_a_model_whose_attention_caps_its_scores_is_scored_with_the_cap(tmp_path):
    """transformers' SDPA passes over the cap in silence, and so would its own scoring, which start compares."""
    sizes: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "sliding_window": 8}
    source = make_tiny_of("gemma2", tmp_path / "model", **sizes)
    rank, renderer = trainer(source), make_renderer(source)
    rank.create_model("m", LORA)
    data = [datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 23)]
    capped, without = (
        AutoModelForCausalLM.from_pretrained(source, attn_implementation=one).eval() for one in ("eager", "sdpa")
    )
    for item, got in zip(data, logprobs(rank, data), strict=True):
        with torch.no_grad():
            expected, other = (reference_logprobs(renderer, item, model)[:, 0] for model in (capped, without))
        np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.abs(got - other.numpy()).max() > 0.01


@pytest.mark.usefixtures("forked_ranks")
async def test_two_ranks_are_as_one(tiny_vl, renderer, tmp_path):
    """Also where one rank has no image, or nothing at all to do."""
    batches = [
        [datum(model_input, renderer, seed) for seed, model_input in enumerate(MIXED.values())],
        [datum(MIXED["text"], renderer, 1), datum(MIXED["one image"], renderer, 2)],
        [datum(MIXED["three images of different sizes"], renderer, 3)],
    ]
    weights = []
    for num_ranks in (1, 2):
        ranked = TrainerClient(config(tiny_vl, max_tokens=60, num_ranks=num_ranks))
        await ranked.start()
        try:
            model = await ranked.create_model("m", LORA, "owner")
            outputs = []
            for batch in batches:
                outputs.append(await ranked.forward_backward(model, cross_entropy(batch), backward=True))
                await ranked.optim_step(model, SMOOTH)
            await ranked.save(model, tmp_path / str(num_ranks), "state")
        finally:
            await ranked.stop()
        weights.append((outputs, load_file(tmp_path / str(num_ranks) / "adapter_model.safetensors")))
    (one, one_weights), (two, two_weights) = weights
    for single, double in zip(one, two, strict=True):
        assert double.metrics["loss:sum"] == pytest.approx(single.metrics["loss:sum"], rel=1e-5)
        for a, b in zip(single.loss_fn_outputs, double.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(b["logprobs"], a["logprobs"], atol=1e-4)
    assert_same(two_weights, one_weights, rtol=1e-5)


@pytest.mark.usefixtures("forked_ranks")
async def test_an_image_that_breaks_on_one_rank_fails_the_work_and_not_the_group(tiny_vl, renderer):
    whole = image(64, 64, 3)
    cut = type(whole)(data=whole.data[: len(whole.data) // 2], format="png")
    broken = Datum(
        model_input=prompt(words(3), cut), loss_fn_inputs=datum(prompt(words(3), whole), renderer).loss_fn_inputs
    )
    good = datum(MIXED["text"], renderer)
    ranked = TrainerClient(config(tiny_vl, num_ranks=2))
    await ranked.start()
    try:
        model = await ranked.create_model("m", LORA, "owner")
        with pytest.raises(InvalidInput, match="datum 1, chunk 1"):
            await ranked.forward_backward(model, cross_entropy([good, broken]), backward=True)
        with pytest.raises(InvalidInput, match="incomplete"):
            await ranked.optim_step(model, SMOOTH)
        await ranked.forward_backward(model, cross_entropy([good]), backward=True)
        await ranked.optim_step(model, SMOOTH)
    finally:
        await ranked.stop()


@pytest.mark.usefixtures("forked_ranks")
async def test_bad_datums_are_refused_by_name_and_number(tiny_vl, renderer):
    ranked = TrainerClient(config(tiny_vl, max_context_length=64))
    good = datum(MIXED["text"], renderer)
    inputs = good.loss_fn_inputs

    def changed(**changes: Any) -> Datum:
        return Datum(
            model_input=good.model_input,
            loss_fn_inputs={k: v for k, v in {**inputs, **changes}.items() if v is not None},
        )

    cases = [
        (changed(target_tokens=None), "datum 1: cross_entropy needs loss_fn_inputs 'target_tokens'"),
        (changed(target_tokens=inputs["target_tokens"][:-1]), r"datum 1: target_tokens has shape \(16,\)"),
        (changed(weights=inputs["weights"][:-1]), "datum 1: weights has shape"),
        (changed(weights=inputs["weights"] * np.float32("nan")), "datum 1: NonFiniteInTensor: weights"),
        (changed(target_tokens=inputs["target_tokens"] + 9999), "datum 1: target token .* vocabulary"),
        (changed(advantages=inputs["weights"]), "datum 1: cross_entropy takes no loss_fn_inputs 'advantages'"),
        (datum(prompt(words(65)), renderer), "datum 1: 65 tokens, but the context window holds 64"),
    ]
    await ranked.start()
    try:
        model = await ranked.create_model("m", LORA, "owner")
        for bad, message in cases:
            with pytest.raises(InvalidInput, match=message):
                await ranked.forward_backward(model, cross_entropy([good, bad]), backward=False)
        with pytest.raises(InvalidInput, match="loss_fn 'stable_reinforce' is not supported; supported: cross_entropy"):
            await ranked.forward_backward(model, batch([good], "stable_reinforce"), backward=False)
        await ranked.forward_backward(model, cross_entropy([good]), backward=True)
        await ranked.optim_step(model, SMOOTH)
    finally:
        await ranked.stop()


async def test_threads_of_a_rank_on_the_cpu_sleep_while_they_wait(tiny_text):
    ranked = TrainerClient(config(tiny_text, max_context_length=64))
    await ranked.start()
    try:
        environment = variables_of(psutil.Process(ranked._supervisor.children[0].process.pid))
    finally:
        await ranked.stop()
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_pixels_of_a_request_are_never_in_memory_all_at_once(tiny_vl, renderer):
    """30 flat pictures of 960 x 960, 22 MB of pixels each, are a few kB as files."""
    rank = trainer(tiny_vl)
    rank.create_model("m", LORA)
    pictures = [Image.new("RGB", (960, 960), (8 * number, 0, 0)) for number in range(30)]
    data = cross_entropy([datum(prompt(words(3), as_chunk(picture)), renderer) for picture in pictures])
    forward_backward(rank, "m", cross_entropy([datum(prompt(words(3), image(960, 960)), renderer)]), True)
    process, seen, done = psutil.Process(), [], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(process.memory_info().rss)

    watching = threading.Thread(target=watch)
    before = process.memory_info().rss
    watching.start()
    forward_backward(rank, "m", data, True)
    done.set()
    watching.join()
    assert len(seen) > 30
    assert (max(seen) - before) / 2**20 < 250


def test_the_next_microbatchs_images_are_decoded_while_one_is_computed(tiny_vl, renderer, monkeypatch):
    rank = trainer(tiny_vl, max_tokens=20)
    rank.create_model("m", LORA)
    waiting, score = [], rank.base.score

    def noted(*arguments):
        waiting.append(len(rank.base.renderer.prefetcher._results))
        return score(*arguments)

    monkeypatch.setattr(rank.base, "score", noted)
    pictures = [prompt(words(3), image(96, 96, seed), words(5)) for seed in range(3)]
    forward_backward(rank, "m", cross_entropy([datum(one, renderer) for one in pictures]), True)
    assert waiting == [1, 1, 0]
    broken = image(96, 96, 7)
    cut = prompt(type(broken)(data=broken.data[: len(broken.data) // 2], format="png"), words(12))
    with pytest.raises(InvalidInput, match="datum 1"):
        forward_backward(rank, "m", cross_entropy([datum(one, renderer) for one in (pictures[0], cut)]), True)
    assert not rank.base.renderer.prefetcher._results


def as_chunk(picture: Image.Image) -> ImageChunk:
    file = io.BytesIO()
    picture.save(file, "png")
    return ImageChunk(data=file.getvalue(), format="png")
