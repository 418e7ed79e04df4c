"""Holder, trainer and sampler of one model on a GPU, and the memory that is in use there."""

import asyncio
import os
from pathlib import Path

import numpy as np
import psutil
import pynvml
import torch

from tests.factories import cross_entropy, image, prompt, words
from tests.gpu.agreement import of_text, scoring_datum
from tests.sampling import sample, scoring
from tests.trainers import LORA
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import launch_sampler, launch_trainer
from tinker_server.backends.protocol import ignore_loading
from tinker_server.backends.sampler.commands import CountProgress
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.client import TrainerClient


class Parts:
    def __init__(self, spec: ModelSpec) -> None:
        self.base = BaseWeights(spec)
        self.trainer = TrainerClient(self.base.spec, self.base.wrap_start(launch_trainer))
        self.sampler = SamplerPool(self.base.spec, self.base.wrap_start(launch_sampler, they_wait=True))

    @property
    def socket(self) -> Path:
        return self.base.spec.base_socket(0)

    async def __aenter__(self) -> "Parts":
        await asyncio.gather(self.base.start(ignore_loading), self.trainer.start(), self.sampler.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self.trainer.stop(), self.sampler.stop())
        await self.base.stop()

    def holder(self) -> int:
        return self.base._supervisor.children[0].process.pid

    async def progress(self) -> list[int]:
        """Steps and tasks of each engine."""
        engines = self.sampler.engines
        return [await engine.call(engine.supervisor.children[0], CountProgress()) for engine in engines]

    async def difference(self, source: Path) -> np.ndarray:
        """Absolute, nats, of trainer and sampler."""
        renderer = Renderer(str(source), image_cache_bytes=1 << 26, max_image_pixels=10**7)
        pictures = [image(96, 64, 1)] if renderer.takes_images else []
        model_input = prompt(words(200, 5), *pictures, words(100, 6))
        scored = (await sample(self.sampler, scoring(model_input), None)).prompt_logprobs
        model = await self.trainer.create_model("m", LORA, "owner")
        item = scoring_datum(model_input, renderer)
        output = await self.trainer.forward_backward(model, cross_entropy([item]), backward=False)
        await self.trainer.delete_model(model)
        return of_text(item, scored, output.loss_fn_outputs[0]["logprobs"], renderer)


def used_bytes() -> int:
    """Return the bytes that this process and those that it has started have of the first GPU."""
    pynvml.nvmlInit()
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        return sum(one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) if one.pid in own)
    finally:
        pynvml.nvmlShutdown()
