"""Two machines, each with GPUs of its own of this one, train as one GPU: their gradients are summed by NCCL.

pytest tests/gpu/test_machines.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.factories import MIXED, cross_entropy, datum
from tests.replicas import Machine, until_on
from tests.trainers import LORA, SMOOTH, config, relative_distance
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Dtype, Mesh, ModelSpec, Placement
from tinker_server.backends.trainer.client import TrainerClient

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


async def trained(spec: ModelSpec, others: ModelSpec | None, renderer: Renderer, directory: Path) -> dict[str, Tensor]:
    """Two steps with a snapshot between them, from which the second is taken; what is saved then."""
    trainer = TrainerClient(spec)
    await trainer.start()
    try:
        if others is not None:
            trainer.attach(Machine(others).replica)
            await until_on(trainer, *["here"] * spec.mesh.size, *["a"] * spec.mesh.size, limit_s=600)
        model = await trainer.create_model("m", LORA, "owner")
        for seed in range(2):
            batch = [datum(one, renderer, seed * 10 + i) for i, one in enumerate(MIXED.values())]
            await trainer.forward_backward(model, cross_entropy(batch), backward=True)
            await (await trainer.snapshot(model, directory / f"snapshot-{seed}"))
            model = await trainer.create_model("m", LORA, "owner", directory / f"snapshot-{seed}")
            await trainer.optim_step(model, SMOOTH)
        await trainer.save(model, directory / "state", "state")
        await trainer.save(model, directory / "sampler", "sampler")
    finally:
        await trainer.stop()
    return load_file(directory / "state/adapter_model.safetensors")


@pytest.mark.parametrize("num_gpus", [1, 2], ids=["replicated", "sharded"])
@pytest.mark.parametrize(
    ("dtype", "across", "close"),
    [("float32", "float32", 1e-4), ("float32", "bfloat16", 0.01), ("bfloat16", "float32", 0.06)],
)
async def test_two_machines_are_as_one_gpu(
    tiny_vl: Path, renderer: Renderer, tmp_path: Path, num_gpus: int, dtype: Dtype, across: Dtype, close: float
) -> None:
    """With two GPUs each, a machine's have the base and the masters between them."""
    if torch.cuda.device_count() < 2 * num_gpus:
        pytest.skip(f"needs {2 * num_gpus} GPUs")
    one = replace(config(tiny_vl, max_tokens=20), device="cuda", dtype=dtype, placement=Placement((0,)))
    first, second = tuple(range(num_gpus)), tuple(range(num_gpus, 2 * num_gpus))
    here = replace(one, mesh=Mesh(shard=num_gpus), across_dtype=across, placement=Placement(first))
    there = replace(here, placement=Placement(second))
    wanted = await trained(one, None, renderer, tmp_path / "one")
    found = await trained(here, there, renderer, tmp_path / "two")
    assert found.keys() == wanted.keys()
    distance = relative_distance(found.values(), wanted.values())
    print(f"{dtype}, {across} between machines: {distance:.2e}")
    assert distance < close
