"""Give every base model its GPUs and a part of their memory, or refuse models that do not fit.

A model is in memory twice, in its trainer and in its sampler. Several trainer ranks share its weights, from when they
are read, unless each has room for all. On the CPU everything is in main memory. On CUDA, samplers get
`sampler_fraction` of every GPU that a model uses, and trainers the rest; models that share a GPU get what they need at
least, and equal parts of what is left.
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
class ModelSize:
    """Memory that one base model needs."""

    name: str
    weight_bytes: int
    """Bytes of one copy of its weights, in the precision in which they are loaded."""
    kv_cache_bytes: int
    """Least KV cache of its sampler."""
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


def this_machine() -> Machine:
    """Read this machine, without creating a CUDA context in this process."""
    gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
    names, sizes = [gpu.name for gpu in gpus], [gpu.total_memory for gpu in gpus]
    return Machine(psutil.virtual_memory().available, sizes, names)


def place(
    models: Sequence[ModelSize], machine: Machine, device: Device, *, num_ranks: int, sampler_fraction: float
) -> dict[str, Placement]:
    """Return a placement for each model, by name. Raises BackendFailed with each model's figures if they do not fit."""
    if device == "cpu":
        _check_main_memory(models, machine.main_bytes, num_ranks)
        return {model.name: Placement() for model in models}
    if len(machine.gpu_bytes) < num_ranks:
        raise BackendFailed(f"{num_ranks} ranks on CUDA need as many GPUs; torch sees {len(machine.gpu_bytes)}")
    gpus = _spread(models, len(machine.gpu_bytes), num_ranks)
    trainers = {model.name: model.rank_bytes(num_ranks) + _LEAST_TRAINER_BYTES + _CONTEXT_BYTES for model in models}
    samplers = {model.name: model.weight_bytes + model.kv_cache_bytes for model in models}
    trainer_fraction = {model.name: 1.0 for model in models}
    sampler_fractions: dict[str, float] = {}
    for gpu, total in enumerate(machine.gpu_bytes):
        training = {name: trainers[name] for name, own in gpus.items() if gpu in own}
        sampling = {name: samplers[name] for name, own in gpus.items() if gpu == own[0]}
        for name, size in _shares(training, total * (1 - sampler_fraction), "trainers", gpu).items():
            trainer_fraction[name] = min(trainer_fraction[name], (size - _CONTEXT_BYTES) / total)
        for name, size in _shares(sampling, total * sampler_fraction, "samplers", gpu).items():
            sampler_fractions[name] = size / total
    return {
        name: Placement(
            own,
            trainer_fraction[name],
            sampler_fractions[name],
            int(trainer_fraction[name] * min(machine.gpu_bytes[gpu] for gpu in own)),
        )
        for name, own in gpus.items()
    }


def _check_main_memory(models: Sequence[ModelSize], free: int, num_ranks: int) -> None:
    processes = num_ranks + 1
    weights = {model.name: model.weight_bytes + num_ranks * model.rank_bytes(num_ranks) for model in models}
    needed = {model.name: weights[model.name] + processes * _PROCESS_BYTES + model.kv_cache_bytes for model in models}
    if sum(needed.values()) > free:
        parts = "; ".join(
            f"{model.name} {_gib(needed[model.name])} ({_gib(weights[model.name])} of weights in sampler and trainer"
            f"{', masters, moments and gradients too' if model.training_bytes else ''},"
            f" {processes} processes of {_gib(_PROCESS_BYTES)}, {_gib(model.kv_cache_bytes)} of KV cache)"
            for model in models
        )
        raise BackendFailed(
            f"too little memory: {_gib(free)} are free, {_gib(sum(needed.values()))} are needed: {parts};"
            " serve fewer models, set dtype bfloat16 or a smaller kv_cache_bytes"
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
