"""Kernels that are chosen by a GPU's compute capability, in one table. Those of the engine's attention are vLLM's own
choice."""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tinker_server.backends.protocol import BackendFailed

Capability = tuple[int, int]
Sizes = tuple[dict[str, int], int, int]
"""Sizes by the names that a Triton kernel has for them, warps and stages."""


@dataclass(frozen=True)
class Choices:
    """What is chosen in bfloat16."""

    cudnn_for_long_samples: bool
    """The trainer's attention of long samples is cuDNN's, where it was seen to equal FlashAttention 2; else that."""
    kernels_for_fp8: bool
    """Weights in fp8 are read by kernels of our own: Triton converts fp8 from Ada on. Else torch dequantises them."""
    tuned_delta_rule: bool
    """Kernels of the delta rule have sizes that were measured. Else the library measures them at each first start."""
    shared_memory_kib: int
    """Of a program. Where it is little, kernels for experts load fewer of their largest tiles ahead."""


CHOICES: dict[Capability, Choices] = {
    (8, 0): Choices(cudnn_for_long_samples=False, kernels_for_fp8=False, tuned_delta_rule=False, shared_memory_kib=163),
    (8, 6): Choices(cudnn_for_long_samples=False, kernels_for_fp8=False, tuned_delta_rule=False, shared_memory_kib=99),
    (8, 9): Choices(cudnn_for_long_samples=False, kernels_for_fp8=True, tuned_delta_rule=False, shared_memory_kib=99),
    (9, 0): Choices(cudnn_for_long_samples=True, kernels_for_fp8=True, tuned_delta_rule=True, shared_memory_kib=227),
    (10, 0): Choices(cudnn_for_long_samples=True, kernels_for_fp8=True, tuned_delta_rule=False, shared_memory_kib=227),
    (12, 0): Choices(cudnn_for_long_samples=True, kernels_for_fp8=True, tuned_delta_rule=False, shared_memory_kib=99),
}
"""By the least capability: a card between two has the lower one's. Only 9.0 has run."""


def choices_for(capability: Capability) -> Choices:
    """Return the choices for cards of a compute capability. Raises BackendFailed for those without bfloat16."""
    known = [least for least in CHOICES if least <= capability]
    if not known:
        raise BackendFailed(
            f"a GPU of compute capability {'.'.join(map(str, capability))} has no bfloat16: 8.0 is the least (A100)"
        )
    return CHOICES[max(known)]


@functools.cache
def choices_on(device: torch.device) -> Choices:
    """Return the choices for a GPU; on a CPU, where Triton's interpreter runs kernels, those for Hopper."""
    return choices_for((9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device))


def keep_sizes(package: str, sizes: Mapping[str, Sizes]) -> None:
    """Have Triton try no other sizes for kernels of a package, which are named by module and function."""
    import triton

    for name, (of_kernel, num_warps, num_stages) in sizes.items():
        module, _, attribute = name.partition(":")
        kernel = getattr(importlib.import_module(f"{package}.{module}"), attribute)
        while not hasattr(kernel, "configs"):
            kernel = kernel.fn
        kernel.configs = [triton.Config(of_kernel, num_warps=num_warps, num_stages=num_stages)]
