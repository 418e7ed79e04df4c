"""Finds the configured base models, checks that they can be served here, and says how. Loads no weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from api_schemas.sampling import SampleRequest
from backends.config import BackendConfig
from backends.configure.placement import Machine, ModelSize, Placement, place, this_machine
from backends.families.coverage import Numbers, check_coverage
from backends.families.family import Family
from backends.families.rotation import check_rotation
from backends.formats.model_files import (
    BYTES_PER_NUMBER,
    check_tokenizer,
    count_parameters,
    fingerprint,
    kv_bytes_per_token,
    local_directory,
)
from backends.inputs.detokenize import TokenTexts
from backends.inputs.rendering import Renderer
from backends.processes.launcher import Device
from backends.protocol import BackendFailed, BaseModelInfo, EngineUse, ProcessState
from backends.sampler.checks import check_sample
from backends.sampler.client import SamplerClient
from backends.sampler.commands import SamplerConfig
from backends.trainer.client import TrainerClient
from backends.trainer.commands import TrainerConfig

LARGEST_DEFAULT_CONTEXT = {"cpu": 8192, "cuda": 32768}
DEFAULT_MICROBATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
DEFAULT_LORA_RANKS = (128, 64, 32, 16, 8)
ADAPTERS_PART = 0.1
"""Of the sampler's memory, what its adapters may take by default."""
SMALLEST_DEFAULT_KV_CACHE = 512 << 20
SAMPLER_SILENCE_S = {"cpu": 600, "cuda": 180}
"""The longest step computes 4096 tokens of prompts on a slow CPU, or meets kernels on CUDA that are built first."""
LEAST_KV_CACHE_ON_CUDA = 1 << 30
"""Where no size is set, and the cache takes what is left."""
_COMPUTING = ("torch", "transformers", "tinker-server")
"""Packages."""


@dataclass
class LocalModel:
    """`protocol.BaseModel`; names that share a source share trainer and sampler."""

    info: BaseModelInfo
    trainer: TrainerClient
    sampler: SamplerClient
    renderer: Renderer
    max_images: int
    placement: Placement
    texts: TokenTexts
    weight_bytes: int
    """Of one copy."""
    answers_stable_reinforce: bool

    def check_sample(self, request: SampleRequest) -> int:
        """As the protocol says."""
        if self.answers_stable_reinforce:  # by a loss that needs no records: the answer's own logprobs are all it takes
            request = request.model_copy(update={"record_stability_info": False})
        return check_sample(self.renderer, request, self.info.max_context_length, self.max_images)

    def pixel_bytes(self, images: Sequence[bytes]) -> int:
        """As the protocol says."""
        return self.renderer.pixel_bytes(images)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """As the protocol says."""
        return self.texts.of(token_ids)

    def processes(self) -> list[ProcessState]:
        """As the protocol says."""
        return [*self.trainer.processes(), *self.sampler.processes()]

    async def engine_use(self) -> EngineUse | None:
        """As the protocol says."""
        return await self.sampler.engine_use()


@dataclass(frozen=True)
class FoundModel:
    """What a model's files say of it."""

    name: str
    source: str
    directory: Path
    renderer: Renderer
    context: int
    dtype: Literal["float32", "bfloat16"]
    size: ModelSize
    max_lora_rank: int
    has_experts: bool


def describe_models(config: BackendConfig, machine: Machine | None = None) -> dict[str, LocalModel]:
    """Find every model and its place on the machine (absent: this one); loads no weights. Raises BackendFailed."""
    if not config.models:
        raise BackendFailed("no base model is configured: give at least one --model NAME=DIRECTORY_OR_HUB_ID")
    if config.full and config.train_vision:
        raise BackendFailed(
            "--full and --train-vision exclude each other: where all weights train, the tower is frozen"
        )
    machine = machine or this_machine()
    device = chosen_device(config, machine)
    directories = {name: local_directory(source) for name, source in config.models.items()}
    found: dict[Path, FoundModel] = {}
    for name, directory in directories.items():
        if directory not in found:
            found[directory] = find(name, directory, device, config, machine)
    if config.replay_routing and not any(model.has_experts for model in found.values()):
        raise BackendFailed(
            "--replay-routing (setting backend.replay_routing): none of the models is a mixture of experts"
        )
    places = placed([*found.values()], config, machine)
    loaded = {
        directory: _describe(model, places[model.name], device, config, config.scratch_dir / str(number))
        for number, (directory, model) in enumerate(found.items())
    }
    return {
        name: replace(loaded[directory], info=replace(loaded[directory].info, name=name, source=config.models[name]))
        for name, directory in directories.items()
    }


def chosen_device(config: BackendConfig, machine: Machine) -> Device:
    """What `auto` means here."""
    return config.device if config.device != "auto" else "cuda" if machine.gpu_bytes else "cpu"


def placed(found: Sequence[FoundModel], config: BackendConfig, machine: Machine) -> dict[str, Placement]:
    """Each model's place. Raises BackendFailed where they do not all fit."""
    return place(
        [model.size for model in found],
        machine,
        chosen_device(config, machine),
        num_ranks=config.ranks,
        sampler_fraction=config.gpu_memory_fraction,
    )


def find(name: str, directory: Path, device: Device, config: BackendConfig, machine: Machine) -> FoundModel:
    """Raises BackendFailed where the files are no model that can be served."""
    source = config.models[name]
    try:
        renderer = Renderer(
            str(directory), image_cache_bytes=config.image_cache_bytes, max_image_pixels=config.max_image_pixels
        )
    except (OSError, ValueError) as error:
        raise BackendFailed(f"{source}: no usable model: {str(error).splitlines()[0]}") from None
    check_tokenizer(directory)
    numbers = check_coverage(renderer.family, renderer.config, source, train_vision=config.train_vision)
    dtype = _dtype(renderer.family, device, config, source)
    text_config = renderer.config.get_text_config()
    context = min(text_config.max_position_embeddings, config.max_context_length or LARGEST_DEFAULT_CONTEXT[device])
    check_rotation(text_config, context, source)
    two_contexts = 2 * context * kv_bytes_per_token(text_config, dtype)
    least_kv_cache = max(SMALLEST_DEFAULT_KV_CACHE, two_contexts) if device == "cpu" else LEAST_KV_CACHE_ON_CUDA
    kv_cache_bytes = config.kv_cache_bytes or least_kv_cache
    number_bytes = BYTES_PER_NUMBER[dtype]
    size = ModelSize(
        name,
        count_parameters(directory) * number_bytes,
        kv_cache_bytes,
        gathered_bytes=numbers.gathered * number_bytes,
        training_bytes=_training_bytes(numbers, number_bytes, device, source) if config.full else 0,
    )
    room = machine.main_bytes if device == "cpu" else min(machine.gpu_bytes, default=0) * config.gpu_memory_fraction
    rank_bytes = config.adapter_slots * numbers.adapter * number_bytes
    max_lora_rank = config.max_lora_rank or default_lora_rank(rank_bytes, room)
    has_experts = bool(getattr(text_config, "num_experts_per_tok", 0))
    return FoundModel(name, source, directory, renderer, context, dtype, size, max_lora_rank, has_experts)


def _training_bytes(numbers: Numbers, number_bytes: int, device: Device, source: str) -> int:
    """What training all weights takes beside the base. Raises BackendFailed for a model of which it cannot be done."""
    if numbers.stacks:
        raise BackendFailed(
            f"{source}: training all weights (setting backend.full) is supported neither of experts nor of linear"
            f" attention: {', '.join(numbers.stacks)}"
        )
    # A master, two moments and a gradient in float32, a row's gradient; and the original weights, in main memory.
    copies = 2 if device == "cpu" else 1
    return numbers.trained * (4 * 4 + copies * number_bytes)


def default_lora_rank(rank_bytes: float, room_bytes: float) -> int:
    """The largest LoRA rank whose adapters, `rank_bytes` for each rank, leave the sampler nearly all of its memory."""
    fitting = [rank for rank in DEFAULT_LORA_RANKS if rank * rank_bytes <= ADAPTERS_PART * room_bytes]
    return max(fitting, default=DEFAULT_LORA_RANKS[-1])


def _dtype(family: Family, device: Device, config: BackendConfig, source: str) -> Literal["float32", "bfloat16"]:
    """Raises BackendFailed for a precision that the engine does not have."""
    if device == "cpu" and family.has_linear_attention:
        if config.dtype == "float32":
            raise BackendFailed(
                f"{source}: on the CPU the engine has linear attention in bfloat16 alone; leave dtype at auto"
            )
        return "bfloat16"
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _describe(
    model: FoundModel, placement: Placement, device: Device, config: BackendConfig, scratch: Path
) -> LocalModel:
    routing_dir = _routing_dir(scratch) if config.replay_routing and model.has_experts else None
    sampler_config = _sampler_config(model, placement, device, config, scratch)
    sampler = SamplerClient(replace(sampler_config, routing_dir=routing_dir))
    trainer_config = replace(_trainer_config(model, placement, device, config), routing_dir=routing_dir)
    trainer = TrainerClient(trainer_config, num_ranks=config.ranks)
    info = BaseModelInfo(
        name=model.name,
        source=model.source,
        fingerprint=fingerprint(model.directory),
        arch=model.renderer.config.model_type,
        vocab_size=model.renderer.vocab_size,
        max_context_length=model.context,
        takes_images=model.renderer.takes_images,
        max_lora_rank=model.max_lora_rank,
        trains_vision=config.train_vision and model.renderer.takes_images,
        full=config.full,
        numerics=_numerics(trainer_config, config.ranks),
    )
    answers_stable_reinforce = config.stable_reinforce is not None
    return LocalModel(
        info,
        trainer,
        sampler,
        model.renderer,
        config.max_images_per_prompt,
        placement,
        TokenTexts(model.directory),
        model.size.weight_bytes,
        answers_stable_reinforce,
    )


def _routing_dir(scratch: Path) -> Path:
    """Beside the sampler's own directory, which it empties when it starts."""
    return scratch.with_name(f"{scratch.name}-routing").absolute()


def _numerics(config: TrainerConfig, num_ranks: int) -> dict[str, str]:
    """What a change of which may change the last bits of a result."""
    values = {
        "device": config.device,
        "dtype": config.dtype,
        "ranks": num_ranks,
        "max_tokens_per_microbatch": config.max_tokens_per_microbatch,
        "gpu_memory_bytes": config.gpu_memory_bytes,
        "replay_routing": config.routing_dir is not None,
    }
    return {name: str(value) for name, value in values.items()} | {name: version(name) for name in _COMPUTING}


def _trainer_config(model: FoundModel, placement: Placement, device: Device, config: BackendConfig) -> TrainerConfig:
    return TrainerConfig(
        name=model.name,
        source=str(model.directory),
        device=device,
        dtype=model.dtype,
        max_context_length=model.context,
        max_lora_rank=model.max_lora_rank,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch or DEFAULT_MICROBATCH_TOKENS[device],
        image_cache_bytes=config.image_cache_bytes,
        max_image_pixels=config.max_image_pixels,
        gpus=placement.gpus,
        gpu_memory_fraction=placement.trainer_fraction,
        # On a CPU a full row is no faster than two, and a model's numbers then do not depend on others' at all.
        shares_rows=device == "cuda" and not config.full,
        gpu_memory_bytes=placement.trainer_bytes,
        stable_reinforce=config.stable_reinforce,
        train_vision=config.train_vision,
        full=config.full,
    )


def _sampler_config(
    model: FoundModel, placement: Placement, device: Device, config: BackendConfig, scratch: Path
) -> SamplerConfig:
    return SamplerConfig(
        name=model.name,
        source=str(model.directory),
        device=device,
        dtype=model.dtype,
        max_context_length=model.context,
        max_lora_rank=model.max_lora_rank,
        max_concurrent_samples=config.max_concurrent_samples,
        adapter_slots=config.adapter_slots,
        max_images_per_prompt=config.max_images_per_prompt,
        gpu_memory_fraction=placement.sampler_fraction,
        kv_cache_bytes=model.size.kv_cache_bytes if device == "cpu" else config.kv_cache_bytes,
        image_cache_bytes=config.image_cache_bytes,
        max_image_pixels=config.max_image_pixels,
        scratch_dir=scratch,
        silence_s=SAMPLER_SILENCE_S[device],
        gpus=placement.gpus,
        train_vision=config.train_vision,
        full=config.full,
    )
