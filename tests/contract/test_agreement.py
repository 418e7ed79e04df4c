"""If one rank alone meets an error, both ranks refuse the request and go on with equal weights.

pytest tests/contract/test_agreement.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.ranks import on_two_ranks
from tests.trainers import LORA, config, forward_backward, lora_model
from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Mesh
from tinker_server.backends.protocol import BackendFailed, EncodedBatch, InvalidInput
from tinker_server.backends.trainer import optimizer, shards
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

ADAM = AdamParams(learning_rate=1e-2)
Outcome = dict[str, str]


def outcome(action: Callable[[], object]) -> str:
    """The outcome, as a text that ranks can be compared by."""
    try:
        action()
    except (InvalidInput, BackendFailed, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def weights(rank: TrainerRank, model_id: str) -> float:
    return sum(tensor.double().abs().sum().item() for tensor in lora_model(rank, model_id).tensors.values())


def out_of_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 8 GiB")


def text_batch(renderer: Renderer) -> EncodedBatch:
    return cross_entropy([datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 23)])


def troubles(world: World, source: Path, directory: Path) -> Outcome:
    """Rank 1, or where files are written rank 0, runs into one thing after another."""
    rank = TrainerRank(config(source, num_ranks=world.size), world)
    batch = text_batch(make_renderer(source))
    found: Outcome = {}

    def train() -> str:
        forward_backward(rank, "m", batch, True)
        return outcome(lambda: rank.optim_step("m", ADAM))

    rank.create_model("m", LORA)
    found["train"] = train()
    rank.save_state("m", directory / "state")
    saved = weights(rank, "m")
    found["train on"] = train()

    # Only rank 0 sees the file, as on disks of its own.
    own = directory / ("state" if world.rank == 0 else "elsewhere")
    found["load"] = outcome(lambda: rank.load_state("m", own, True))
    found["loaded"] = str(weights(rank, "m") == saved)

    (directory / "file").touch()  # in which no directory can be made
    found["save"] = outcome(lambda: rank.save_state("m", directory / "file" / "state"))
    found["snapshot"] = outcome(lambda: rank.snapshot("m", directory / "file" / "snapshot"))
    if world.rank == 0:
        written = outcome(rank.base.snapshots.written(directory / "file" / "snapshot").result)
        assert written.startswith("BackendFailed: a file cannot be read or written"), written
    found["after saving"] = train()

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("tinker_server.backends.trainer.lora.adapters._initialise", out_of_memory)
        found["create"] = outcome(lambda: rank.create_model("n", LORA))
    found["created"] = str("n" in rank.models)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("tinker_server.backends.trainer.step.parts.pack", out_of_memory)
        found["forward_backward"] = outcome(lambda: forward_backward(rank, "m", batch, True))
    found["step on a part"] = outcome(lambda: rank.optim_step("m", ADAM))

    before = weights(rank, "m")
    forward_backward(rank, "m", batch, True)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(optimizer, "_try_step", out_of_memory)
        found["step"] = outcome(lambda: rank.optim_step("m", ADAM))
    found["unchanged"] = str(weights(rank, "m") == before)
    found["step again"] = outcome(lambda: rank.optim_step("m", ADAM))
    found["train at last"] = train()
    found["weights"] = repr(weights(rank, "m"))

    forward_backward(rank, "m", batch, True)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(rank.models["m"].optimizer, "step", out_of_memory)
        found["half a step"] = outcome(lambda: rank.optim_step("m", ADAM))
    return found


@pytest.fixture(scope="module")
def found(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return on_two_ranks(troubles, tiny_text, tmp_path_factory.mktemp("agreement"))


def test_both_ranks_end_everything_alike_and_with_equal_weights(found: list[Outcome]) -> None:
    assert found[0] == found[1]
    for name in ("train", "train on", "after saving", "train at last"):
        assert found[0][name] == "done", name


def test_a_checkpoint_that_one_rank_alone_sees_is_loaded_by_all(found: list[Outcome]) -> None:
    assert (found[1]["load"], found[1]["loaded"]) == ("done", "True")


def test_a_disk_that_refuses_fails_the_save_alone(found: list[Outcome]) -> None:
    assert found[1]["save"].startswith("BackendFailed: a file cannot be read or written")
    assert found[1]["snapshot"] == "done", "what it could not write, rank 0 alone tells"


def test_a_model_that_one_rank_cannot_make_is_on_none(found: list[Outcome]) -> None:
    assert found[0]["create"].startswith("BackendFailed: out of GPU memory")
    assert found[0]["created"] == "False"


def test_memory_that_one_rank_lacks_fails_the_batch_and_the_step_after_it(found: list[Outcome]) -> None:
    assert found[0]["forward_backward"].startswith("BackendFailed: out of GPU memory")
    assert "incomplete" in found[0]["step on a part"]


def test_a_step_that_one_rank_cannot_take_is_taken_by_none(found: list[Outcome]) -> None:
    assert found[0]["step"].startswith("BackendFailed: out of GPU memory")
    assert found[0]["unchanged"] == "True"
    assert "no gradient" in found[0]["step again"]


def test_a_step_that_fails_on_one_rank_while_it_is_taken_ends_both(found: list[Outcome]) -> None:
    assert found[0]["half a step"].startswith("SystemExit: a step that had been found possible failed: out of GPU")


# ---- shards of masters and moments

LOADING = ("loading masters", "loading moments", "loading the working copy")
OUT_OF_MEMORY = "BackendFailed: out of GPU memory; send shorter or fewer datums at once"
NOT_FINITE = "InvalidInput: the step makes weights that are not finite"
CANNOT_BE_SAVED = "InvalidInput: the model's weights hold NaN or infinity and cannot be saved"
Ended = tuple[str, bool]
"""How an action ended, and whether all of the model is bitwise as before."""


def failing_from(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs out of memory after its work, from the call of this number on."""
    calls = count()

    def call(*args: object) -> object:
        result = function(*args)
        if next(calls) >= number:
            out_of_memory()
        return result

    return call


def failing_on_shards(world: World, source: Path, directory: Path) -> dict[str, Ended]:
    """Rank 1 alone fails in the middle of each transfer; each time a step is taken afterwards."""
    rank = TrainerRank(replace(config(source), mesh=Mesh(replicate=world.size)), world)
    batch = text_batch(make_renderer(source))
    rank.create_model("m", LORA)
    model = lora_model(rank, "m")
    found: dict[str, Ended] = {}

    def train(adam: AdamParams = ADAM) -> None:
        forward_backward(rank, "m", batch, True)
        rank.optim_step("m", adam)

    def whole() -> list[Tensor]:
        moments = [one for state in model.optimizer.state.values() for one in state.values()]
        return [one.detach().clone() for one in (*model._weights, *model.parameters, *moments)]

    def ended(action: Callable[[], object]) -> Ended:
        before = whole()
        text = outcome(action).partition(" (")[0]
        now = whole()
        return text, len(now) == len(before) and all(torch.equal(*pair) for pair in zip(now, before, strict=True))

    def fails(name: str, owner: object, attribute: str, number: int, action: Callable[[], object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                patch.setattr(owner, attribute, failing_from(number, getattr(owner, attribute)))
            found[name] = ended(action)
        found[f"a step after {name}"] = ended(train)

    train()
    rank.save_state("m", directory / "state")
    load = partial(rank.load_state, "m", directory / "state", True)
    save = partial(rank.save_state, "m", directory / "never")
    num_scattered = 3 * len(model.parameters)
    fails("summing", shards, "_buffers", 0, train)
    fails("trying a step", optimizer, "_try_step", 0, train)
    fails("sharing", shards, "_buffers", 1, train)
    for name, number in zip(LOADING, (0, num_scattered // 2, num_scattered), strict=True):
        fails(name, shards, "_buffers", number, load)
    fails("saving", shards, "_buffers", 3, save)
    fails("a snapshot", shards, "_buffers", 3, partial(rank.snapshot, "m", directory / "never"))

    found["not finite"] = ended(lambda: train(AdamParams(learning_rate=1e39)))
    if world.rank == 1:
        model.parameters[0].data[0] = 1e38
    found["not finite in rank 1's shard"] = ended(lambda: train(AdamParams(learning_rate=1.0, weight_decay=1e4)))
    if world.rank == 1:
        model.parameters[0].data[0] = torch.inf
    found["saving what is not finite"] = ended(save)
    for_elsewhere = partial(rank.save_sampler_weights, "m", directory / "never", for_elsewhere=True)
    found["sampler weights that are not finite"] = ended(for_elsewhere)
    return found


def test_what_fails_on_one_rank_changes_nothing_on_any(tiny_text: Path, tmp_path: Path) -> None:
    first, second = on_two_ranks(failing_on_shards, tiny_text, tmp_path)
    assert first == second
    failures = ("summing", "trying a step", "sharing", *LOADING, "saving", "a snapshot")
    wanted = dict.fromkeys(failures, (OUT_OF_MEMORY, True))
    wanted |= {f"a step after {name}": ("done", False) for name in failures}
    wanted |= dict.fromkeys(("not finite", "not finite in rank 1's shard"), (NOT_FINITE, True))
    names = ("saving what is not finite", "sampler weights that are not finite")
    assert first == wanted | dict.fromkeys(names, (CANNOT_BE_SAVED, True))
    assert not (tmp_path / "never").exists()
