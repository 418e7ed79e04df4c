"""Find the configured base models, check that they can be served here, and make their specs. Loads no weights."""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.asked_gpus import require_for_cluster
from tinker_server.backends.configure.fp8_parts import Fp8Parts
from tinker_server.backends.configure.memory_plan import Demand, Machine, MemoryPlan, total_rank
from tinker_server.backends.configure.model_size import ModelSize, model_size
from tinker_server.backends.configure.nearest_fit import idle_gpus, plan_or_suggest
from tinker_server.backends.configure.placement import (
    CONTEXTS,
    LORA_RANKS,
    MICROBATCH_TOKENS,
    MOST_MODELS,
    placement,
    this_machine,
)
from tinker_server.backends.configure.supported import Support
from tinker_server.backends.families.coverage import check_coverage, find_packed, fp8_matrices
from tinker_server.backends.families.rotation import check_rotation
from tinker_server.backends.formats import block_fp8
from tinker_server.backends.formats.base_files import text_files
from tinker_server.backends.formats.model_files import (
    check_tokenizer,
    fingerprint,
    local_directory,
    quantisation,
)
from tinker_server.backends.formats.packed import byte_shape
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import Device, Mesh, ModelSpec
from tinker_server.backends.protocol import NO_RUNS, BackendFailed, OwnLayout

SAMPLER_SILENCE_S = {"cpu": 600, "cuda": 180}
"""The longest step computes 4096 tokens of prompts on a slow CPU, or waits for kernels to be built on CUDA."""
log = logging.getLogger(__name__)
MADE_FP8 = "the files are not in fp8: trainer and engine quantise linears and experts as they read them"
_ADAPTER_NUMBER_BYTES = 4
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


def describe_models(
    config: BackendConfig, machine: Machine | None = None, own: OwnLayout = NO_RUNS
) -> dict[str, FoundModel]:
    """Find every model and its place on the machine (absent: this one); loads no weights. Raises BackendFailed.

    Names that share a directory share all but name and source. `own`: models with runs or weights of the layout `own`,
    for which engines need slots.
    """
    if not config.models:
        raise BackendFailed("no base model is configured: give at least one --model NAME=DIRECTORY_OR_HUB_ID")
    require_for_cluster(config)
    machine = machine or this_machine()
    directories = {name: local_directory(source) for name, source in config.models.items()}
    found: dict[Path, FoundModel] = {}
    for name, directory in directories.items():
        if directory not in found:
            found[directory] = find(name, directory, config, machine, number=len(found))
        found[directory] = with_slots_for(found[directory], name, own)
    require_mixture(found.values(), config)
    plan, placed, idle = plan_models([*found.values()], config, machine)
    for line in plan.lines():
        log.info("%s", line)
    if idle is not None:
        log.warning("%s", idle)
    found = dict(zip(found, placed, strict=True))
    return {
        name: replace(model := found[directory], spec=replace(model.spec, name=name, source=config.models[name]))
        for name, directory in directories.items()
    }


def require_mixture(found: Iterable[FoundModel], config: BackendConfig) -> None:
    """Raise BackendFailed where experts' choices are to be replayed, and no model has any."""
    if config.replay_routing and all(model.spec.routing_dir is None for model in found):
        raise BackendFailed(
            "--replay-routing (setting backend.replay_routing): none of the models is a mixture of experts"
        )


def with_slots_for(model: FoundModel, name: str, own: OwnLayout) -> FoundModel:
    """Return a model whose engines take the runs and weights of `name`, too."""
    spec, size = model.spec, model.size
    if name in own.experts and spec.expert_slots != "own":
        log.info("%s: slots have factors of each expert, as runs or weights have in the data directory", name)
        spec, size = replace(spec, expert_slots="own"), replace(size, expert_slots="own")
    if name in own.attention and spec.latent_cache:
        log.info("%s: whole keys and values are kept, since runs or weights in the data directory adapt them", name)
        spec, size = replace(spec, latent_cache=False), replace(size, latent_cache=False)
    return replace(model, spec=spec, size=size)


def chosen_device(config: BackendConfig, machine: Machine) -> Device:
    """Return the device; `auto` is CUDA if there is a GPU."""
    return config.device if config.device != "auto" else "cuda" if machine.gpu_bytes else "cpu"


def plan_models(
    found: Sequence[FoundModel], config: BackendConfig, machine: Machine
) -> tuple[MemoryPlan, list[FoundModel], str | None]:
    """Return the plan of all models, the models with what it has chosen for them, and a sentence about GPUs that would
    be idle. Raises BackendFailed, with the nearest settings that fit, if they do not all fit."""
    sizes, device = [one.size for one in found], chosen_device(config, machine)

    def resize(changed: BackendConfig) -> list[ModelSize]:
        return [_size_with(model, changed, device) for model in found]

    plan = plan_or_suggest(sizes, config, machine, device, resize)
    placed = [replace(one, spec=_place(one, plan, config), demand=plan.demands[one.spec.name]) for one in found]
    return plan, placed, idle_gpus(plan, config)


def _place(model: FoundModel, plan: MemoryPlan, config: BackendConfig) -> ModelSpec:
    name = model.spec.name
    demand, layout = plan.demands[name], plan.layouts[name]
    on_cpu = plan.device == "cpu"
    num_ranks, tensor_parallel = len(layout.trainer), len(layout.engines[0])
    cache_on_cpu = model.size.kv_cache_bytes(demand.context, tensor_parallel, "cpu") if on_cpu else None
    spec = replace(
        model.spec,
        max_context_length=demand.context,
        max_lora_rank=demand.lora_rank,
        summed_lora_rank=total_rank(demand),
        adapter_slots=demand.adapter_slots,
        max_concurrent_samples=demand.max_sequences,
        engine_tokens=demand.engine_tokens,
        offloads_inputs=demand.offloads_inputs,
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
    block_fp8.check_files(directory, source)
    if config.base_precision is not None:
        size = _keep_packed(size, renderer, directory, config, source)
    support = Support(renderer, config, device, source)
    if support.makes_fp8:
        log.info("%s: %s", source, MADE_FP8)
    scratch_dir, of_files = config.scratch_dir / str(number), fingerprint(directory)
    replays_routing = config.replay_routing and bool(getattr(text_config, "num_experts_per_tok", 0))
    spec = ModelSpec(
        across_dtype=config.cluster_gradients,
        name=name,
        source=source,
        directory=str(directory),
        fingerprint=fingerprint(directory, "fp8") if support.makes_fp8 else of_files,
        files_fingerprint=of_files,
        arch=renderer.config.model_type,
        vocab_size=renderer.vocab_size,
        takes_images=renderer.takes_images,
        device=device,
        dtype=support.dtype,
        weight_bytes=size.base_bytes,
        is_quantised=quantisation(renderer.config) is not None,
        base_precision=config.base_precision,
        max_context_length=min(size.longest_context, _longest_context(config, device)),
        max_lora_rank=config.max_lora_rank or LORA_RANKS[0],
        adapter_bytes=_ADAPTER_NUMBER_BYTES * numbers.largest_file,
        adapter_matrices=sum(matrix.count for matrix in numbers.matrices),
        trains_vision=config.train_vision and renderer.takes_images,
        lora_layout=config.lora_layout if numbers.has_layouts else "own",
        expert_slots=size.expert_slots,
        latent_cache=size.latent_cache,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch or MICROBATCH_TOKENS[device],
        # On a CPU a full microbatch is no faster than two, and a model's numbers then do not depend on others' at all.
        shares_microbatches=device == "cuda",
        stable_reinforce=config.stable_reinforce,
        max_concurrent_samples=config.samples_at_once,
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
    support = Support(renderer, config, device, source)
    support.check()
    text_config = renderer.config.get_text_config()
    longest = min(text_config.max_position_embeddings, _longest_context(config, device))
    check_rotation(text_config, longest, source)
    return renderer, replace(
        model_size(name, renderer.config, numbers, support.dtype),
        can_be_captured=not renderer.family.has_state_space,
        lora_layout=config.lora_layout,
        expert_slots=config.lora_layout if numbers.num_experts else "own",
        latent_cache=config.lora_layout == "service" and support.can_keep_latents,
        can_be_shared=support.can_be_shared,
        tensor_parallels=support.tensor_parallels,
        context_parallels=support.context_parallels,
    )


def _longest_context(config: BackendConfig, device: Device) -> int:
    """Return the longest context that a plan may have, whatever the model's own limit."""
    return config.max_context_length or CONTEXTS[device][0]


def _renderer(directory: Path, config: BackendConfig, source: str) -> Renderer:
    """Raises BackendFailed if config, tokenizer or processor cannot be used."""
    text_files(directory)  # refuses what would give them another meaning
    try:
        renderer = Renderer(
            str(directory), image_cache_bytes=config.image_cache_bytes, max_image_pixels=config.max_image_pixels
        )
    except (OSError, ValueError) as error:
        raise BackendFailed(f"{source}: no usable model: {str(error).splitlines()[0]}") from None
    check_tokenizer(directory)
    return renderer


def _size_with(model: FoundModel, config: BackendConfig, device: Device) -> ModelSize:
    """Return the size of a model with other settings. Raises BackendFailed if they are not supported."""
    spec, directory = model.spec, Path(model.spec.directory)
    renderer, size = read_size(spec.name, directory, config, device)
    if config.base_precision is not None:
        size = _keep_packed(size, renderer, directory, config, spec.source)
    return replace(size, expert_slots=spec.expert_slots, latent_cache=size.latent_cache and spec.latent_cache)


def _keep_packed(size: ModelSize, renderer: Renderer, directory: Path, config: BackendConfig, source: str) -> ModelSize:
    """Return the size of a base that stays in `base_precision`. Raises BackendFailed for an engine whose ranks cannot
    divide it."""
    family, model_config = renderer.family, renderer.config
    if config.base_precision == "mxfp4":
        return keep_packed(size, find_packed(family, model_config, str(directory), "mxfp4").values())
    parts = Fp8Parts(fp8_matrices(family, model_config, str(directory)), model_config.get_text_config())
    _require_divided(parts, config.tensor_parallel or 1, source)
    return pack_linears(size, parts)


def keep_packed(size: ModelSize, shapes: Collection[tuple[int, ...]]) -> ModelSize:
    """Return the size of a base whose matrices, or stacks of them, of these shapes stay packed."""
    num_bytes = sum(math.prod(byte_shape(shape)) for shape in shapes)
    return replace(size, packed_numbers=sum(map(math.prod, shapes)), packed_bytes=num_bytes)


def pack_linears(size: ModelSize, parts: Fp8Parts) -> ModelSize:
    """Return the size of a base whose matrices stay in fp8."""
    return replace(keep_packed(size, parts.shapes), tensor_parallels=parts.divisible(size.tensor_parallels))


def _require_divided(parts: Fp8Parts, ranks: int, source: str) -> None:
    """Raise BackendFailed if so many ranks of an engine cannot divide what stays in fp8."""
    if (name := parts.first_undivided(ranks)) is not None:
        raise BackendFailed(
            f"{source}: tensor_parallel {ranks} (setting backend.tensor_parallel) is not supported with base_precision"
            f" fp8: the ranks would divide blocks of {name} that have one scale; set a smaller number, or leave"
            " base_precision out"
        )


def _numerics(spec: ModelSpec) -> dict[str, str]:
    """Return what may change the last bits of a result when it changes."""
    values: dict[str, object] = {
        "device": spec.device,
        "dtype": spec.dtype,
        "max_tokens_per_microbatch": spec.max_tokens_per_microbatch,
        "gpu_memory_bytes": spec.placement.trainer_bytes,
        "replay_routing": spec.routing_dir is not None,
    }
    if spec.base_precision is not None:  # kernels that dequantise sum in another order
        values["base_precision"] = spec.base_precision + (", quantised at load" if spec.makes_fp8 else "")
    if spec.mesh.context > 1:
        values["context_parallel"] = spec.mesh.context
    return {name: str(value) for name, value in values.items()} | {name: version(name) for name in _COMPUTING}
