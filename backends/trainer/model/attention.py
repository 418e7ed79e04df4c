"""Attention over packed rows: each sample attends to itself alone.

In bfloat16 on CUDA `packed_attention` does it from the samples' bounds, with no mask at all, through
transformers' attention interface. Elsewhere transformers' SDPA does it, one sample after the other: over the
whole row it would compute all pairs of tokens to throw most of them away.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from backends.kernels.varlen_attention import packed_attention
from backends.protocol import BackendFailed

PACKED = "tinker_packed"
PER_SAMPLE = "tinker_per_sample"
_LEFT_OUT = ("softcap", "s_aux")
"""What some decoders ask of attention, as transformers names it, and SDPA leaves out in silence: a cap of the scores,
and sinks."""


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """The name of transformers' attention implementation for the decoder."""
    if device.type != "cuda" or dtype == torch.float32:  # which the kernel does not take
        AttentionInterface.register(PER_SAMPLE, _per_sample_attention)
        AttentionMaskInterface.register(PER_SAMPLE, sdpa_mask)
        return PER_SAMPLE
    AttentionInterface.register(PACKED, _packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
    return PACKED


def bounds(cu_seqlens: Tensor, on_host: Tensor, max_seqlen: int) -> dict[str, Any]:
    """The extra arguments that our implementations need in the model's forward; `on_host` is `cu_seqlens` there.

    Named as nothing in transformers is: the vision tower gets them too, and must not take them for its own.
    """
    return {"packed_cu_seqlens": cu_seqlens, "packed_bounds": on_host, "packed_longest": max_seqlen}


def _per_sample_attention(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_bounds: Tensor | None = None,
    packed_cu_seqlens: Tensor | None = None,
    packed_longest: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D].

    The mask is transformers' own [1, 1, T, T], of which a sample needs the block on the diagonal; windows are in it.
    """
    _refuse_left_out(module, kwargs)
    if packed_bounds is None:
        raise _without_bounds(module)
    parts = [
        sdpa_attention_forward(
            module,
            *(tensor[:, :, begin:end] for tensor in (query, key, value)),
            attention_mask if attention_mask is None else attention_mask[:, :, begin:end, begin:end],
            **kwargs,
        )[0]
        for begin, end in pairwise(packed_bounds.tolist())
    ]
    return torch.cat(parts, dim=1), None


def _packed_attention(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    packed_bounds: Tensor | None = None,
    packed_cu_seqlens: Tensor | None = None,
    packed_longest: int = 0,
    **other: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D]."""
    _refuse_left_out(module, other)
    if packed_bounds is None or packed_cu_seqlens is None:
        raise _without_bounds(module)
    if other.get("sliding_window") is not None:
        raise _with_windows(type(module).__name__)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out, _ = packed_attention(query, key, value, packed_cu_seqlens, packed_bounds, packed_longest, scaling)
    return out[None], None


def _no_mask(*args: Any, config: PretrainedConfig, local_size: int | None = None, **kwargs: Any) -> None:
    """Windows are a matter of the mask alone in some architectures, whose attention is not told of them. A size of 0
    is that of a window which is switched off."""
    if local_size:
        raise _with_windows(_architecture(config))


def _with_windows(name: str) -> BackendFailed:
    return BackendFailed(f"windows in {name} are not supported in bfloat16 on CUDA; float32 is")


def _without_bounds(module: nn.Module) -> BackendFailed:
    """Some architectures hand nothing on from their forward to their attention."""
    assert isinstance(module.config, PretrainedConfig)  # by which transformers has found us
    return BackendFailed(
        f"{_architecture(module.config)} is not supported: in transformers its {type(module).__name__} is not told"
        " which samples a row holds, and they would attend to each other"
    )


def _architecture(config: PretrainedConfig) -> str:
    """Of a config within another, its kind."""
    return str((config.architectures or [config.model_type])[0])


def _refuse_left_out(module: nn.Module, asked: Mapping[str, Any]) -> None:
    for name in _LEFT_OUT:
        if asked.get(name) is not None:
            raise BackendFailed(f"{name} in {type(module).__name__} is not supported")
