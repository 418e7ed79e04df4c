"""Builds the backend from its configuration: per base model a trainer and a sampler."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from api_schemas.sampling import SampleRequest
from backends.config import BackendConfig
from backends.protocol import Backend, BackendFailed, BaseModelInfo
from backends.rendering import Renderer
from backends.sampler.checks import check_sample
from backends.sampler.client import SamplerClient
from backends.sampler.commands import SamplerConfig
from backends.sources import check_memory, check_tokenizer, count_parameters, kv_bytes_per_token, local_directory
from backends.trainer.client import TrainerClient
from backends.trainer.commands import TrainerConfig

log = logging.getLogger(__name__)
LARGEST_DEFAULT_CONTEXT = {"cpu": 8192, "cuda": 32768}
SMALLEST_DEFAULT_KV_CACHE = 512 << 20
Device = Literal["cpu", "cuda"]


@dataclass
class LocalModel:
    """`protocol.BaseModel`; names that share a source share trainer and sampler."""

    info: BaseModelInfo
    trainer: TrainerClient
    sampler: SamplerClient
    renderer: Renderer
    max_images: int

    def check_sample(self, request: SampleRequest) -> None:
        check_sample(self.renderer, request, self.info.max_context_length, self.max_images)


class LocalBackend:
    """`protocol.Backend` on this machine."""

    def __init__(self, config: BackendConfig) -> None:
        self._config = config
        self._models: dict[str, LocalModel] = {}

    @property
    def models(self) -> Mapping[str, LocalModel]:
        return self._models

    async def start(self) -> None:
        self._models = await asyncio.to_thread(describe_models, self._config)
        distinct = {id(model.trainer): model for model in self._models.values()}.values()
        try:
            for model in distinct:
                log.info("%s: loading trainer and sampler", model.info.name)
                await asyncio.gather(model.trainer.start(), model.sampler.start())
                log.info("%s: ready", model.info.name)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        distinct = {id(model.trainer): model for model in self._models.values()}.values()
        await asyncio.gather(*(part.stop() for model in distinct for part in (model.trainer, model.sampler)))


def create_backend(config: BackendConfig) -> Backend:
    """A backend that has not started."""
    return LocalBackend(config)


def describe_models(config: BackendConfig) -> dict[str, LocalModel]:
    """Find every model and check that it can be served; loads no weights. Raises BackendFailed."""
    if not config.models:
        raise BackendFailed("no base model is configured: give at least one --model NAME=DIRECTORY_OR_HUB_ID")
    device = resolve_device(config)
    by_directory: dict[Path, LocalModel] = {}
    models = {}
    for name, source in config.models.items():
        directory = local_directory(source)
        if directory not in by_directory:
            by_directory[directory] = _describe(name, source, directory, device, config, len(by_directory))
        model = by_directory[directory]
        models[name] = replace(model, info=replace(model.info, name=name, source=source))
    return models


def resolve_device(config: BackendConfig) -> Device:
    """cpu or cuda. Raises BackendFailed where CUDA is asked for, or more ranks than there are GPUs."""
    gpus = torch.cuda.device_count()
    device: Device = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < config.ranks:
        raise BackendFailed(f"{config.ranks} ranks on CUDA need as many GPUs; torch sees {gpus}")
    return device


def _describe(
    name: str, source: str, directory: Path, device: Device, config: BackendConfig, number: int
) -> LocalModel:
    try:
        renderer = Renderer(
            str(directory), image_cache_bytes=config.image_cache_bytes, max_image_pixels=config.max_image_pixels
        )
    except (OSError, ValueError) as error:
        raise BackendFailed(f"{source}: no usable model: {str(error).splitlines()[0]}") from None
    check_tokenizer(directory)
    dtype = config.dtype if config.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    text_config = renderer.config.get_text_config()
    context = min(text_config.max_position_embeddings, config.max_context_length or LARGEST_DEFAULT_CONTEXT[device])
    kv_cache_bytes = config.kv_cache_bytes or max(
        SMALLEST_DEFAULT_KV_CACHE, 2 * context * kv_bytes_per_token(text_config, dtype)
    )
    check_memory(
        name,
        count_parameters(directory),
        dtype,
        device,
        ranks=config.ranks,
        sampler_fraction=config.gpu_memory_fraction,
        kv_bytes=kv_cache_bytes,
    )
    info = BaseModelInfo(
        name=name,
        source=source,
        arch=renderer.config.model_type,
        vocab_size=renderer.vocab_size,
        max_context_length=context,
        takes_images=renderer.takes_images,
        max_lora_rank=config.max_lora_rank,
    )
    trainer_config = TrainerConfig(
        name=name,
        source=str(directory),
        device=device,
        dtype=dtype,
        max_lora_rank=config.max_lora_rank,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch or (1024 if device == "cpu" else 8192),
        image_cache_bytes=config.image_cache_bytes,
        max_image_pixels=config.max_image_pixels,
    )
    sampler_config = SamplerConfig(
        name=name,
        source=str(directory),
        device=device,
        dtype=dtype,
        max_context_length=context,
        max_lora_rank=config.max_lora_rank,
        max_concurrent_samples=config.max_concurrent_samples,
        max_images_per_prompt=config.max_images_per_prompt,
        gpu_memory_fraction=config.gpu_memory_fraction,
        kv_cache_bytes=kv_cache_bytes,
        image_cache_bytes=config.image_cache_bytes,
        max_image_pixels=config.max_image_pixels,
        scratch_dir=config.scratch_dir / str(number),
    )
    return LocalModel(
        info,
        TrainerClient(trainer_config, renderer, num_ranks=config.ranks, max_context_length=context),
        SamplerClient(sampler_config),
        renderer,
        config.max_images_per_prompt,
    )
