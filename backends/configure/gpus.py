"""Read the state of GPUs by NVIDIA's management library, without a CUDA context or torch; plan for others by name."""

from collections.abc import Iterable

import pynvml

from tinker_server.backends.processes.launcher import gpu_names, num_visible_gpus
from tinker_server.backends.protocol import BackendFailed, GpuState

CARDS_GIB = {
    "L4": 22.0,
    "RTX4090": 23.5,
    "RTX5090": 31.3,
    "A100-40": 39.4,
    "L40S": 44.4,
    "A100": 79.2,
    "H100": 79.1,
    "H200": 139.8,
    "B200": 178.3,
}
"""Published memory of a card, as torch reports it, to about 0.5 GiB: for plans, not measured here."""


def cards(text: str) -> list[tuple[str, int]]:
    """Return name and memory in bytes of each card in `NAME` or `NAME:COUNT`. Raises BackendFailed."""
    name, _, count = text.partition(":")
    if name not in CARDS_GIB or not (count or "1").isdecimal() or not 1 <= int(count or 1) <= 64:
        known = ", ".join(CARDS_GIB)
        raise BackendFailed(f"--gpu {text}: write NAME or NAME:COUNT, COUNT from 1 to 64, with a NAME of {known}")
    return [(name, int(CARDS_GIB[name] * 2**30))] * int(count or 1)


def read_gpus(numbers: Iterable[int]) -> list[GpuState]:
    """Read the GPUs with these numbers, as the server counts them. Empty if the library is missing."""
    wanted = sorted(numbers)
    if not wanted:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_read(number, name) for number, name in zip(wanted, gpu_names(wanted), strict=True)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def smallest_gpu(numbers: Iterable[int]) -> int:
    """Return the memory of the smallest GPU of these numbers, in bytes; 0 if it cannot be read."""
    return min((gpu.total_bytes for gpu in read_gpus(numbers)), default=0)


def all_gpus() -> list[GpuState]:
    """Read all GPUs that this process may use."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return read_gpus(range(num_visible_gpus(pynvml.nvmlDeviceGetCount())))
    finally:
        pynvml.nvmlShutdown()


def _read(number: int, name: str) -> GpuState:
    by_index = name.isdecimal()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    return GpuState(
        index=number,
        name=pynvml.nvmlDeviceGetName(gpu),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        utilization=pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    )
