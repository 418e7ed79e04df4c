"""A step of vLLM 0.32 on the CPU whose prompts are one token in all ends the engine of a model with linear attention.

Its convolution wants its input with a stride of its own, and takes a single row as it lies among other columns: torch
says of one row that it is contiguous, whatever its stride.

T tokens, C channels
"""

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

_convolve = gdn_attention._causal_conv1d_fwd_cpu


def _convolve_own(*, x: Tensor, **others: Any) -> Tensor:
    """`x` is [C, T]."""
    own_TC = x.new_empty(x.shape[1], x.shape[0]).copy_(x.T)
    result: Tensor = _convolve(x=own_TC.T, **others)
    return result


def copy_single_rows() -> None:
    """Once per process that computes on the CPU, before the first request."""
    gdn_attention._causal_conv1d_fwd_cpu = _convolve_own
