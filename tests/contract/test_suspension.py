"""A model moved to disk and back goes on as if it had stayed.

pytest tests/contract/test_suspension.py
"""

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.factories import MIXED, batch, cross_entropy, datum
from tests.trainers import config
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.protocol import InvalidInput, ModelLost
from tinker_server.backends.trainer.client import TrainerClient

pytestmark = pytest.mark.usefixtures("forked_ranks")

LORA = Trainable(rank=8, seed=1)
ADAM = AdamParams(learning_rate=0.01)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_suspended_model_resumes_with_its_gradient_and_optimizer(tiny_vl, renderer, tmp_path, num_ranks):
    batches = [[datum(item, renderer, seed)] for seed, item in enumerate(MIXED.values())][:3]
    ranked = TrainerClient(config(tiny_vl, num_ranks=num_ranks))
    await ranked.start()
    try:
        for name, suspends in (("stayed", False), ("moved", True)):
            model = await ranked.create_model(name, LORA, "owner")
            await ranked.forward_backward(model, cross_entropy(batches[0]), backward=True)
            await ranked.optim_step(model, ADAM)
            await ranked.forward_backward(model, cross_entropy(batches[1]), backward=True)
            if suspends:
                await (await ranked.snapshot(model, tmp_path / "snapshot"))
                await ranked.delete_model(model)
                with pytest.raises(ModelLost):
                    await ranked.optim_step(model, ADAM)
                model = await ranked.create_model(name, LORA, "owner", tmp_path / "snapshot")
            await ranked.forward_backward(model, cross_entropy(batches[2]), backward=True)
            await ranked.optim_step(model, ADAM)
            await ranked.save(model, tmp_path / name, "state")
    finally:
        await ranked.stop()
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        stayed, moved = load_file(tmp_path / "stayed" / file), load_file(tmp_path / "moved" / file)
        assert stayed.keys() == moved.keys()
        for key, tensor in stayed.items():
            np.testing.assert_allclose(moved[key], tensor, rtol=1e-6, atol=1e-9)


async def test_an_incomplete_gradient_is_still_incomplete_after_resuming(tiny_vl, renderer, tmp_path):
    good = datum(MIXED["text"], renderer)
    ranked = TrainerClient(config(tiny_vl))
    await ranked.start()
    try:
        model = await ranked.create_model("m", LORA, "owner")
        with pytest.raises(InvalidInput):
            await ranked.forward_backward(model, batch([good], "unknown"), backward=True)
        await (await ranked.snapshot(model, tmp_path / "snapshot"))
        await ranked.delete_model(model)
        model = await ranked.create_model("m", LORA, "owner", tmp_path / "snapshot")
        await ranked.forward_backward(model, cross_entropy([good]), backward=True)
        with pytest.raises(InvalidInput, match="incomplete"):
            await ranked.optim_step(model, ADAM)
    finally:
        await ranked.stop()
