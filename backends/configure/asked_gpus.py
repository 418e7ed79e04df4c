"""GPUs, ranks and engines that the settings ask for, and the refusals of those that contradict each other or the
machine."""

from collections.abc import Sequence

from tinker_server.backends.config import BackendConfig
from tinker_server.backends.protocol import BackendFailed

_ALIKE = 0.01
"""Part by which the memory of like cards may differ."""


class Contradiction(BackendFailed):
    """Settings contradict each other or the machine, so that no smaller size is enough."""


def set_ranks(config: BackendConfig) -> int | None:
    """Return the ranks of a trainer that the settings ask for; None: they leave them open."""
    return config.ranks or (len(config.trainer_gpus) if config.trainer_gpus else None)


def may_divide(config: BackendConfig) -> bool:
    """Return whether the settings let trainer and engine have the same number of ranks, on the same GPUs of this
    machine: one copy of a base can then be divided."""
    same = (
        config.sampler_gpus is None or config.trainer_gpus is None or {*config.sampler_gpus} == {*config.trainer_gpus}
    )
    return same and config.engines in (None, 1) and not config.cluster


def require_for_cluster(config: BackendConfig) -> None:
    """Raise Contradiction if there is a cluster, and a setting needs what it does not have."""
    for is_set, name, why in (
        (
            config.replay_routing,
            "replay_routing",
            "the trainer reads the routing that engines record from its own disk",
        ),
        (config.gpu_memory_bytes is not None, "gpu_memory_bytes", "GPUs of other machines are planned as a whole"),
    ):
        if config.cluster and is_set:
            raise Contradiction(
                f"setting backend.{name} does not go with backend.cluster: {why}; leave one of them out"
            )


def require_gpus(config: BackendConfig, num_gpus: int) -> None:
    """Raise Contradiction if there is no GPU, or settings name more than there are."""
    if num_gpus == 0:
        raise Contradiction(
            "--device cuda (setting backend.device): torch sees no GPU; give --device cpu, or on a machine with a GPU"
            " install the extra gpu"
        )
    for name, gpus in (("trainer_gpus", config.trainer_gpus), ("sampler_gpus", config.sampler_gpus)):
        if gpus and (len(set(gpus)) < len(gpus) or not set(gpus) <= set(range(num_gpus))):
            raise Contradiction(
                f"{','.join(map(str, gpus))} (setting backend.{name}): give different numbers from 0 to {num_gpus - 1}"
            )
    trainer_gpus = len(config.trainer_gpus) if config.trainer_gpus else num_gpus
    ranks = set_ranks(config) or config.context_parallel
    if trainer_gpus < ranks:
        setting = "ranks" if config.ranks else "context_parallel"
        raise Contradiction(
            f"{ranks} ranks (setting backend.{setting}) on CUDA need as many GPUs; the machine has {num_gpus}, trainers"
            f" may use {trainer_gpus}"
        )
    if config.trainer_gpus and ranks != trainer_gpus:
        raise Contradiction(
            f"backend.ranks is {ranks}, and backend.trainer_gpus names GPUs for {trainer_gpus}: give only one of them,"
            " or equal numbers"
        )
    engines, size = config.engines or 1, config.tensor_parallel or 1
    sampler_gpus = len(config.sampler_gpus) if config.sampler_gpus else num_gpus
    if engines * size > sampler_gpus:
        raise Contradiction(
            f"{engines} x {size} ranks of engines (settings backend.engines, backend.tensor_parallel) need"
            f" {engines * size} GPUs; the machine has {num_gpus}, engines may use {sampler_gpus}"
        )


def usable_bytes(config: BackendConfig, gpu_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the memory of each GPU that the server may use. Raises Contradiction if the GPUs, none on a CPU, do not
    have what the settings name, or are not alike: processes keep to a fraction of their GPU."""
    if (limit := config.gpu_memory_bytes) is None:
        return tuple(gpu_bytes)
    asked = f"{limit / 2**30:.4g} GiB of each GPU (--gpu-memory, setting backend.gpu_memory_bytes)"
    if not gpu_bytes:
        raise Contradiction(f"{asked}: on a CPU there is no GPU; leave it out")
    least, most = min(gpu_bytes), max(gpu_bytes)
    if least < limit:
        raise Contradiction(f"{asked}: a GPU has {least / 2**30:.1f} GiB; give at most that, or leave it out")
    if most - least > _ALIKE * most:
        raise Contradiction(
            f"{asked}: the GPUs have {least / 2**30:.1f} to {most / 2**30:.1f} GiB; show the server GPUs of one size"
            " alone, or leave it out"
        )
    return (limit,) * len(gpu_bytes)


def require_ranks(config: BackendConfig) -> None:
    """Raise Contradiction if a trainer cannot have so many ranks, or they cannot be divided into those that compute a
    microbatch together."""
    ranks = set_ranks(config) or config.context_parallel
    if ranks > 1 and config.base_precision == "mxfp4":
        less = "give a single GPU in backend.trainer_gpus" if config.trainer_gpus else "set backend.ranks to 1"
        raise Contradiction(
            f"base_precision mxfp4 (setting backend.base_precision) is not supported on {ranks} ranks; {less}, or leave"
            " base_precision out"
        )
    if ranks % config.context_parallel:
        raise Contradiction(
            f"{ranks} rank{'s' if ranks > 1 else ''} (setting backend.ranks, or one for each of backend.trainer_gpus)"
            f" cannot be divided into groups of {config.context_parallel} (setting backend.context_parallel): give a"
            " multiple of it"
        )
