"""Models that train all weights of a base, against plain transformers and torch.optim, in float32.

pytest tests/contract/test_full.py
"""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from api_schemas.inputs import Datum
from api_schemas.training import AdamParams, Trainable
from backends.inputs.rendering import Renderer
from backends.protocol import InvalidInput
from backends.trainer.distributed import World
from backends.trainer.full.model import FullModel
from backends.trainer.optimizer import MOMENTS
from backends.trainer.rank import TrainerRank
from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.full import ADAM, FULL, assert_scores, full_trainer, mixed_data, train
from tests.models import make_tiny_vl
from tests.ranks import on_two_ranks
from tests.trainers import config, forward_backward, logprobs, reference_logprobs

DECODER = ("model.language_model.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
Params = dict[str, torch.Tensor]


def text_data(renderer: Renderer, seed: int = 0) -> list[Datum]:
    return [datum(prompt(words(length, length)), renderer, seed + length) for length in (31, 12, 40, 7)]


def full_model(rank: TrainerRank) -> FullModel:
    model = rank.models["m"]
    assert isinstance(model, FullModel)
    return model


def masters(rank: TrainerRank) -> Params:
    return {name: one.detach().clone() for name, one in full_model(rank).masters.items()}


def trained_by_torch(model, renderer: Renderer, data: list[Datum], num_steps: int) -> None:
    """transformers and torch.optim.AdamW, with all but the vision tower."""
    trained = [one for name, one in model.named_parameters() if name.startswith(DECODER)]
    optimizer = torch.optim.AdamW(
        trained, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )
    for _ in range(num_steps):
        for item in data:
            values = reference_logprobs(renderer, item, model)[:, 0]
            (-(values * torch.from_numpy(item.loss_fn_inputs["weights"])).sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, ADAM.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def text_renderer(tiny_text: Path) -> Renderer:
    return make_renderer(tiny_text)


@pytest.fixture(scope="module")
def text_base(tiny_text: Path) -> TrainerRank:
    return full_trainer(tiny_text)


@pytest.fixture
def text_rank(text_base: TrainerRank) -> TrainerRank:
    """Without the model of a test that came before, or failed in the middle."""
    for name in list(text_base.models):
        text_base.delete_model(name)
    return text_base


def test_five_steps_are_those_of_transformers_and_adamw(text_rank, tiny_text, text_renderer):
    data = text_data(text_renderer)
    reference = AutoModelForCausalLM.from_pretrained(tiny_text)
    text_rank.create_model("m", FULL)
    before = logprobs(text_rank, data)
    assert_scores(reference, text_renderer, data, before)
    train(text_rank, data, 5)
    trained_by_torch(reference, text_renderer, data, 5)
    after = logprobs(text_rank, data)
    assert max(np.abs(new - old).max() for new, old in zip(after, before, strict=True)) > 0.5
    assert_scores(reference, text_renderer, data, after)
    own = dict(reference.named_parameters())
    for name, master in masters(text_rank).items():
        torch.testing.assert_close(master, own[name].detach(), atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_five_steps_with_images_are_those_of_transformers_and_adamw_and_the_vision_tower_stays(tiny_vl, renderer):
    data = mixed_data(renderer)
    reference = AutoModelForImageTextToText.from_pretrained(tiny_vl)
    rank = full_trainer(tiny_vl)
    rank.create_model("m", FULL)
    train(rank, data, 5)
    trained_by_torch(reference, renderer, data, 5)
    assert_scores(reference, renderer, data, logprobs(rank, data))
    assert masters(rank).keys() == {name for name, _ in reference.named_parameters() if name.startswith(DECODER)}


def test_a_saved_directory_is_a_whole_model_with_the_same_numbers(text_rank, tiny_text, text_renderer, tmp_path):
    data = text_data(text_renderer)
    text_rank.create_model("m", FULL)
    train(text_rank, data, 2)
    text_rank.save_sampler_weights("m", tmp_path / "saved", for_elsewhere=True)
    assert_scores(
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), text_renderer, data, logprobs(text_rank, data)
    )
    saved, own = (AutoTokenizer.from_pretrained(source) for source in (tmp_path / "saved", tiny_text))
    assert saved("one two").input_ids == own("one two").input_ids


@pytest.mark.slow
def test_a_saved_directory_of_a_model_that_sees_has_its_processor_and_tower(tmp_path):
    for tie in (False, True):
        source = make_tiny_vl(tmp_path / f"tied-{tie}", tie=tie)
        renderer = make_renderer(source)
        data, rank, saved = mixed_data(renderer), full_trainer(source), tmp_path / f"saved-{tie}"
        rank.create_model("m", FULL)
        train(rank, data, 2)
        rank.save_sampler_weights("m", saved, for_elsewhere=False)
        reference = AutoModelForImageTextToText.from_pretrained(saved)
        assert_scores(reference, make_renderer(saved), data, logprobs(rank, data))
        assert AutoProcessor.from_pretrained(saved).image_processor is not None
        original = AutoModelForImageTextToText.from_pretrained(source)
        for name, tensor in original.model.visual.state_dict().items():
            assert torch.equal(reference.model.visual.state_dict()[name], tensor), name


def test_a_saved_state_goes_on_exactly_and_without_its_optimizer_afresh(text_rank, text_renderer, tmp_path):
    data, more = text_data(text_renderer), text_data(text_renderer, 100)
    text_rank.create_model("m", FULL)
    train(text_rank, data, 2)
    text_rank.save_state("m", tmp_path / "state")
    at_save = masters(text_rank)
    train(text_rank, more, 2)
    wanted = masters(text_rank)
    text_rank.create_model("m", FULL)
    text_rank.load_state("m", tmp_path / "state", True)
    assert_equal(masters(text_rank), at_save)
    train(text_rank, more, 2)
    assert_equal(masters(text_rank), wanted)
    text_rank.load_state("m", tmp_path / "state", False)
    assert_equal(masters(text_rank), at_save)
    assert not text_rank.models["m"].optimizer.state


def test_a_snapshot_holds_the_gradient_too(text_rank, text_renderer, tmp_path):
    data, more = text_data(text_renderer), text_data(text_renderer, 100)
    text_rank.create_model("m", FULL)
    train(text_rank, data, 1)
    forward_backward(text_rank, "m", cross_entropy(data))
    text_rank.snapshot("m", tmp_path / "snapshot")
    text_rank.snapshot_written(tmp_path / "snapshot").result(60)
    train(text_rank, more, 1)
    wanted = masters(text_rank)
    text_rank.delete_model("m")
    text_rank.create_model("m", FULL, tmp_path / "snapshot")
    train(text_rank, more, 1)
    assert_equal(masters(text_rank), wanted)


def test_the_next_model_starts_from_the_original_weights(text_rank, text_renderer):
    data = text_data(text_renderer)
    text_rank.create_model("m", FULL)
    original, fresh = masters(text_rank), logprobs(text_rank, data)
    train(text_rank, data, 1)
    assert not all(torch.equal(one, original[name]) for name, one in masters(text_rank).items())
    text_rank.delete_model("m")
    text_rank.create_model("n", FULL.model_copy(update={"train_mlp": False}))
    np.testing.assert_equal(logprobs(text_rank, data, "n"), fresh)
    text_rank.delete_model("n")
    text_rank.create_model("m", FULL)
    assert_equal(masters(text_rank), original)


def test_flags_say_which_modules_train_and_embeddings_and_norms_between_them_always_do(text_rank, text_renderer):
    data = text_data(text_renderer)
    text_rank.create_model("m", FULL)
    everything = masters(text_rank).keys()
    for flag, part in (("train_attn", ".self_attn."), ("train_mlp", ".mlp."), ("train_unembed", "lm_head.")):
        text_rank.create_model("m", FULL.model_copy(update={flag: False}))
        assert masters(text_rank).keys() == {name for name in everything if part not in name}
        train(text_rank, data, 1)
        base = {name: one.detach() for name, one in text_rank.base.scorer.model.named_parameters() if part in name}
        assert base
        text_rank.create_model("m", FULL)
        assert_equal({name: one for name, one in masters(text_rank).items() if part in name}, base)


def test_a_step_that_is_not_finite_is_not_taken(text_rank, text_renderer):
    data = text_data(text_renderer)
    text_rank.create_model("m", FULL)
    train(text_rank, data, 1)
    before, moments = masters(text_rank), full_model(text_rank).state_tensors()
    kept = {f"{kind}:{name}": one.clone() for kind, of in moments.items() for name, one in of.items()}
    forward_backward(text_rank, "m", cross_entropy(data))
    with pytest.raises(InvalidInput, match=r"not finite \(learning_rate 1e\+39"):
        text_rank.optim_step("m", AdamParams(learning_rate=1e39))
    assert_equal(masters(text_rank), before)
    after = {f"{kind}:{name}": one for kind, of in moments.items() for name, one in of.items()}
    assert_equal(after, kept)
    with pytest.raises(InvalidInput, match="there is no gradient"):
        text_rank.optim_step("m", ADAM)


def test_what_is_of_the_other_kind_is_refused_by_name(text_rank, tiny_text, tmp_path):
    with pytest.raises(InvalidInput, match=r"backend\.full"):
        text_rank.create_model("m", Trainable(rank=8, seed=1))
    adapters = TrainerRank(config(tiny_text), World(0, 1, torch.device("cpu")))
    with pytest.raises(InvalidInput, match=r"backend\.full"):
        adapters.create_model("m", FULL)
    adapters.create_model("m", Trainable(rank=8, seed=1))
    adapters.save_state("m", tmp_path / "lora")
    text_rank.create_model("m", FULL)
    with pytest.raises(InvalidInput, match="a LoRA adapter's"):
        text_rank.load_state("m", tmp_path / "lora", True)
    text_rank.save_state("m", tmp_path / "full")
    text_rank.create_model("m", FULL.model_copy(update={"train_attn": False}))
    with pytest.raises(InvalidInput, match="other weights than this model"):
        text_rank.load_state("m", tmp_path / "full", True)


def assert_equal(got: Params, wanted: Params) -> None:
    """To the bit."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def one_rank_of_two(world: World, source: Path, directory: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trains, saves and restores; what it scores after that, and after a further step."""
    rank = full_trainer(source, world)
    data = mixed_data(make_renderer(source))
    rank.create_model("m", FULL)
    train(rank, data, 2)
    logprobs_or_none(rank, data)  # what was gathered for it must not be used after the next step
    train(rank, data, 1)
    forward_backward(rank, "m", cross_entropy(data))
    rank.snapshot("m", directory / "snapshot")
    rank.save_state("m", directory / "state")
    rank.save_sampler_weights("m", directory / "whole", for_elsewhere=True)
    if world.rank == 0:
        rank.snapshot_written(directory / "snapshot").result(60)
    torch.distributed.barrier()
    rank.delete_model("m")
    rank.create_model("m", FULL, directory / "snapshot")
    rank.optim_step("m", ADAM)
    stepped = logprobs_or_none(rank, data)
    rank.load_state("m", directory / "state", True)
    return logprobs_or_none(rank, data), stepped


def logprobs_or_none(rank: TrainerRank, data: list[Datum]) -> list[np.ndarray]:
    """Rank 0 alone answers."""
    output = forward_backward(rank, "m", cross_entropy(data), False)
    return [] if output is None else [one["logprobs"] for one in output.loss_fn_outputs]


def scores_of_uneven_batches(world: World, source: Path) -> list[np.ndarray]:
    """Scores after batches that leave a rank without a datum, and after one that does not."""
    rank = full_trainer(source, world)
    renderer, found = make_renderer(source), []
    rank.create_model("m", FULL)
    for lengths in ((40, 60), (31,), (60, 60, 60), (40, 60)):
        train(rank, [datum(prompt(words(length, length)), renderer, length) for length in lengths], 1)
        found += logprobs_or_none(rank, [datum(prompt(words(31, 31)), renderer, 31)])
    return found


def test_a_rank_without_a_datum_computes_with_the_newest_weights_and_gets_its_gradient(tiny_text):
    alone = scores_of_uneven_batches(World(0, 1, torch.device("cpu")), tiny_text)
    of_two, _ = on_two_ranks(scores_of_uneven_batches, tiny_text)
    assert len(alone) == len(of_two) == 4
    for one, two in zip(alone, of_two, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


@pytest.mark.parametrize("refused", ["batch", "step", "load"])
def test_a_deleted_models_memory_is_free_at_once_even_if_a_request_was_refused(
    text_rank, text_renderer, refused, tmp_path
):
    gc.collect()
    gc.disable()
    try:
        text_rank.create_model("m", FULL)
        train(text_rank, text_data(text_renderer), 1)
        model = full_model(text_rank)
        moments = [state[kind] for state in model.optimizer.state.values() for kind in MOMENTS]
        held = [weakref.ref(one) for one in (*model.parameters, *moments)]
        del model, moments
        with pytest.raises(InvalidInput):
            if refused == "batch":
                outside = datum(prompt(words(20, 1)), text_renderer)
                outside.loss_fn_inputs["target_tokens"][3] = 10**6
                forward_backward(text_rank, "m", cross_entropy([outside]))
            elif refused == "step":
                train(text_rank, text_data(text_renderer), 1, AdamParams(learning_rate=1e39))
            else:
                text_rank.load_state("m", tmp_path / "nothing", True)
        text_rank.delete_model("m")
        assert sum(one() is not None for one in held) == 0
    finally:
        gc.enable()


@pytest.mark.slow
def test_two_ranks_train_what_one_does(tiny_vl, renderer, tmp_path):
    data, reference = mixed_data(renderer), AutoModelForImageTextToText.from_pretrained(tiny_vl)
    (scored, stepped), _ = on_two_ranks(one_rank_of_two, tiny_vl, tmp_path)
    trained_by_torch(reference, renderer, data, 3)
    assert_scores(reference, renderer, data, scored)
    assert_scores(AutoModelForImageTextToText.from_pretrained(tmp_path / "whole"), renderer, data, scored)
    rank = full_trainer(tiny_vl)
    rank.create_model("m", FULL)
    rank.load_state("m", tmp_path / "state", with_optimizer=True)
    train(rank, data, 1)
    for got, wanted in zip(stepped, logprobs(rank, data), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
