"""A step, a save or a load that would leave weights that are not finite is refused, and changes nothing.

pytest tests/contract/test_finite_weights.py
"""

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.trainers import LORA, forward_backward, lora_model, trainer
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import ADAPTER_FILE, BackendFailed, InvalidInput
from tinker_server.backends.trainer import optimizer
from tinker_server.backends.trainer.optimizer import MOMENTS, prepare_step
from tinker_server.backends.trainer.rank import TrainerRank

ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def renderer(tiny_text: Path) -> Renderer:
    return make_renderer(tiny_text)


@pytest.fixture(scope="module")
def rank(tiny_text: Path) -> TrainerRank:
    return trainer(tiny_text)


def train(rank: TrainerRank, renderer: Renderer, seed: int, adam: AdamParams = ADAM) -> None:
    forward_backward(rank, "m", cross_entropy([datum(prompt(words(9, seed)), renderer, seed)]), True)
    rank.optim_step("m", adam)


def state(rank: TrainerRank) -> dict[str, Tensor]:
    model = rank.models["m"]
    return {name: one.clone() for name, one in {**model.tensors, **model.optimizer_state()}.items()}


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("eps", [0.0, 1e-46, 1e-31])
def test_an_eps_that_is_zero_in_float32_is_refused_by_name(eps: float) -> None:
    with pytest.raises(ValidationError, match=r"eps\n.*must be 1e-30 or more"):
        AdamParams(eps=eps)


def test_the_smallest_eps_moves_a_fresh_adapter_to_finite_weights(rank: TrainerRank, renderer: Renderer) -> None:
    """The first gradient of A is 0, as B is."""
    rank.create_model("m", LORA)
    train(rank, renderer, 1, AdamParams(learning_rate=1e-3, eps=1e-30))
    assert all(tensor.isfinite().all() for tensor in state(rank).values())


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_to_weights_that_are_not_finite_changes_no_bit(
    rank: TrainerRank, renderer: Renderer, steps_before: int
) -> None:
    rank.create_model("m", LORA)
    for seed in range(steps_before):
        train(rank, renderer, seed)
    before = state(rank)
    for learning_rate, weight_decay in ((1e39, 0.0), (3e37, 1e6)):
        adam = AdamParams(learning_rate=learning_rate, weight_decay=weight_decay)
        with pytest.raises(InvalidInput, match=r"not finite \(learning_rate .*weights are unchanged"):
            train(rank, renderer, 5, adam)
        assert_equal(state(rank), before)
    with pytest.raises(InvalidInput, match="no gradient"):
        rank.optim_step("m", ADAM)
    train(rank, renderer, 6)
    went_on = state(rank)
    rank.create_model("m", LORA)
    for seed in (*range(steps_before), 6):
        train(rank, renderer, seed)
    assert_equal(went_on, state(rank))


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_without_memory_for_its_trial_changes_no_bit(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, steps_before: int
) -> None:
    rank.create_model("m", LORA)
    for seed in range(steps_before):
        train(rank, renderer, seed)
    before, whole = state(rank), torch.optim.AdamW.step

    def broken(optimizer: torch.optim.AdamW) -> None:
        whole(optimizer)
        raise torch.OutOfMemoryError("tried to allocate 8 GiB")

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    with pytest.raises(BackendFailed, match="out of GPU memory"):
        train(rank, renderer, 2)
    assert_equal(state(rank), before)
    with pytest.raises(InvalidInput, match="no gradient"):
        rank.optim_step("m", ADAM)


def test_a_step_that_breaks_off_ends_the_process_as_there_is_nothing_to_undo_it_from(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.create_model("m", LORA)
    monkeypatch.setattr(rank.models["m"].optimizer, "step", lambda: 1 / 0)
    with pytest.raises(SystemExit, match=r"a step that had been found possible failed: .*division by zero"):
        train(rank, renderer, 1)


@pytest.mark.parametrize("at_once", [1, 7, 64, 1000])
def test_a_trial_in_pieces_of_any_size_gives_the_bits_of_the_step(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Pieces that end within a tensor and go over several: their sums are those of all that the step leaves."""
    rank.create_model("m", LORA.model_copy(update={"rank": 1, "train_mlp": False, "train_unembed": False}))
    monkeypatch.setattr("tinker_server.backends.trainer.optimizer.TRIED_AT_ONCE", at_once)
    model = lora_model(rank, "m")
    for seed in range(2):
        forward_backward(rank, "m", cross_entropy([datum(prompt(words(9, seed)), renderer, seed)]), True)
        sums = prepare_step(model.optimizer, ADAM, model.sum_gradient(), sums_bits=True)
        model.optimizer.step()
        model.clear_gradient()
        kept = [*model.parameters, *(model.optimizer.state[one][kind] for one in model.parameters for kind in MOMENTS)]
        bits = [one.detach().view(torch.int32).sum(dtype=torch.int64) for one in kept]
        assert sum(sums) == sum(bits)
        assert len(sums) >= len(MOMENTS) * sum(one.numel() for one in model.parameters) / at_once


def test_a_trial_has_the_copies_of_one_piece_at_a_time(
    rank: TrainerRank, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many are planned."""
    rank.create_model("m", LORA)
    forward_backward(rank, "m", cross_entropy([datum(prompt(words(9)), renderer)]), True)
    monkeypatch.setattr(optimizer, "TRIED_AT_ONCE", 2000)
    stepped, alive = optimizer._try_step, list[weakref.ref[Tensor]]()

    def counted(*of: Any) -> list[Tensor] | None:
        assert not [one for one in alive if one() is not None]
        found = stepped(*of)
        assert found is not None and sum(one.nbytes for one in found) <= 2000 * 12
        alive[:] = map(weakref.ref, found)
        return found

    monkeypatch.setattr(optimizer, "_try_step", counted)
    rank.optim_step("m", ADAM)
    assert alive


def test_a_model_whose_log_probabilities_are_not_finite_says_so(rank: TrainerRank, renderer: Renderer) -> None:
    rank.create_model("m", LORA)
    for parameter in rank.models["m"].parameters:
        parameter.data.fill_(1e30)
    with pytest.raises(InvalidInput, match=r"datum 0: .* not finite: its weights have diverged"):
        forward_backward(rank, "m", cross_entropy([datum(prompt(words(9)), renderer)]), False)


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(
    rank: TrainerRank, renderer: Renderer, tmp_path: Path
) -> None:
    rank.create_model("m", LORA)
    train(rank, renderer, 1)
    rank.save_state("m", tmp_path / "good")
    file = tmp_path / "good" / ADAPTER_FILE
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    before = state(rank)
    with pytest.raises(InvalidInput, match="the checkpoint holds NaN or infinity"):
        rank.load_state("m", tmp_path / "good", True)
    assert_equal(state(rank), before)

    next(iter(lora_model(rank, "m").tensors.values())).view(-1)[0] = float("inf")
    for save in (rank.save_state, partial(rank.save_sampler_weights, for_elsewhere=True)):
        with pytest.raises(InvalidInput, match="hold NaN or infinity and cannot be saved"):
            save("m", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
