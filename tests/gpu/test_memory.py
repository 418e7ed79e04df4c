"""Two base models on one GPU, each within its part of the memory.

pytest tests/gpu/test_memory.py
"""

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from api_schemas.sampling import SamplingParams
from api_schemas.training import AdamParams
from backends.config import BackendConfig
from backends.configure.create import LocalBackend
from backends.protocol import SamplingTask
from tests.factories import prompt, words
from tests.trainers import LORA

pytestmark = pytest.mark.gpu


def task() -> SamplingTask:
    params = SamplingParams(max_tokens=20, seed=1, stop=[])
    return SamplingTask(prompt=prompt(words(5)), params=params, num_samples=1, weights=None, owner="somebody")


async def test_a_sampler_returns_beside_trainers_that_fill_their_part(
    tiny_vl: Path, tiny_text: Path, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    models = {"seeing": str(tiny_vl), "blind": str(tiny_text)}
    config = BackendConfig(models=models, device="cuda", max_context_length=2048, scratch_dir=tmp_path)
    backend = LocalBackend(config)
    await backend.start()
    try:
        loaded = [backend.models[name] for name in models]
        assert sum(model.info.placement.sampler_fraction for model in loaded) == pytest.approx(0.4)
        before = [(await model.sampler.sample(task())).sequences[0].tokens.tolist() for model in loaded]
        for model in loaded:
            await model.trainer.create_model("m", LORA, "owner")
        free, total = torch.cuda.mem_get_info()
        print(f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} are free beside two models")
        # As the trainers may; this process stands in for them.
        share = sum(model.info.placement.trainer_fraction for model in loaded)
        filled = torch.empty(int(share * total), dtype=torch.uint8, device="cuda")
        host = loaded[0].sampler.engines[0].supervisor.children[0].process.pid
        assert (
            psutil.Process(loaded[0].trainer._supervisor.children[0].process.pid).environ()["CUDA_VISIBLE_DEVICES"]
            == "0"
        )
        os.kill(host, signal.SIGKILL)
        after = [(await model.sampler.sample(task())).sequences[0].tokens.tolist() for model in loaded]
        assert loaded[0].sampler.engines[0].supervisor.children[0].process.pid != host
        assert after == before
        del filled
        for model in loaded:
            with pytest.raises(ValueError, match="no forward_backward"):
                await model.trainer.optim_step("m", AdamParams())
    finally:
        await backend.stop()
