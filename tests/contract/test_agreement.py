"""If one rank alone meets an error, both ranks refuse the request and go on with equal weights.

pytest tests/contract/test_agreement.py
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from api_schemas.training import AdamParams
from backends.inputs.rendering import Renderer
from backends.protocol import BackendFailed, InvalidInput
from backends.trainer.distributed import World
from backends.trainer.rank import TrainerRank
from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.ranks import on_two_ranks
from tests.trainers import LORA, config, forward_backward, lora_model

ADAM = AdamParams(learning_rate=1e-2)
Outcome = dict[str, str]


def outcome(action: Callable[[], object]) -> str:
    """The outcome, as a text that ranks can be compared by."""
    try:
        action()
    except (InvalidInput, BackendFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def weights(rank: TrainerRank, model_id: str) -> float:
    return sum(tensor.double().abs().sum().item() for tensor in lora_model(rank, model_id).tensors.values())


def out_of_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 8 GiB")


def troubles(world: World, source: Path, directory: Path) -> Outcome:
    """Rank 1, or where files are written rank 0, runs into one thing after another."""
    rank = TrainerRank(config(source, num_ranks=world.size), world)
    renderer: Renderer = make_renderer(source)
    batch = cross_entropy([datum(prompt(words(length, length)), renderer, length) for length in (5, 11, 23)])
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
        written = outcome(rank.snapshot_written(directory / "file" / "snapshot").result)
        assert written.startswith("BackendFailed: a file cannot be read or written"), written
    found["after saving"] = train()

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("backends.trainer.lora.adapters._initialise", out_of_memory)
        found["create"] = outcome(lambda: rank.create_model("n", LORA))
    found["created"] = str("n" in rank.models)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("backends.trainer.step.packed_microbatch.pack", out_of_memory)
        found["forward_backward"] = outcome(lambda: forward_backward(rank, "m", batch, True))
    found["step on a part"] = outcome(lambda: rank.optim_step("m", ADAM))

    before = weights(rank, "m")
    forward_backward(rank, "m", batch, True)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(rank.models["m"].optimizer, "step", out_of_memory)
        found["step"] = outcome(lambda: rank.optim_step("m", ADAM))
    found["unchanged"] = str(weights(rank, "m") == before)
    found["step again"] = outcome(lambda: rank.optim_step("m", ADAM))
    found["train at last"] = train()
    found["weights"] = repr(weights(rank, "m"))
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
