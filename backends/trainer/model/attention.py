"""Attention over packed microbatches: each sample attends to itself alone.

In bfloat16 on CUDA `packed_attention` computes it from cu_seqlens, without a mask, through transformers' attention
interface. Elsewhere transformers' SDPA computes it, one sample after the other: over the whole microbatch it would
compute all pairs of tokens to discard most of them.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import TypedDict, Unpack

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
"""Arguments that some decoders pass to attention and SDPA silently ignores: a cap of the scores, and sinks."""


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """Register and name transformers' attention implementation for the decoder."""
    if device.type != "cuda" or dtype == torch.float32:  # the kernel takes no float32
        AttentionInterface.register(PER_SAMPLE, _per_sample_attention)
        AttentionMaskInterface.register(PER_SAMPLE, sdpa_mask)
        return PER_SAMPLE
    AttentionInterface.register(PACKED, _packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
    return PACKED


class PackedLengths(TypedDict):
    """The extra arguments of the model's forward that our implementations need.

    No name in transformers equals one of theirs: the vision tower gets them too, and must not take them for its own.
    """

    packed_cu_seqlens: Tensor
    packed_cu_seqlens_host: Tensor
    packed_max_seqlen: int


class _Arguments(PackedLengths, total=False):
    """Arguments by name of a call of attention. A decoder that we do not support may leave out `PackedLengths`."""

    scaling: float
    sliding_window: int | None


def varlen_arguments(cu_seqlens: Tensor, cu_seqlens_host: Tensor, max_seqlen: int) -> PackedLengths:
    """Return the lengths of the packed samples as arguments of the model's forward."""
    return PackedLengths(
        packed_cu_seqlens=cu_seqlens, packed_cu_seqlens_host=cu_seqlens_host, packed_max_seqlen=max_seqlen
    )


def _per_sample_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Unpack[_Arguments],
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D].

    The mask is transformers' own [1, 1, T, T]; a sample needs its block on the diagonal. Windows are in the mask.
    """
    _require_supported(module, arguments)
    of_sdpa = {name: value for name, value in arguments.items() if name not in PackedLengths.__annotations__}
    parts = [
        sdpa_attention_forward(
            module,
            *(tensor[:, :, begin:end] for tensor in (query, key, value)),
            attention_mask if attention_mask is None else attention_mask[:, :, begin:end, begin:end],
            **of_sdpa,
        )[0]
        for begin, end in pairwise(arguments["packed_cu_seqlens_host"].tolist())
    ]
    return torch.cat(parts, dim=1), None


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,  # noqa: ARG001 - given by name too
    **arguments: Unpack[_Arguments],
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D]."""
    _require_supported(module, arguments)
    if arguments.get("sliding_window") is not None:
        raise _with_windows(type(module).__name__)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    varlen = arguments["packed_cu_seqlens"], arguments["packed_cu_seqlens_host"], arguments["packed_max_seqlen"]
    out, _ = packed_attention(query, key, value, *varlen, arguments["scaling"])
    return out[None], None


def _no_mask(*_: object, config: PretrainedConfig, local_size: int | None = None, **__: object) -> None:
    """Refuse windows: some architectures put them into the mask alone, and do not pass them to attention. A size of 0
    means that the window is switched off."""
    if local_size:
        raise _with_windows(_architecture(config))


def _with_windows(name: str) -> BackendFailed:
    return BackendFailed(f"windows in {name} are not supported in bfloat16 on CUDA; float32 is")


def _without_cu_seqlens(module: nn.Module) -> BackendFailed:
    """The error for architectures whose forward passes nothing on to their attention."""
    assert isinstance(module.config, PretrainedConfig)  # transformers has found us by it
    return BackendFailed(
        f"{_architecture(module.config)} is not supported: in transformers its {type(module).__name__} does not get"
        " the lengths of packed samples, and they would attend to each other"
    )


def _architecture(config: PretrainedConfig) -> str:
    """The architecture's name; for a config within another, its model type."""
    return str((config.architectures or [config.model_type])[0])


def _require_supported(module: nn.Module, arguments: Mapping[str, object]) -> None:
    for name in _LEFT_OUT:
        if arguments.get(name) is not None:
            raise BackendFailed(f"{name} in {type(module).__name__} is not supported")
    if arguments.get("packed_cu_seqlens_host") is None:
        raise _without_cu_seqlens(module)
