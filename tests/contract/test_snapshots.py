"""A snapshot is of the moment it was asked for, and is written while the next operations run.

pytest tests/contract/test_snapshots.py
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.factories import MIXED, cross_entropy, datum
from tests.trainers import config
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.protocol import BackendFailed, LoadedModel
from tinker_server.backends.trainer.client import TrainerClient

pytestmark = pytest.mark.usefixtures("forked_ranks")

LORA = Trainable(rank=8, seed=1)
ADAM = AdamParams(learning_rate=0.01)


@pytest.fixture
async def trainer(tiny_vl):
    ranked = TrainerClient(config(tiny_vl))
    await ranked.start()
    yield ranked
    await ranked.stop()


def state(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors") | load_file(directory / "optimizer.safetensors")


async def test_a_model_goes_on_from_its_snapshot_bit_for_bit_whatever_ran_while_it_was_written(
    trainer, renderer, tmp_path
):
    batches = [cross_entropy([datum(item, renderer, seed)]) for seed, item in enumerate(MIXED.values())]
    model = await trainer.create_model("m", LORA, "owner")
    await trainer.forward_backward(model, batches[0], backward=True)
    await trainer.optim_step(model, ADAM)
    await trainer.forward_backward(model, batches[1], backward=True)
    written = await trainer.snapshot(model, tmp_path / "snapshot")

    async def go_on(model: LoadedModel, name: str) -> object:
        outputs = await trainer.forward_backward(model, batches[2], backward=True)
        norm = (await trainer.optim_step(model, ADAM)).metrics["grad_norm"]
        await trainer.save(model, tmp_path / name, "state")
        return [one["logprobs"].tobytes() for one in outputs.loss_fn_outputs], norm

    stayed = await go_on(model, "stayed")
    await written
    await trainer.delete_model(model)
    restored = await trainer.create_model("m", LORA, "owner", tmp_path / "snapshot")
    assert await go_on(restored, "resumed") == stayed
    wanted, got = state(tmp_path / "stayed"), state(tmp_path / "resumed")
    assert wanted.keys() == got.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


async def test_a_snapshot_that_cannot_be_written_says_so_and_the_model_goes_on(trainer, renderer, tmp_path):
    model = await trainer.create_model("m", LORA, "owner")
    (tmp_path / "file").touch()
    written = await trainer.snapshot(model, tmp_path / "file" / "snapshot")
    with pytest.raises(BackendFailed, match="cannot be read or written"):
        await written
    await trainer.forward_backward(model, cross_entropy([datum(MIXED["text"], renderer)]), backward=True)
    await trainer.optim_step(model, ADAM)
