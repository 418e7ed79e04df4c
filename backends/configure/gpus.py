"""Read the state of GPUs by NVIDIA's management library, without a CUDA context or torch."""

from collections.abc import Iterable

import pynvml

from backends.processes.launcher import gpu_names
from backends.protocol import GpuState


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
