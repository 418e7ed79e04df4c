"""Builds the backend from its configuration: per base model a trainer and a sampler."""

import asyncio
import logging
import time
from collections.abc import Mapping

from backends.config import BackendConfig
from backends.configure.describe import LocalModel, describe_models
from backends.configure.examine import examine as examine
from backends.configure.gpus import read_gpus
from backends.protocol import Backend, GpuState, OnLoading, ignore_loading

log = logging.getLogger(__name__)


class LocalBackend:
    """`protocol.Backend` on this machine."""

    def __init__(self, config: BackendConfig, on_loading: OnLoading = ignore_loading) -> None:
        self._config = config
        self._on_loading = on_loading
        self._models: dict[str, LocalModel] = {}

    @property
    def models(self) -> Mapping[str, LocalModel]:
        """By public name."""
        return self._models

    async def start(self) -> None:
        """Load all models, side by side where they do not count each other's memory."""
        self._models = await asyncio.to_thread(describe_models, self._config)
        try:
            await start_models(self._loaded(), self._on_loading)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every child process."""
        await asyncio.gather(*(part.stop() for model in self._loaded() for part in (model.trainer, model.sampler)))

    def gpus(self) -> list[GpuState]:
        """As the protocol says."""
        return read_gpus({gpu for model in self._loaded() for gpu in model.placement.gpus})

    def _loaded(self) -> list[LocalModel]:
        """Each loaded model once, under the first of its names."""
        return list({id(model.trainer): model for model in reversed(self._models.values())}.values())[::-1]


def create_backend(config: BackendConfig, on_loading: OnLoading = ignore_loading) -> Backend:
    """A backend that has not started. `on_loading` is told what its processes do whenever they get ready."""
    return LocalBackend(config, on_loading)


def _plan(model: LocalModel) -> str:
    """What it takes, and what it is then good for."""
    parts = [
        f"{model.weight_bytes / 2**30:.2f} GiB of weights each",
        f"contexts of {model.info.max_context_length} tokens",
        "training all weights" if model.info.full else f"ranks up to {model.info.max_lora_rank}",
    ]
    place = model.placement
    if place.gpus:
        parts.append(f"GPUs {', '.join(map(str, place.gpus))} with {place.trainer_bytes / 2**30:.1f} GiB for each rank")
        parts.append(f"the sampler with {place.sampler_fraction:.2f} of GPU {place.gpus[0]}")
    return ", ".join(parts)


async def start_models(models: list[LocalModel], on_loading: OnLoading) -> None:
    """Load trainers and samplers. Raises the first failure.

    A sampler on CUDA starts when all trainers have loaded and no other sampler loads on its GPU: vLLM takes for
    its own whatever memory is filled while it measures.
    """
    turns = {model.placement.gpus[0]: asyncio.Lock() for model in models if model.placement.gpus}
    trainers = {id(model): asyncio.create_task(model.trainer.start(on_loading)) for model in models}

    async def start(model: LocalModel) -> None:
        began = time.monotonic()
        log.info("%s: loading trainer and sampler, %s", model.info.name, _plan(model))
        if model.placement.gpus:
            await asyncio.gather(*trainers.values())
            async with turns[model.placement.gpus[0]]:
                await model.sampler.start(on_loading)
        else:
            await asyncio.gather(trainers[id(model)], model.sampler.start(on_loading))
        log.info("%s: ready after %.0f s", model.info.name, time.monotonic() - began)

    loading = [*trainers.values(), *(asyncio.create_task(start(model)) for model in models)]
    try:
        await asyncio.gather(*loading)
    finally:
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
