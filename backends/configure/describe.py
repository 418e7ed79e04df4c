"""Find the configured base models, check that they can be served here, and make their specs. Loads no weights."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from transformers import PretrainedConfig

from backends.config import BackendConfig
from backends.configure.memory_plan import Demand, Machine, MemoryPlan, ModelSize
from backends.configure.nearest_fit import idle_gpus, plan_or_suggest
from backends.configure.placement import CONTEXTS, LORA_RANKS, MICROBATCH_TOKENS, MOST_MODELS, placement, this_machine
from backends.families import deepseek_v3, gpt_oss, nemotron_h
from backends.families.coverage import Numbers, check_coverage, decoder_linears, image_token
from backends.families.family import Family
from backends.families.rotation import check_rotation
from backends.formats import block_fp8
from backends.formats.model_files import (
    BYTES_PER_NUMBER,
    check_tokenizer,
    count_parameters,
    fingerprint,
    head_width,
    kv_bytes_per_token,
    linear_attention,
    local_directory,
    quantisation,
    state_bytes_per_sequence,
    tensor_layouts,
)
from backends.inputs.rendering import Renderer
from backends.model_spec import Device, Dtype, Mesh, ModelSpec
from backends.protocol import BackendFailed
from backends.trainer.lora.packed_fp8 import packed_bytes
from backends.trainer.model.sample_chunks import CHUNK

SAMPLER_SILENCE_S = {"cpu": 600, "cuda": 180}
"""The longest step computes 4096 tokens of prompts on a slow CPU, or waits for kernels to be built on CUDA."""
log = logging.getLogger(__name__)
_ADAPTER_NUMBER_BYTES = 4
_DIVIDED = {
    "num_attention_heads": "heads",
    "intermediate_size": "inner numbers of an MLP",
    "moe_intermediate_size": "inner numbers of an expert",
    "shared_expert_intermediate_size": "inner numbers of a shared expert",
    "moe_shared_expert_intermediate_size": "inner numbers of a shared expert",
    "linear_num_key_heads": "heads of keys in linear attention",
    "linear_num_value_heads": "heads of values in linear attention",
    "mamba_num_heads": "heads of Mamba2",
    "n_groups": "groups of Mamba2",
}
"""Counts in a config that the ranks of an engine divide."""
_COMPUTING = ("torch", "transformers", "tinker-server")
"""Packages on which the numbers of training depend."""


@dataclass(frozen=True)
class FoundModel:
    """A model whose files can be served here."""

    spec: ModelSpec
    renderer: Renderer
    size: ModelSize
    demand: Demand | None = None
    """What memory is planned for; None before the plan."""


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
    plan, placed, idle = planned([*found.values()], config, machine)
    for line in plan.lines():
        log.info("%s", line)
    if idle is not None:
        log.warning("%s", idle)
    found = dict(zip(found, placed, strict=True))
    return {
        name: replace(model := found[directory], spec=replace(model.spec, name=name, source=config.models[name]))
        for name, directory in directories.items()
    }


def chosen_device(config: BackendConfig, machine: Machine) -> Device:
    """Return the device; `auto` is CUDA if there is a GPU."""
    return config.device if config.device != "auto" else "cuda" if machine.gpu_bytes else "cpu"


def planned(
    found: Sequence[FoundModel], config: BackendConfig, machine: Machine
) -> tuple[MemoryPlan, list[FoundModel], str | None]:
    """Return the plan of all models, the models with what it has chosen for them, and a sentence about GPUs that would
    be idle. Raises BackendFailed, with the nearest settings that fit, if they do not all fit."""
    sizes, device = [one.size for one in found], chosen_device(config, machine)
    plan = plan_or_suggest(sizes, config, machine, device)
    placed = [replace(one, spec=_placed(one, plan, config), demand=plan.demands[one.spec.name]) for one in found]
    return plan, placed, idle_gpus(plan, config)


def _placed(model: FoundModel, plan: MemoryPlan, config: BackendConfig) -> ModelSpec:
    name = model.spec.name
    demand, layout = plan.demands[name], plan.layouts[name]
    on_cpu = plan.device == "cpu"
    num_ranks, tensor_parallel = len(layout.trainer), len(layout.engines[0])
    cache_on_cpu = model.size.kv_cache_bytes(demand.context, tensor_parallel, "cpu") if on_cpu else None
    if config.base_precision is not None and num_ranks > 1:
        raise BackendFailed(
            f"{model.spec.source}: base_precision {config.base_precision} (setting backend.base_precision) is not"
            f" supported on {num_ranks} ranks; set backend.ranks to 1, or leave base_precision out"
        )
    spec = replace(
        model.spec,
        max_context_length=demand.context,
        max_lora_rank=demand.lora_rank,
        adapter_slots=demand.adapter_slots,
        tensor_parallel=tensor_parallel,
        kv_cache_bytes=config.kv_cache_bytes or cache_on_cpu,
        base_copies=1 if plan.holds(name) or (on_cpu and config.base_copies == 1) else 2,
        placement=placement(plan, name),
        mesh=replace(Mesh(num_ranks) if layout.replicates else Mesh(shard=num_ranks), context=demand.context_parallel),
    )
    return replace(spec, numerics=_numerics(spec))


def find(name: str, directory: Path, config: BackendConfig, machine: Machine, *, number: int = 0) -> FoundModel:
    """Read a model's files; `number` tells its directories from other models'. Raises BackendFailed for files that are
    no model that can be served."""
    source, device = config.models[name], chosen_device(config, machine)
    renderer, size = read_size(name, directory, config, device)
    text_config, numbers = renderer.config.get_text_config(), size.numbers
    count_parameters(directory)  # refuses a directory without weights
    block_fp8.check_files(directory, source)
    if config.base_precision == "fp8":
        size = _packed(size, directory, renderer, source)
    scratch_dir = config.scratch_dir / str(number)
    replays_routing = config.replay_routing and bool(getattr(text_config, "num_experts_per_tok", 0))
    spec = ModelSpec(
        across_dtype=config.cluster_gradients,
        name=name,
        source=source,
        directory=str(directory),
        fingerprint=fingerprint(directory),
        arch=renderer.config.model_type,
        vocab_size=renderer.vocab_size,
        takes_images=renderer.takes_images,
        device=device,
        dtype=_dtype(renderer.family, device, config, source),
        weight_bytes=size.base_bytes,
        is_quantised=quantisation(renderer.config) is not None,
        base_precision=config.base_precision,
        max_context_length=min(size.longest_context, _longest_context(config, device)),
        max_lora_rank=config.max_lora_rank or LORA_RANKS[0],
        adapter_bytes=_ADAPTER_NUMBER_BYTES * numbers.adapter,
        adapter_matrices=sum(one.count for one in numbers.matrices),
        trains_vision=config.train_vision and renderer.takes_images,
        full=config.full,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch or MICROBATCH_TOKENS[device],
        # On a CPU a full microbatch is no faster than two, and a model's numbers then do not depend on others' at all.
        shares_microbatches=device == "cuda" and not config.full,
        stable_reinforce=config.stable_reinforce,
        max_concurrent_samples=config.max_concurrent_samples,
        adapter_slots=config.adapter_slots or MOST_MODELS,
        tensor_parallel=config.tensor_parallel or 1,
        max_images_per_prompt=config.max_images_per_prompt,
        image_cache_bytes=config.image_cache_bytes,
        max_image_pixels=config.max_image_pixels,
        kv_cache_bytes=config.kv_cache_bytes,
        silence_s=SAMPLER_SILENCE_S[device],
        scratch_dir=scratch_dir,
        compiled_dir=(config.scratch_dir / "compiled").absolute(),
        # Beside the sampler's own directory, which it empties when it starts.
        routing_dir=scratch_dir.with_name(f"{number}-routing").absolute() if replays_routing else None,
    )
    return FoundModel(spec, renderer, size)


def read_size(name: str, directory: Path, config: BackendConfig, device: Device) -> tuple[Renderer, ModelSize]:
    """Return a model's renderer and shapes, from all of its files but the weights. Raises BackendFailed for a model
    that cannot be served."""
    source = config.models[name]
    renderer = _renderer(directory, config, source)
    numbers = check_coverage(renderer.family, renderer.config, source, train_vision=config.train_vision)
    dtype = _dtype(renderer.family, device, config, source)
    text_config = renderer.config.get_text_config()
    _check_tensor_parallel(renderer, config, source)
    _check_context_parallel(renderer, config, source)
    _check_base_copies(renderer, config, device, source)
    _check_base_precision(renderer, config, source)
    if config.replay_routing and renderer.config.architectures == [nemotron_h.ARCHITECTURE]:
        raise BackendFailed(
            f"{source}: --replay-routing (setting backend.replay_routing) is not supported: nobody has compared"
            f" replayed routers of {nemotron_h.ARCHITECTURE} with its engine; leave it off"
        )
    is_quantised = quantisation(renderer.config) is not None
    is_proved = dtype == "bfloat16" and not config.cluster and not is_quantised and _has_shared(renderer)
    longest = min(text_config.max_position_embeddings, _longest_context(config, device))
    check_rotation(text_config, longest, source)
    if config.full:
        _check_full(numbers, renderer.family, source, is_quantised=is_quantised)
    return renderer, replace(
        model_size(name, renderer.config, numbers, dtype),
        can_be_captured=renderer.config.architectures != [nemotron_h.ARCHITECTURE],
        trains_all=config.full,
        can_be_shared=_unshared(renderer, config, device) is None and (config.base_copies == 1 or is_proved),
        tensor_parallels=tuple(one for one in range(1, 65) if _undivided(renderer, config, one) is None),
        context_parallels=tuple(one for one in range(1, 65) if _unsliced(renderer, config, one) is None),
    )


def _has_shared(renderer: Renderer) -> bool:
    """Return whether a model of this kind has been seen to share one copy of its base on a GPU."""
    family, (architecture, *_) = renderer.family, renderer.config.architectures or [""]
    return not (family.has_linear_attention or family.sees_whole_images or architecture == deepseek_v3.ARCHITECTURE)


def _longest_context(config: BackendConfig, device: Device) -> int:
    """Return the longest context that a plan may have, whatever the model's own limit."""
    return config.max_context_length or CONTEXTS[device][0]


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


def model_size(name: str, config: PretrainedConfig, numbers: Numbers, dtype: Dtype) -> ModelSize:
    """Return the shapes that a model's memory follows from."""
    text_config = config.get_text_config()
    return ModelSize(
        name,
        BYTES_PER_NUMBER[dtype],
        numbers,
        hidden=text_config.hidden_size,
        num_layers=text_config.num_hidden_layers,
        vocab_size=text_config.vocab_size,
        layer_token_bytes=_layer_token_bytes(text_config, BYTES_PER_NUMBER[dtype]),
        kv_token_bytes=kv_bytes_per_token(text_config, dtype),
        key_heads=text_config.num_key_value_heads,
        state_bytes=state_bytes_per_sequence(text_config, dtype),
        image_token=image_token(config, BYTES_PER_NUMBER[dtype]),
        exchanged_token_bytes=_exchanged_token_bytes(text_config, BYTES_PER_NUMBER[dtype]),
        longest_context=text_config.max_position_embeddings,
    )


def _layer_token_bytes(text_config: PretrainedConfig, number_bytes: int) -> float:
    """Estimate the bytes that a layer saves of a token: its input in float32, the norms' outputs, queries, keys, values
    and attention's output, gate and up. 73.0 KiB for 4 billion parameters, where 73.7 were measured on an H200.

    Where layers have Mamba2, attention, an MLP or experts alone, it is the most that one of them saves."""
    hidden = text_config.hidden_size
    heads, key_heads = text_config.num_attention_heads, text_config.num_key_value_heads
    attention = 2 * (heads + key_heads) * head_width(text_config)
    if chosen := getattr(text_config, "num_experts_per_tok", 0):
        # Of each (token, expert) pair the input, gate, up, their product, and the output.
        inner = getattr(text_config, "moe_intermediate_size", None) or text_config.intermediate_size
        mlp = chosen * (2 * hidden + 3 * inner) + 2 * _shared_expert_width(text_config, inner)
    else:
        mlp = 2 * text_config.intermediate_size
    if getattr(text_config, "mamba_num_heads", None) is None:
        return float(number_bytes * (attention + mlp + hidden) + 4 * hidden)
    shape = linear_attention(text_config)
    # In float32: values four times, three matrices of a chunk, and two states of each chunk.
    scan = 4 * (4 * shape.values + 3 * shape.heads * CHUNK + 2 * shape.values * shape.key_width // CHUNK)
    mamba2 = number_bytes * 2 * (shape.values + shape.channels) + scan
    return float(max(mamba2, number_bytes * max(attention, mlp)) + number_bytes * hidden + 4 * hidden)


def _shared_expert_width(text_config: PretrainedConfig, inner: int) -> int:
    """Return the inner numbers of the experts that all tokens pass; `inner` are those of another expert."""
    for name in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        if width := getattr(text_config, name, 0):
            return int(width)
    return inner * int(getattr(text_config, "n_shared_experts", 0) or 0)


def _exchanged_token_bytes(text_config: PretrainedConfig, number_bytes: int) -> int:
    """Estimate the bytes of queries, keys, values and attention's output of a token, sent and received."""
    heads, key_heads = text_config.num_attention_heads, text_config.num_key_value_heads
    return int(2 * 2 * (heads + key_heads) * head_width(text_config) * number_bytes)


def _check_full(numbers: Numbers, family: Family, source: str, *, is_quantised: bool) -> None:
    """Raise BackendFailed for models that do not train all weights."""
    if family.sees_whole_images:
        raise BackendFailed(
            f"{source}: training all weights (setting backend.full) of a model whose images' tokens see each other is"
            " not supported: nobody has compared its trainer and its engine; train adapters"
        )
    if is_quantised:
        raise BackendFailed(
            f"{source}: training all weights (setting backend.full) of a quantised base is not supported: what is"
            " trained is in full precision, and its config would say otherwise; serve the model's files in bfloat16"
        )
    if numbers.stacks:
        raise BackendFailed(
            f"{source}: training all weights (setting backend.full) is supported neither of experts nor of linear"
            f" attention: {', '.join(numbers.stacks)}"
        )


def _check_tensor_parallel(renderer: Renderer, config: BackendConfig, source: str) -> None:
    """Raise BackendFailed for a model that an engine of so many ranks would compute wrongly, or not at all."""
    size = config.tensor_parallel or 1
    if (reason := _undivided(renderer, config, size)) is not None:
        raise BackendFailed(
            f"{source}: tensor_parallel {size} (setting backend.tensor_parallel) is not supported: {reason}; set it to"
            " 1, and backend.engines to the number of GPUs to sample on"
        )


def _undivided(renderer: Renderer, config: BackendConfig, size: int) -> str | None:
    """Return the reason why an engine of so many ranks cannot have a model, or None."""
    if size == 1:
        return None
    if config.full:
        return "with backend.full an engine takes whole models, which is not supported by ranks"
    text_config = renderer.config.get_text_config()
    for field, what in _DIVIDED.items():
        count = getattr(text_config, field, None) or 0
        if count % size:
            return f"its {count} {what} cannot be divided evenly"
    key_heads = text_config.num_key_value_heads
    can_repeat = size % key_heads == 0 and renderer.config.model_type != gpt_oss.MODEL_TYPE
    if key_heads % size and not can_repeat:
        return f"its key heads ({key_heads}) can be neither divided nor repeated evenly"
    return None


def _check_context_parallel(renderer: Renderer, config: BackendConfig, source: str) -> None:
    """Raise BackendFailed for a model whose microbatches so many ranks cannot compute together."""
    size = config.context_parallel
    if (reason := _unsliced(renderer, config, size)) is not None:
        raise BackendFailed(
            f"{source}: context_parallel {size} (setting backend.context_parallel) is not supported: {reason}"
        )


def _unsliced(renderer: Renderer, config: BackendConfig, size: int) -> str | None:
    """Return the reason why so many ranks cannot compute slices of a microbatch, or None."""
    text_config = renderer.config.get_text_config()
    if size == 1:
        return None
    if config.full:
        return "with backend.full each rank has samples of its own; set it to 1"
    heads = {"heads": text_config.num_attention_heads}
    if renderer.family.has_linear_attention:
        shape = linear_attention(text_config)
        heads |= {"heads of linear attention": shape.heads, "channels": shape.channels}
    for what, count in heads.items():
        if count % size:
            return f"its {count} {what} cannot be divided evenly; set it to a divisor of {count}"
    return None


def _check_base_copies(renderer: Renderer, config: BackendConfig, device: Device, source: str) -> None:
    """Raise BackendFailed if one copy is asked for and cannot be."""
    reason = _unshared(renderer, config, device)
    if config.base_copies == 1 and reason is not None:
        raise BackendFailed(
            f"{source}: base_copies 1 (setting backend.base_copies) is not supported: {reason}; set it to 2"
        )


def _unshared(renderer: Renderer, config: BackendConfig, device: Device) -> str | None:
    """Return the reason why trainer and engine cannot share one copy of a base, or None."""
    if config.full:
        return "with backend.full the trainer changes its own copy"
    if config.base_precision is not None:
        return f"with backend.base_precision {config.base_precision} the trainer has the base otherwise than the engine"
    if (config.tensor_parallel or 1) > 1:
        return f"with backend.tensor_parallel {config.tensor_parallel} no GPU has the whole base"
    if renderer.config.model_type == gpt_oss.MODEL_TYPE:
        return "trainer and engine lay out gpt-oss's experts anew, and otherwise than its files"
    if renderer.config.architectures == [nemotron_h.ARCHITECTURE]:
        return "the engine has other numbers for Mamba2 than its files, and nobody has compared one copy"
    if device == "cpu" and renderer.family.has_linear_attention:
        return "on the CPU the engine packs the weights of linear attention anew"
    return None


def _check_base_precision(renderer: Renderer, config: BackendConfig, source: str) -> None:
    """Raise BackendFailed if the base is to stay in fp8 and was not seen to train so."""
    text_config, reason = renderer.config.get_text_config(), None
    if config.base_precision is None:
        return
    if quantisation(renderer.config) is None or renderer.config.model_type == gpt_oss.MODEL_TYPE:
        reason = "its files are not in fp8 by blocks, and the engine would sample from other numbers than are trained"
    elif getattr(text_config, "num_experts_per_tok", 0):
        reason = "experts are not kept in fp8"
    elif renderer.family.has_linear_attention:
        reason = "it has not been compared with linear attention"
    elif config.train_vision:
        reason = "it has not been compared with backend.train_vision"
    elif config.cluster:
        reason = "it has not been compared on several machines"
    if reason is not None:
        raise BackendFailed(
            f"{source}: base_precision {config.base_precision} (setting backend.base_precision) is not supported:"
            f" {reason}; leave it out"
        )


def _packed(size: ModelSize, directory: Path, renderer: Renderer, source: str) -> ModelSize:
    """Return the size of a base whose linears stay in fp8 in a trainer."""
    linears = decoder_linears(renderer.family, renderer.config, source)
    layouts = tensor_layouts(directory)
    shapes = [shape for name, shape in linears.items() if f"{name}{block_fp8.SCALE}" in layouts]
    num_bytes = sum(packed_bytes(*shape) for shape in shapes)
    return replace(size, packed_numbers=sum(rows * columns for rows, columns in shapes), packed_bytes=num_bytes)


def _dtype(family: Family, device: Device, config: BackendConfig, source: str) -> Dtype:
    """Choose the precision. Raises BackendFailed for one that the engine does not have."""
    if device == "cpu" and family.needs_bfloat16_on_cpu:
        if config.dtype == "float32":
            raise BackendFailed(
                f"{source}: on the CPU the engine has its linear attention in bfloat16 alone; leave dtype at auto"
            )
        return "bfloat16"
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _numerics(spec: ModelSpec) -> dict[str, str]:
    """Return what may change the last bits of a result when it changes."""
    values = {
        "device": spec.device,
        "dtype": spec.dtype,
        "max_tokens_per_microbatch": spec.max_tokens_per_microbatch,
        "gpu_memory_bytes": spec.placement.trainer_bytes,
        "replay_routing": spec.routing_dir is not None,
    }
    if spec.mesh.context > 1:
        values["context_parallel"] = spec.mesh.context
    return {name: str(value) for name, value in values.items()} | {name: version(name) for name in _COMPUTING}
