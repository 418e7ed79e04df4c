"""Models on a card that has room for one of them in training: the others are offloaded to the main memory, and come
back. Moving tensors for real is tested in `tests/gpu/test_memory.py`."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.factories import cross_entropy, datum, make_renderer, prompt, succeeded, words
from tests.models import make_tiny_moe
from tests.ranks import on_two_ranks
from tests.trainers import LORA, assert_same, config, forward_backward, lora_model, perturb, together
from tests.trainers import trainer as make_trainer
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.protocol import BackendFailed, EncodedBatch, InvalidInput
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.lora.model import LoraModel
from tinker_server.backends.trainer.model.recompute import ActivationCosts, Memory, Recomputation
from tinker_server.backends.trainer.rank import TrainerRank

PER_TOKEN = 1000
LONGEST = 100


class Card(Memory):
    """A card with room for the base, one model in training, and a microbatch of LONGEST tokens. What models take is
    counted by what they say of themselves."""

    def __init__(self, rank: TrainerRank) -> None:
        self.graphs_bytes = self.models_bytes = 0
        self.recomputes = False
        self._rank = rank
        self._recomputation = Recomputation([])
        self._costs = ActivationCosts(constant=0, per_token=PER_TOKEN, saved_per_token=0, num_layers=0)
        self._limit_bytes = lora_model(rank, "a").training_bytes + LONGEST * PER_TOKEN

    @property
    def on_card(self) -> set[str]:
        return {name for name, one in self._rank.models.items() if one not in self._rank._offloaded}

    @property
    def _free_bytes(self) -> float:
        models = [self._rank.models[name] for name in self.on_card]
        taken = sum(one.training_bytes - one.missing_bytes for one in models)
        return self._limit_bytes - self.graphs_bytes - self.models_bytes - taken


def two_models(source: Path, world: World | None = None) -> TrainerRank:
    shape = config(source, max_tokens=256, max_context_length=200, num_ranks=1 if world is None else world.size)
    rank = TrainerRank(shape, world or World(0, 1, torch.device("cpu")))
    for name, size in (("a", 8), ("b", 6)):
        rank.create_model(name, LORA.model_copy(update={"rank": size}))
        perturb(rank, name)
    return rank


def batch(source: Path, seed: int, lengths: tuple[int, ...] = (40, 90, 11)) -> EncodedBatch:
    renderer = make_renderer(source)
    return cross_entropy([datum(prompt(words(length, seed)), renderer, seed) for length in lengths])


def weights(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {f"{one} {name}": value.clone() for one in "ab" for name, value in lora_model(rank, one).tensors.items()}


@pytest.fixture
def source(tiny_text: Path) -> Path:
    return tiny_text


def alternately(source: Path, rank: TrainerRank, seen: Callable[[], object]) -> list[object]:
    """Train both models in turn; the second forward_backward of each comes after the other model's first step."""
    found = []
    for seed in range(2):
        for one in "ab":
            forward_backward(rank, one, batch(source, seed))
            found.append(seen())
        for one in "ab":
            rank.optim_step(one, AdamParams(learning_rate=1e-3))
            found.append(seen())
    return found


def test_models_that_do_not_fit_together_take_turns_and_learn_the_same(source: Path) -> None:
    plain, rank = two_models(source), two_models(source)
    rank.base.memory = card = Card(rank)
    alternately(source, plain, lambda: None)
    turns = alternately(source, rank, lambda: card.on_card)
    assert turns == [{"a"}, {"b"}, {"a"}, {"b"}, {"a"}, {"b"}, {"a"}, {"b"}]
    assert_same(weights(rank), weights(plain))


def test_requests_of_both_at_once_are_computed_one_after_the_other(source: Path) -> None:
    plain, rank = two_models(source), two_models(source)
    rank.base.memory = card = Card(rank)
    batches = [("a", batch(source, 1)), ("b", batch(source, 2, (70, 60, 50)))]
    wanted, found = together(plain, batches), together(rank, batches)
    for one, other in zip(found, wanted, strict=True):
        for row, like in zip(succeeded(one).loss_fn_outputs, succeeded(other).loss_fn_outputs, strict=True):
            assert torch.allclose(torch.from_numpy(row["logprobs"]), torch.from_numpy(like["logprobs"]), atol=1e-5)
    assert card.on_card == {"b"}
    for trainer in (plain, rank):
        for name in "ab":
            trainer.optim_step(name, AdamParams(learning_rate=1e-3, eps=1.0))
    assert_same(weights(rank), weights(plain))


def test_models_that_fit_together_stay(source: Path) -> None:
    rank = two_models(source)
    rank.base.memory = card = Card(rank)
    card._limit_bytes += lora_model(rank, "b").training_bytes
    assert alternately(source, rank, lambda: card.on_card) == [{"a", "b"}] * 8


def test_a_microbatch_that_was_planned_is_tried_though_memory_has_become_short(source: Path) -> None:
    """It may recompute more, and it is tried again with the least memory."""
    rank = two_models(source)
    rank.base.memory = Card(rank)
    forward_backward(rank, "a", batch(source, 1))
    assert rank._bring_back(rank.models["a"], 120) == LONGEST


def test_layers_that_recompute_are_chosen_once_the_models_buffers_are_there(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a new summed rank take what was thought to be free."""
    rank = two_models(source)
    rank.base.memory = Card(rank)
    widths = []
    monkeypatch.setattr(Card, "prepare", lambda *_: widths.append({one.width for one in rank.base.weights._loaded}))
    for name in "ab":
        forward_backward(rank, name, batch(source, 1, (40,)))
    assert widths == [{8}, {6}]


def test_a_datum_that_is_too_long_for_an_empty_card_is_refused_and_offloads_nothing(source: Path) -> None:
    rank = two_models(source)
    rank.base.memory = card = Card(rank)
    with pytest.raises(InvalidInput, match="datum 1: 101 tokens, but the GPU's memory is enough for 100"):
        forward_backward(rank, "a", batch(source, 1, (40, 101)))
    assert card.on_card == {"a", "b"}


def test_without_main_memory_a_model_waits_for_the_others_and_loses_nothing(source: Path, monkeypatch) -> None:
    plain, rank = two_models(source), two_models(source)
    rank.base.memory = card = Card(rank)
    for one in (plain, rank):
        forward_backward(one, "a", batch(source, 1))
    with monkeypatch.context() as changed:
        changed.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        assert card.on_card == {"a"}  # b was offloaded before
        with pytest.raises(BackendFailed, match="the main memory has no room for the models that wait"):
            forward_backward(rank, "b", batch(source, 2))
        assert card.on_card == {"a"}
    with pytest.raises(InvalidInput, match="incomplete"):
        rank.optim_step("b", AdamParams())
    for one in (plain, rank):
        one.optim_step("a", AdamParams(learning_rate=1e-3))
    assert_same(weights(rank), weights(plain))


def test_a_new_model_takes_the_place_of_the_least_recently_used(source: Path, monkeypatch) -> None:
    rank = two_models(source)
    rank.base.memory = card = Card(rank)
    card._limit_bytes += lora_model(rank, "b").training_bytes
    for one in "ba":
        forward_backward(rank, one, batch(source, 1))
    create = Adapters.create

    def full(adapters: Adapters, lora: Trainable, keep_waiting: Callable[[float], None]) -> LoraModel:
        if len(card.on_card) == 2:
            raise torch.OutOfMemoryError("no room")
        return create(adapters, lora, keep_waiting)

    monkeypatch.setattr(Adapters, "create", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rank.create_model("c", LORA)
    assert card.on_card == {"a", "c"}
    rank.delete_model("b")
    assert not rank._offloaded


def on_shards(world: World, source: Path) -> list[object]:
    rank, plain = two_models(source, world), two_models(source, world)
    rank.base.memory = card = Card(rank)
    if world.rank == 1:
        card._limit_bytes += 10**9  # the other rank's card decides
    alternately(source, plain, lambda: None)
    turns = alternately(source, rank, lambda: sorted(card.on_card))
    assert_same(weights(rank), weights(plain))
    return turns


def test_ranks_offload_together(source: Path) -> None:
    first, second = on_two_ranks(on_shards, source)
    assert first == second == [["a"], ["b"]] * 4


def test_a_model_of_a_layout_that_is_not_planned_is_refused_where_it_has_no_room(tmp_path: Path) -> None:
    source = make_tiny_moe(tmp_path / "model")
    rank = make_trainer(source, lora_layout="service")
    service = Trainable(rank=8, seed=1, train_attn=False, train_unembed=False, layout="service")
    rank.create_model("a", service)
    rank.base.memory = card = Card(rank)
    card._limit_bytes = lora_model(rank, "a").training_bytes + PER_TOKEN
    own = service.model_copy(update={"layout": "own"})
    with pytest.raises(BackendFailed, match=r"rank 8 and of the LoRA layout own .* planned for the layout service"):
        rank.create_model("b", own)
    assert rank.models.keys() == {"a"}
    rank.create_model("b", service)
    elsewhere = make_trainer(source)
    elsewhere.create_model("m", own)
    elsewhere.save_state("m", tmp_path / "state")
    with pytest.raises(BackendFailed, match=r"planned for the layout service"):
        rank.load_state("b", tmp_path / "state", with_optimizer=True)
    assert lora_model(rank, "b").config == service
    card._limit_bytes *= 10
    rank.load_state("b", tmp_path / "state", with_optimizer=True)
    assert lora_model(rank, "b").config == own
