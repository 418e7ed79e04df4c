"""The bytes of every part of a model on every GPU: the formula of the start, of `doctor` and of refusals.

Weights, adapters, slots and KV cache follow from shapes, and are exact. Activations, graphs and contexts are estimates,
fitted to an H200 with a dense model of 4 billion. The trainer measures its own at start, and vLLM its own: an
estimate that is off moves memory between them and what is left over, and refuses a little too early or too late. Pure
arithmetic: knows no file and no device.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tinker_server.backends.config import MemoryPart, Process
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.small_cards import LARGEST_IMAGE_TOKENS
from tinker_server.backends.model_spec import ENGINE_GRAPHS_BYTES, ENGINE_TOKENS, MAX_SUMMED_RANK
from tinker_server.backends.trainer.lora.adapters import buffer_rank
from tinker_server.backends.trainer.model.recompute import MARGIN
from tinker_server.backends.trainer.optimizer import TRIED_AT_ONCE

GIB = 1 << 30
TRAINER_CONTEXT_BYTES = 3 << 28
"""A CUDA context with torch's libraries, 0.7 GiB with a tiny model on an H200; torch does not count it."""
NCCL_BYTES = 3 << 28
"""Buffers of a rank among several, which torch does not count either."""
ENGINE_CONTEXT_BYTES = 5 << 28
"""vLLM's own context, which it does not count in its part of a GPU, 0.5 to 0.7 GiB on an H200, and as much for the
driver: an engine does not start if less than its part is free."""
HOLDER_CONTEXT_BYTES = int(0.6 * GIB)
"""The context of a process that holds the shared copy of a base."""
PROCESS_BYTES = 3 << 29
"""torch, transformers or vLLM in main memory, before any weights."""
_MASTER_BYTES, _MOMENTS_BYTES, _GRADIENT_BYTES = 4, 8, 4
_SMALLEST_GRAPH_TOKENS = 256
_SEEN_LATENTS = 1 << 16
"""The most tokens whose keys and values vLLM makes of latents at once."""


@dataclass(frozen=True)
class Demand:
    """Work that a model's trainer and engines must have room for."""

    context: int
    lora_rank: int
    models_at_once: int
    """LoRA models of that rank which train at the same time."""
    adapter_slots: int
    """Adapters of that rank which an engine decodes with at once; it has a spare slot, for new weights."""
    microbatch_tokens: int
    max_sequences: int
    kv_cache_bytes: int | None
    """None: the least that does."""
    context_parallel: int = 1
    """Ranks that compute a microbatch together, a slice of its tokens each."""
    engine_tokens: int = ENGINE_TOKENS
    """Tokens of an engine's step."""
    offloads_inputs: bool = False
    """True if inputs of layers that recompute wait in main memory."""

    @property
    def slice_tokens(self) -> int:
        """A rank's tokens of the longest microbatch."""
        return -(-self.context // self.context_parallel)


@dataclass(frozen=True)
class Layout:
    """The GPUs of a model; on the CPU all of them are 0, which stands for the main memory."""

    trainer: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    replicates: bool
    """True if each trainer rank has the whole base."""

    @property
    def can_divide(self) -> bool:
        """True if trainer and engine have as many ranks on the same GPUs: both can map one divided copy of a base."""
        return len(self.trainer) > 1 and not self.replicates and self.engines == (self.trainer,)


@dataclass(frozen=True)
class Machine:
    """Memory and GPUs of a machine."""

    main_bytes: int
    """Free main memory."""
    gpu_bytes: Sequence[int] = ()
    """Total memory of each GPU."""
    gpu_names: Sequence[str] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Every part on every GPU, and what each GPU has."""

    device: str
    totals: tuple[int, ...]
    """Bytes of each GPU that can be used; on the CPU a single number, the free main memory."""
    demands: Mapping[str, Demand]
    layouts: Mapping[str, Layout]
    parts: tuple[MemoryPart, ...] = field(repr=False, default=())
    wholes: tuple[int, ...] = ()
    """Bytes of each GPU of which processes get fractions: more than `totals` where others use the rest."""

    def of(self, gpu: int, model: str | None = None, process: Process | None = None) -> int:
        """Return the bytes on a GPU, of all or of a model and process."""
        return sum(
            part.size_bytes
            for part in self.parts
            if part.gpu == gpu and model in (None, part.model) and process in (None, part.process)
        )

    @property
    def missing_bytes(self) -> int:
        """The most that any GPU lacks; at most 0 if everything fits."""
        lacking = [-total for total in self.totals]
        for part in self.parts:
            lacking[part.gpu] += part.size_bytes
        return max(lacking)

    def holds(self, model: str) -> bool:
        """Return whether trainer and engines of a model map a copy of the base that other processes hold."""
        return any((part.model, part.process) == (model, "holder") for part in self.parts)

    def lines(self) -> list[str]:
        """List each process's parts, a line for each process of a GPU."""
        found: defaultdict[tuple[int, str, Process], list[str]] = defaultdict(list)
        for part in self.parts:
            found[part.gpu, part.model, part.process].append(f"{part.name} {gib(part.size_bytes)}")
        lines = []
        for (gpu, model, process), parts in sorted(found.items()):
            where = "main memory" if self.device == "cpu" else f"GPU {gpu}"
            lines.append(f"{where}: {model} {process} {gib(self.of(gpu, model, process))}: {', '.join(parts)}")
        return lines

    def describe(self, gpu: int) -> str:
        """List each model's parts on a GPU, for an error."""
        named: defaultdict[str, list[str]] = defaultdict(list)
        for part in self.parts:
            if part.gpu == gpu:
                named[part.model].append(f"{part.process} {part.name} {gib(part.size_bytes)}")
        return "; ".join(f"{name} {gib(self.of(gpu, name))} ({', '.join(parts)})" for name, parts in named.items())


def plan_parts(
    sizes: Sequence[ModelSize],
    demands: Mapping[str, Demand],
    layouts: Mapping[str, Layout],
    device: str,
    base_copies: int = 2,
) -> tuple[MemoryPart, ...]:
    """Return the least parts of all models. `base_copies` 1: trainer and engine on a GPU share a copy of the base, in a
    process of its own, if both need it whole, or of what each GPU has of it if both divide it."""
    parts: list[MemoryPart] = []
    for size in sizes:
        demand, layout = demands[size.name], layouts[size.name]
        shared = _holding_gpus(size, layout, device) if base_copies == 1 else set()
        divides = layout.can_divide and bool(shared)
        held_bytes = _engine_base_bytes(size, len(layout.engines[0]))
        for gpu in sorted(shared):
            parts += _parts(size, gpu, "holder", {"base": held_bytes, "context": HOLDER_CONTEXT_BYTES})
        of_rank = trainer_parts(size, demand, len(layout.trainer), layout.replicates, device)
        if divides:
            of_rank = _gathering(size, of_rank)
        for gpu in layout.trainer:
            parts += _parts(size, gpu, "trainer", _without_base(of_rank, gpu in shared and not divides))
        of_engine = engine_parts(size, demand, len(layout.engines[0]), device)
        for gpu in chain.from_iterable(layout.engines):
            parts += _parts(size, gpu, "engine", _without_base(of_engine, gpu in shared))
    return tuple(_sum_parts(parts) if device == "cpu" else parts)


def trainer_parts(size: ModelSize, demand: Demand, num_ranks: int, replicates: bool, device: str) -> dict[str, int]:
    """Return the least parts of each of so many trainer ranks."""
    parts = {"base": _rank_base_bytes(size, num_ranks, replicates)}
    parts["adapters"] = demand.models_at_once * adapter_bytes(size, demand.lora_rank, num_ranks)
    width = demand.lora_rank if device == "cpu" else buffer_rank(total_rank(demand), demand.lora_rank)
    parts["adapters of microbatches"] = size.adapter_numbers(width) * (size.number_bytes + _GRADIENT_BYTES)
    if device == "cpu":
        return parts | {"process": PROCESS_BYTES}
    # All layers recompute in the longest microbatch. Its images go through the tower before, and no optim_step beside.
    microbatch = least_activation_bytes(size, demand) + size.unpacking_bytes
    if demand.context_parallel > 1:
        microbatch += demand.slice_tokens * size.exchanged_token_bytes
    if size.image_token is not None:
        microbatch += demand.slice_tokens * size.image_token.features
    # An optim_step is tried on copies of some masters and moments at a time, and several ranks sum shards first.
    own = -(-size.adapter_numbers(demand.lora_rank) // num_ranks)
    step_bytes = min(own, TRIED_AT_ONCE) * (_MASTER_BYTES + _MOMENTS_BYTES)
    if num_ranks > 1:
        step_bytes += own * _GRADIENT_BYTES
    parts["microbatch or optim_step"] = max(microbatch, size.tower_bytes(demand.slice_tokens), step_bytes)
    is_alone = (num_ranks == 1 or replicates) and demand.context_parallel == 1
    if size.can_be_captured and is_alone:
        parts["graphs"] = int(_SMALLEST_GRAPH_TOKENS * (1 + size.num_layers) * size.layer_token_bytes)
    parts["left free"] = int(sum(parts.values()) * MARGIN / (1 - MARGIN))
    num_groups = (num_ranks > 1) + (demand.context_parallel > 1)
    parts["context"] = TRAINER_CONTEXT_BYTES + num_groups * NCCL_BYTES
    return parts


def adapter_bytes(size: ModelSize, rank: int, num_ranks: int) -> int:
    """Return the bytes of a LoRA model in training on each rank: working copy, gradient, its shards of masters and
    moments; on one rank the masters are the working copy."""
    numbers = size.adapter_numbers(rank)
    shards = -(-numbers * (_MASTER_BYTES + _MOMENTS_BYTES) // num_ranks)
    return shards + numbers * _GRADIENT_BYTES + (numbers * size.number_bytes if num_ranks > 1 else 0)


def total_rank(demand: Demand) -> int:
    """Return to what the ranks of a microbatch's models may sum."""
    return max(demand.lora_rank, min(demand.models_at_once * demand.lora_rank, MAX_SUMMED_RANK))


def least_activation_bytes(size: ModelSize, demand: Demand) -> int:
    """Return what the longest microbatch takes of a rank if all layers recompute."""
    return size.activation_bytes(demand.slice_tokens, recomputes=True, offloads=demand.offloads_inputs)


def engine_parts(size: ModelSize, demand: Demand, tensor_parallel: int, device: str) -> dict[str, int]:
    """Return the least parts of each of so many ranks of an engine. All but its context are vLLM's own part of the
    GPU."""
    parts = {"base": _engine_base_bytes(size, tensor_parallel)}
    parts["matrices of latents"] = size.latent_matrix_bytes(tensor_parallel)
    parts["adapter slots"] = (demand.adapter_slots + 1) * size.slot_bytes(demand.lora_rank, tensor_parallel)
    cache = demand.kv_cache_bytes or size.kv_cache_bytes(demand.context, tensor_parallel, device)
    parts["KV cache"] = -(-cache // tensor_parallel)
    if device == "cpu":
        # The only rank of an engine is in its host's process; several are processes beside it.
        return parts | {"process": PROCESS_BYTES + (PROCESS_BYTES // tensor_parallel if tensor_parallel > 1 else 0)}
    # A step has its largest layer, its stream, and float32 logits of its sequences with what sampling makes of them.
    step_tokens = max(demand.engine_tokens, demand.max_sequences)
    token_bytes = 2 * size.layer_token_bytes / tensor_parallel + 20 * size.hidden
    parts["step"] = int(step_tokens * token_bytes + demand.max_sequences * size.vocab_size * 4 * 4)
    if size.latent_cache:  # whole keys and values of the latents that a prompt's later tokens see
        seen = min(8 * demand.context, _SEEN_LATENTS)
        parts["step"] += seen * size.kv_token_bytes // size.num_layers // tensor_parallel
    parts["step"] += 2 * size.unpacking_bytes  # gate and up are joined there
    if size.image_token is not None:
        parts["images"] = size.image_token.forward * step_tokens
        if demand.engine_tokens < ENGINE_TOKENS:  # a step may have an image that is larger, alone
            parts["images"] = max(parts["images"], size.image_token.forward * LARGEST_IMAGE_TOKENS - parts["step"])
    return parts | {"graphs": ENGINE_GRAPHS_BYTES, "context": ENGINE_CONTEXT_BYTES}


def _rank_base_bytes(size: ModelSize, num_ranks: int, replicates: bool) -> int:
    """Return the bytes of a rank's weights: its shard, and what it all-gathers from the others, twice: as received and
    as used; or all of them."""
    if num_ranks == 1 or replicates:
        return size.base_bytes
    shared = -(-size.base_bytes // num_ranks) + 2 * size.all_gathered_bytes
    return min(size.base_bytes, shared)


def _engine_base_bytes(size: ModelSize, tensor_parallel: int) -> int:
    """Return the bytes of the weights of each of so many ranks of an engine."""
    if tensor_parallel == 1:
        return size.base_bytes
    return size.rank_numbers(tensor_parallel) * size.number_bytes - size.packed_savings // tensor_parallel


def _gathering(size: ModelSize, parts: dict[str, int]) -> dict[str, int]:
    """Return the parts of a trainer's rank that maps the engine's part of the base: what it all-gathers, as received
    and as used, in place of a shard too."""
    gathered_bytes = min(size.base_bytes, 2 * size.all_gathered_bytes)
    more = parts | {"base": gathered_bytes}
    if "left free" in parts:
        saved_bytes = parts["base"] - gathered_bytes
        more["left free"] = parts["left free"] - int(saved_bytes * MARGIN / (1 - MARGIN))
    return more


def _holding_gpus(size: ModelSize, layout: Layout, device: str) -> set[int]:
    """Return the GPUs with a process that holds the base: all of a model's if trainer and an engine share one of them,
    and neither divides the base; or both, alike."""
    divided = (len(layout.trainer) > 1 and not layout.replicates) or any(len(engine) > 1 for engine in layout.engines)
    if device == "cpu" or not size.can_be_shared:
        return set()
    if divided:
        return set(layout.trainer) if layout.can_divide else set()
    trains, samples = set(layout.trainer), {engine[0] for engine in layout.engines}
    return trains | samples if trains & samples else set()


def _without_base(parts: Mapping[str, int], is_shared: bool) -> dict[str, int]:
    return {name: size for name, size in parts.items() if not (is_shared and name == "base")}


def _parts(size: ModelSize, gpu: int, process: Process, parts: Mapping[str, int]) -> list[MemoryPart]:
    return [MemoryPart(size.name, gpu, process, name, num_bytes) for name, num_bytes in parts.items() if num_bytes]


def _sum_parts(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Add up equal parts of a CPU's memory: those of several ranks and engines."""
    totals: defaultdict[tuple[str, int, Process, str], int] = defaultdict(int)
    for part in parts:
        totals[part.model, part.gpu, part.process, part.name] += part.size_bytes
    return [MemoryPart(*key, num_bytes) for key, num_bytes in totals.items()]


def gib(size_bytes: float) -> str:
    """Write bytes as GiB."""
    return f"{size_bytes / GIB:.1f} GiB"
