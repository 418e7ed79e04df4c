"""Give every base model its GPUs and a part of their memory, or refuse models that do not fit.

A model is in memory once in its trainer and once in each engine of its sampler. Several trainer ranks share its
weights, from when they are read, unless each has room for all; so do the ranks of an engine. On the CPU everything is
in main memory. On CUDA, engines get `sampler_fraction` of every GPU, and trainers the rest; models that share a GPU get
what they need at least, and equal parts of what is left. Engines take the GPUs of their model's trainer first, then
those with the fewest weights on them; one that nobody asked for starts only where it has room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch

from backends.model_spec import Device, Placement
from backends.protocol import BackendFailed

_PROCESS_BYTES = 3 << 29  # 1.5 GiB: torch, transformers or vLLM, before any weights
# Memory that torch does not count in a trainer rank (its CUDA context, 0.7 GiB with a tiny model on an H200, and NCCL's
# buffers), and that vLLM takes beyond its part (0.5 GiB there).
_CONTEXT_BYTES = 2 << 30
_LEAST_TRAINER_BYTES = 1 << 30  # adapters and a short microbatch


@dataclass(frozen=True)
class Machine:
    """Memory and GPUs of a machine."""

    main_bytes: int
    """Free main memory."""
    gpu_bytes: Sequence[int] = ()
    """Total memory of each GPU."""
    gpu_names: Sequence[str] = ()


@dataclass(frozen=True)
class Parts:
    """The parts into which each model is divided."""

    ranks: int = 1
    """Trainer ranks."""
    sampler_fraction: float = 0.4
    """Part of each GPU for engines."""
    engines: int | None = None
    """Engines; None: one, on CUDA one for each of the model's GPUs that has room."""
    tensor_parallel: int = 1
    """Ranks of each engine."""


@dataclass(frozen=True)
class ModelSize:
    """Memory that one base model needs."""

    name: str
    weight_bytes: int
    """Bytes of one copy of its weights, in the precision in which they are loaded."""
    kv_cache_bytes: int
    """Least KV cache of each of its engines."""
    gathered_bytes: int
    """Bytes of the weights that each of several trainer ranks all-gathers while it computes."""
    training_bytes: int = 0
    """Bytes of masters, Adam's moments and gradients if it trains all weights; the ranks share them too."""

    def rank_bytes(self, num_ranks: int) -> int:
        """Return the least memory for weights in each of so many trainer ranks: its shard, and what it all-gathers from
        the others, twice: as received and as used. If all weights train, add the gradient of what is all-gathered and
        its sum over ranks in float32."""
        shared = -(-self.weight_bytes // num_ranks) + 2 * self.gathered_bytes
        if self.training_bytes:
            alone = self.weight_bytes + self.training_bytes
            return alone if num_ranks == 1 else shared + 3 * self.gathered_bytes + -(-self.training_bytes // num_ranks)
        return self.weight_bytes if num_ranks == 1 else min(self.weight_bytes, shared)

    def engine_bytes(self, tensor_parallel: int) -> int:
        """Return the least memory for weights and KV cache in each of so many ranks of an engine."""
        return -(-(self.weight_bytes + self.kv_cache_bytes) // tensor_parallel)


def this_machine() -> Machine:
    """Read this machine, without creating a CUDA context in this process."""
    gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
    names, sizes = [gpu.name for gpu in gpus], [gpu.total_memory for gpu in gpus]
    return Machine(psutil.virtual_memory().available, sizes, names)


def place(models: Sequence[ModelSize], machine: Machine, device: Device, parts: Parts) -> dict[str, Placement]:
    """Return a placement for each model, by name. Raises BackendFailed with each model's figures if they do not fit."""
    if device == "cpu":
        _check_main_memory(models, machine.main_bytes, parts)
        return {model.name: Placement(engines=((),) * (parts.engines or 1)) for model in models}
    if len(machine.gpu_bytes) < parts.ranks:
        raise BackendFailed(f"{parts.ranks} ranks on CUDA need as many GPUs; torch sees {len(machine.gpu_bytes)}")
    gpus = _spread(models, len(machine.gpu_bytes), parts.ranks)
    engines = _spread_engines(models, machine, gpus, parts)
    own_bytes = {model.name: model.rank_bytes(parts.ranks) + _LEAST_TRAINER_BYTES + _CONTEXT_BYTES for model in models}
    trainer_fraction = {model.name: 1.0 for model in models}
    sampler_fraction = {model.name: 1.0 for model in models}
    for gpu, total in enumerate(machine.gpu_bytes):
        training = {name: own_bytes[name] for name, own in gpus.items() if gpu in own}
        sampling = {
            model.name: model.engine_bytes(parts.tensor_parallel)
            for model in models
            if any(gpu in own for own in engines[model.name])
        }
        for name, size in _shares(training, total * (1 - parts.sampler_fraction), "trainers", gpu).items():
            trainer_fraction[name] = min(trainer_fraction[name], (size - _CONTEXT_BYTES) / total)
        for name, size in _shares(sampling, total * parts.sampler_fraction, "samplers", gpu).items():
            sampler_fraction[name] = min(sampler_fraction[name], size / total)
    return {
        name: Placement(
            own,
            trainer_fraction[name],
            sampler_fraction[name],
            int(trainer_fraction[name] * min(machine.gpu_bytes[gpu] for gpu in own)),
            engines[name],
        )
        for name, own in gpus.items()
    }


def _spread_engines(
    models: Sequence[ModelSize], machine: Machine, trainers: Mapping[str, tuple[int, ...]], parts: Parts
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Choose the GPUs of each model's engines: those that were asked for, or one, then as many as there is room for on
    the GPUs of its trainer. Raises BackendFailed where there are too few GPUs."""
    num_gpus, size = len(machine.gpu_bytes), parts.tensor_parallel
    asked = parts.engines or 1
    if asked * size > num_gpus:
        raise BackendFailed(
            f"{asked} engines (setting backend.engines) of {size} ranks (setting backend.tensor_parallel) need"
            f" {asked * size} GPUs; torch sees {num_gpus}"
        )
    weights = [sum(model.weight_bytes for model in models if gpu in trainers[model.name]) for gpu in range(num_gpus)]
    free = [total * parts.sampler_fraction for total in machine.gpu_bytes]
    candidates: dict[str, list[tuple[int, ...]]] = {}
    chosen: dict[str, list[tuple[int, ...]]] = {}

    def add(model: ModelSize, gpus: tuple[int, ...]) -> None:
        chosen.setdefault(model.name, []).append(gpus)
        for gpu in gpus:
            free[gpu] -= model.engine_bytes(size)

    for model in models:
        own = sorted(trainers[model.name], key=lambda gpu: -free[gpu])
        others = sorted(set(range(num_gpus)) - set(own), key=lambda gpu: weights[gpu])
        order = [*own, *others]
        candidates[model.name] = [tuple(order[at : at + size]) for at in range(0, num_gpus - size + 1, size)]
        for gpus in candidates[model.name][:asked]:
            add(model, gpus)
    for model in models if parts.engines is None else ():
        for gpus in candidates[model.name][asked:]:
            if set(gpus) <= set(trainers[model.name]) and all(free[gpu] >= model.engine_bytes(size) for gpu in gpus):
                add(model, gpus)
    return {name: tuple(of_engines) for name, of_engines in chosen.items()}


def _check_main_memory(models: Sequence[ModelSize], free: int, parts: Parts) -> None:
    ranks, engines = parts.ranks, parts.engines or 1
    # The only rank of an engine is in its host's process tree as it is; several are processes beside it.
    processes = ranks + engines * (1 if parts.tensor_parallel == 1 else 1 + parts.tensor_parallel)
    weights = {model.name: engines * model.weight_bytes + ranks * model.rank_bytes(ranks) for model in models}
    caches = {model.name: engines * model.kv_cache_bytes for model in models}
    needed = {model.name: weights[model.name] + processes * _PROCESS_BYTES + caches[model.name] for model in models}
    if sum(needed.values()) > free:
        figures = "; ".join(
            f"{model.name} {_gib(needed[model.name])} ({_gib(weights[model.name])} of weights in sampler and trainer"
            f"{', masters, moments and gradients too' if model.training_bytes else ''},"
            f" {processes} processes of {_gib(_PROCESS_BYTES)}, {_gib(caches[model.name])} of KV cache)"
            for model in models
        )
        raise BackendFailed(
            f"too little memory: {_gib(free)} are free, {_gib(sum(needed.values()))} are needed: {figures};"
            " serve fewer models, set dtype bfloat16 or a smaller kv_cache_bytes"
            f"{', or fewer engines' if engines > 1 else ''}"
        )


def _spread(models: Sequence[ModelSize], num_gpus: int, num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Choose each model's GPUs, the largest model first: those with the fewest bytes of weights on them."""
    taken = [0] * num_gpus
    chosen = {}
    for model in sorted(models, key=lambda model: -model.weight_bytes):
        gpus = sorted(sorted(range(num_gpus), key=lambda gpu: taken[gpu])[:num_ranks])
        for gpu in gpus:
            taken[gpu] += model.weight_bytes
        chosen[model.name] = tuple(gpus)
    return chosen


def _shares(needed: Mapping[str, int], available: float, kind: str, gpu: int) -> dict[str, float]:
    """Return bytes for each: what it needs, and an equal part of the rest."""
    rest = available - sum(needed.values())
    if rest < 0:
        parts = "; ".join(f"{name} at least {_gib(size)}" for name, size in needed.items())
        raise BackendFailed(
            f"too little GPU memory: the {kind} on GPU {gpu} have {_gib(available)} and need"
            f" {_gib(sum(needed.values()))}: {parts}; gpu_memory_fraction divides a GPU between samplers and trainers"
        )
    return {name: size + rest / len(needed) for name, size in needed.items()}


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
