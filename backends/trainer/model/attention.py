"""Attention over packed microbatches: each sample attends to itself alone.

In bfloat16 on CUDA `packed_attention` computes it from cu_seqlens, without a mask, through transformers' attention
interface. Elsewhere transformers' SDPA computes it, one sample after the other: over the whole microbatch it would
compute all pairs of tokens to discard most of them. SDPA has neither sinks nor a cap of the scores: layers with these
are computed as they are defined.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from backends.kernels.plain_attention import plain_attention
from backends.kernels.varlen_attention import packed_attention
from backends.protocol import BackendFailed

PACKED = "tinker_packed"
PER_SAMPLE = "tinker_per_sample"


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """Register and name transformers' attention implementation for the decoder."""
    if device.type != "cuda" or dtype == torch.float32:  # the kernel takes no float32
        AttentionInterface.register(PER_SAMPLE, _per_sample_attention)
        AttentionMaskInterface.register(PER_SAMPLE, sdpa_mask)
        return PER_SAMPLE
    AttentionInterface.register(PACKED, _packed_attention)
    AttentionMaskInterface.register(PACKED, _window)
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
    softcap: float | None
    s_aux: Tensor | None
    """The heads' sinks."""


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
    _require_lengths(module, arguments)
    others = {name: value for name, value in arguments.items() if name not in PackedLengths.__annotations__}
    is_plain = others.get("softcap") is not None or others.get("s_aux") is not None
    parts = []
    for begin, end in pairwise(arguments["packed_cu_seqlens_host"].tolist()):
        sample = [tensor[:, :, begin:end] for tensor in (query, key, value)]
        mask = None if attention_mask is None else attention_mask[:, :, begin:end, begin:end]
        parts.append(
            plain_attention(sample, mask, arguments["scaling"], arguments.get("softcap"), arguments.get("s_aux"))
            if is_plain
            else sdpa_attention_forward(module, *sample, mask, **others)[0]
        )
    return torch.cat(parts, dim=1), None


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    **arguments: Unpack[_Arguments],
) -> tuple[Tensor, None]:
    """query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D].

    The mask is `_window`: some decoders give attention their window too, and others do not.
    """
    _require_lengths(module, arguments)
    window, own_window, sinks_H = attention_mask, arguments.get("sliding_window"), arguments.get("s_aux")
    if arguments.get("softcap") is not None:
        raise BackendFailed(f"softcap in {type(module).__name__} is not supported in bfloat16 on CUDA; float32 is")
    if sinks_H is not None and sinks_H.requires_grad:
        raise BackendFailed(f"the sinks of {type(module).__name__} are not trained in bfloat16 on CUDA")
    if own_window and own_window != window:
        raise BackendFailed(
            f"{type(module).__name__} is not supported in bfloat16 on CUDA: it has a window of {own_window} tokens,"
            f" and its mask one of {window}"
        )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    varlen = arguments["packed_cu_seqlens"], arguments["packed_cu_seqlens_host"], arguments["packed_max_seqlen"]
    out, _ = packed_attention(query, key, value, *varlen, arguments["scaling"], window, sinks_H)
    return out[None], None


def _window(
    *_: object, config: PretrainedConfig, local_size: int | None = None, use_vmap: bool = False, **__: object
) -> int | None:
    """Return the tokens that a token of a layer sees, itself included, in place of a mask; None: all before it.

    A size of 0 means that the window is switched off. Raises BackendFailed for any other mask.
    """
    is_window = not local_size or local_size == getattr(config, "sliding_window", None)  # chunks have a size too
    is_causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    if use_vmap or not is_window or not is_causal:  # `use_vmap`: functions of its own make the mask
        raise BackendFailed(
            f"{_architecture(config)} is not supported in bfloat16 on CUDA: tokens attend to others than those before"
            " them, or those of a window; float32 is"
        )
    return local_size or None


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


def _require_lengths(module: nn.Module, arguments: Mapping[str, object]) -> None:
    if arguments.get("packed_cu_seqlens_host") is None:
        raise _without_cu_seqlens(module)
