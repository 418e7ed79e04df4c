"""Find the configured base models, check that they can be served here, and make their specs. Loads no weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from backends.config import BackendConfig
from backends.configure.placement import Machine, ModelSize, Parts, place, this_machine
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
from backends.inputs.rendering import Renderer
from backends.model_spec import Device, Dtype, Mesh, ModelSpec, Placement
from backends.protocol import BackendFailed

LARGEST_DEFAULT_CONTEXT = {"cpu": 8192, "cuda": 32768}
DEFAULT_MICROBATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
DEFAULT_LORA_RANKS = (128, 64, 32, 16, 8)
ADAPTERS_PART = 0.1
"""Part of the sampler's memory that its adapters may take by default."""
SMALLEST_DEFAULT_KV_CACHE = 512 << 20
SAMPLER_SILENCE_S = {"cpu": 600, "cuda": 180}
"""The longest step computes 4096 tokens of prompts on a slow CPU, or waits for kernels to be built on CUDA."""
LEAST_KV_CACHE_ON_CUDA = 1 << 30
"""Least KV cache if no size is set, and the cache takes what is left."""
_COMPUTING = ("torch", "transformers", "tinker-server")
"""Packages on which the numbers of training depend."""


@dataclass(frozen=True)
class FoundModel:
    """A model whose files can be served here."""

    spec: ModelSpec
    renderer: Renderer
    size: ModelSize


def describe_models(config: BackendConfig, machine: Machine | None = None) -> dict[str, FoundModel]:
    """Find every model and its place on the machine (absent: this one); loads no weights. Raises BackendFailed.

    Names that share a directory share all but name and source.
    """
    if not config.models:
        raise BackendFailed("no base model is configured: give at least one --model NAME=DIRECTORY_OR_HUB_ID")
    if config.full and config.train_vision:
        raise BackendFailed(
            "--full and --train-vision exclude each other: where all weights train, the tower is frozen"
        )
    machine = machine or this_machine()
    directories = {name: local_directory(source) for name, source in config.models.items()}
    found: dict[Path, FoundModel] = {}
    for name, directory in directories.items():
        if directory not in found:
            found[directory] = find(name, directory, config, machine, number=len(found))
    if config.replay_routing and all(model.spec.routing_dir is None for model in found.values()):
        raise BackendFailed(
            "--replay-routing (setting backend.replay_routing): none of the models is a mixture of experts"
        )
    placements = placed([*found.values()], config, machine)
    for directory, model in found.items():
        spec = replace(model.spec, placement=placements[model.spec.name])
        spec = replace(spec, mesh=_mesh(spec, config.ranks))
        found[directory] = replace(model, spec=replace(spec, numerics=_numerics(spec)))
    return {
        name: replace(model := found[directory], spec=replace(model.spec, name=name, source=config.models[name]))
        for name, directory in directories.items()
    }


def chosen_device(config: BackendConfig, machine: Machine) -> Device:
    """Return the device; `auto` is CUDA if there is a GPU."""
    return config.device if config.device != "auto" else "cuda" if machine.gpu_bytes else "cpu"


def placed(found: Sequence[FoundModel], config: BackendConfig, machine: Machine) -> dict[str, Placement]:
    """Return each model's placement. Raises BackendFailed if they do not all fit."""
    return place(
        [model.size for model in found],
        machine,
        chosen_device(config, machine),
        Parts(config.ranks, config.gpu_memory_fraction, config.engines, config.tensor_parallel),
    )


def find(name: str, directory: Path, config: BackendConfig, machine: Machine, *, number: int = 0) -> FoundModel:
    """Read a model's files; `number` tells its directories from other models'. Raises BackendFailed for files that are
    no model that can be served."""
    source, device = config.models[name], chosen_device(config, machine)
    renderer = _renderer(directory, config, source)
    numbers = check_coverage(renderer.family, renderer.config, source, train_vision=config.train_vision)
    dtype = _dtype(renderer.family, device, config, source)
    number_bytes = BYTES_PER_NUMBER[dtype]
    text_config = renderer.config.get_text_config()
    _check_tensor_parallel(renderer, config, source)
    _check_base_copies(renderer, config, device, source)
    context = min(text_config.max_position_embeddings, config.max_context_length or LARGEST_DEFAULT_CONTEXT[device])
    check_rotation(text_config, context, source)
    two_contexts = 2 * context * kv_bytes_per_token(text_config, dtype)
    least_kv_cache = max(SMALLEST_DEFAULT_KV_CACHE, two_contexts) if device == "cpu" else LEAST_KV_CACHE_ON_CUDA
    size = ModelSize(
        name,
        count_parameters(directory) * number_bytes,
        config.kv_cache_bytes or least_kv_cache,
        gathered_bytes=numbers.all_gathered * number_bytes,
        training_bytes=_training_bytes(numbers, number_bytes, device, source) if config.full else 0,
    )
    rank_bytes = config.adapter_slots * numbers.adapter * number_bytes
    scratch_dir = config.scratch_dir / str(number)
    replays_routing = config.replay_routing and bool(getattr(text_config, "num_experts_per_tok", 0))
    spec = ModelSpec(
        name=name,
        source=source,
        directory=str(directory),
        fingerprint=fingerprint(directory),
        arch=renderer.config.model_type,
        vocab_size=renderer.vocab_size,
        takes_images=renderer.takes_images,
        device=device,
        dtype=dtype,
        weight_bytes=size.weight_bytes,
        max_context_length=context,
        max_lora_rank=config.max_lora_rank or default_lora_rank(rank_bytes, _sampler_room(device, config, machine)),
        trains_vision=config.train_vision and renderer.takes_images,
        full=config.full,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch or DEFAULT_MICROBATCH_TOKENS[device],
        # On a CPU a full microbatch is no faster than two, and a model's numbers then do not depend on others' at all.
        shares_microbatches=device == "cuda" and not config.full,
        stable_reinforce=config.stable_reinforce,
        max_concurrent_samples=config.max_concurrent_samples,
        adapter_slots=config.adapter_slots,
        tensor_parallel=config.tensor_parallel,
        base_copies=config.base_copies,
        max_images_per_prompt=config.max_images_per_prompt,
        image_cache_bytes=config.image_cache_bytes,
        max_image_pixels=config.max_image_pixels,
        kv_cache_bytes=size.kv_cache_bytes if device == "cpu" else config.kv_cache_bytes,
        silence_s=SAMPLER_SILENCE_S[device],
        scratch_dir=scratch_dir,
        # Beside the sampler's own directory, which it empties when it starts.
        routing_dir=scratch_dir.with_name(f"{number}-routing").absolute() if replays_routing else None,
    )
    return FoundModel(spec, renderer, size)


def _renderer(directory: Path, config: BackendConfig, source: str) -> Renderer:
    """Raises BackendFailed if config, tokenizer or processor cannot be used."""
    try:
        renderer = Renderer(
            str(directory), image_cache_bytes=config.image_cache_bytes, max_image_pixels=config.max_image_pixels
        )
    except (OSError, ValueError) as error:
        raise BackendFailed(f"{source}: no usable model: {str(error).splitlines()[0]}") from None
    check_tokenizer(directory)
    return renderer


def _sampler_room(device: Device, config: BackendConfig, machine: Machine) -> float:
    """Return the bytes that samplers may fill."""
    if device == "cpu":
        return machine.main_bytes
    return min(machine.gpu_bytes, default=0) * config.gpu_memory_fraction


def _training_bytes(numbers: Numbers, number_bytes: int, device: Device, source: str) -> int:
    """Return the bytes that training all weights takes beside the base. Raises BackendFailed for unsupported models."""
    if numbers.stacks:
        raise BackendFailed(
            f"{source}: training all weights (setting backend.full) is supported neither of experts nor of linear"
            f" attention: {', '.join(numbers.stacks)}"
        )
    # A master, two moments and a gradient in float32, a microbatch's gradient; the original weights, in main memory.
    copies = 2 if device == "cpu" else 1
    return numbers.trained * (4 * 4 + copies * number_bytes)


def default_lora_rank(rank_bytes: float, room_bytes: float) -> int:
    """Return the largest LoRA rank whose adapters leave the sampler nearly all of its memory; all slots together take
    `rank_bytes` for each unit of rank."""
    fitting = [rank for rank in DEFAULT_LORA_RANKS if rank * rank_bytes <= ADAPTERS_PART * room_bytes]
    return max(fitting, default=DEFAULT_LORA_RANKS[-1])


def _check_tensor_parallel(renderer: Renderer, config: BackendConfig, source: str) -> None:
    """Raise BackendFailed for a model that an engine of several ranks would compute wrongly, or not at all."""
    size = config.tensor_parallel
    if size == 1:
        return
    text_config = renderer.config.get_text_config()
    num_heads, num_kv_heads = text_config.num_attention_heads, text_config.num_key_value_heads
    reason = None
    if getattr(text_config, "num_experts_per_tok", 0):
        reason = "vLLM 0.32 gives ranks wrong parts of a mixture's adapters where its experts are padded"
    elif renderer.family.has_linear_attention:
        reason = "adapters of linear attention are not compared with their files there"
    elif config.full:
        reason = "with backend.full an engine takes whole models, which is not supported by ranks"
    elif num_heads % size or num_kv_heads % size:
        reason = f"its {num_heads} heads with {num_kv_heads} of keys cannot be divided evenly"
    if reason is not None:
        raise BackendFailed(
            f"{source}: tensor_parallel {size} (setting backend.tensor_parallel) is not supported: {reason}; set it to"
            " 1, and backend.engines to the number of GPUs to sample on"
        )


def _check_base_copies(renderer: Renderer, config: BackendConfig, device: Device, source: str) -> None:
    """Raise BackendFailed for a base of which trainer and engine cannot share one copy."""
    if config.base_copies == 2:
        return
    reason = None
    if config.full:
        reason = "with backend.full the trainer changes its own copy"
    elif config.tensor_parallel > 1:
        reason = f"with backend.tensor_parallel {config.tensor_parallel} no GPU has the whole base"
    elif device == "cpu" and renderer.family.has_linear_attention:
        reason = "on the CPU the engine packs the weights of linear attention anew"
    if reason is not None:
        raise BackendFailed(
            f"{source}: base_copies 1 (setting backend.base_copies) is not supported: {reason}; set it to 2"
        )


def _dtype(family: Family, device: Device, config: BackendConfig, source: str) -> Dtype:
    """Choose the precision. Raises BackendFailed for one that the engine does not have."""
    if device == "cpu" and family.has_linear_attention:
        if config.dtype == "float32":
            raise BackendFailed(
                f"{source}: on the CPU the engine has linear attention in bfloat16 alone; leave dtype at auto"
            )
        return "bfloat16"
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _mesh(spec: ModelSpec, num_ranks: int) -> Mesh:
    """Give each rank the whole base where that leaves as much memory for microbatches, or takes none of its own."""
    fits_whole = spec.base_copies == 1 or (not spec.full and 2 * spec.weight_bytes <= spec.placement.trainer_bytes)
    return Mesh(replicate=num_ranks) if fits_whole else Mesh(shard=num_ranks)


def _numerics(spec: ModelSpec) -> dict[str, str]:
    """Return what may change the last bits of a result when it changes."""
    values = {
        "device": spec.device,
        "dtype": spec.dtype,
        "ranks": spec.mesh.size,
        "max_tokens_per_microbatch": spec.max_tokens_per_microbatch,
        "gpu_memory_bytes": spec.placement.trainer_bytes,
        "replay_routing": spec.routing_dir is not None,
    }
    return {name: str(value) for name, value in values.items()} | {name: version(name) for name in _COMPUTING}
