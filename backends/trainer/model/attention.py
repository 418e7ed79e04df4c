"""Attention over packed microbatches: each sample attends to itself alone.

In bfloat16 on CUDA `packed_attention` computes it from cu_seqlens, without a mask, through transformers' attention
interface. Elsewhere transformers' SDPA computes it, one sample after the other: over the whole microbatch it would
compute all pairs of tokens to discard most of them. SDPA has neither sinks nor a cap of the scores: layers with these
are computed as they are defined.

Where ranks have slices of the tokens, each computes all tokens of some heads (`kernels/exchange.py`).

Where samples share a prefix, it is packed once: `cu_seqlens` then bound segments, and a segment's tokens see those of
its ancestors too (`kernels/shared_prefix.py`).

Where tokens of an image see those behind them too, masks are widened, and the kernel adds that part by itself.

T tokens of the microbatch, H query heads and G key heads of this rank, D values of a head, I images whose tokens see
each other, F tokens of each
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tinker_server.backends.kernels.carried_state import Carried
from tinker_server.backends.kernels.exchange import num_ranks, own_part, to_heads, to_tokens
from tinker_server.backends.kernels.plain_attention import plain_attention
from tinker_server.backends.kernels.shared_prefix import prefixes_of, rows_of, tables
from tinker_server.backends.kernels.varlen_attention import packed_attention
from tinker_server.backends.protocol import BackendFailed

PACKED = "tinker_packed"
PER_SAMPLE = "tinker_per_sample"
PER_SAMPLE_BY_HEADS = "tinker_per_sample_by_heads"


def implementation(device: torch.device, dtype: torch.dtype, *, by_heads: bool = False) -> str:
    """Register and name transformers' attention implementation for the decoder. `by_heads`: ranks have slices of the
    tokens, of which no mask of the whole could be made."""
    if device.type != "cuda" or dtype == torch.float32:  # the kernel takes no float32
        if by_heads:
            AttentionInterface.register(PER_SAMPLE_BY_HEADS, _per_sample_by_heads)
            without = "with context_parallel", "set it to 1"
            AttentionMaskInterface.register(PER_SAMPLE_BY_HEADS, partial(_window, refusal=without))
            return PER_SAMPLE_BY_HEADS
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
    packed_group: str | None
    """Name of the group of ranks that have slices of the tokens; None: all of them are here."""
    packed_images: Tensor | None
    """[I * F] indices of the whole microbatch's tokens that see each other, image by image; None: none do. In one
    dimension: code compiled for any number of images is recompiled for one."""
    packed_image_tokens: int
    """F."""
    packed_shared: Tensor
    """As `shared_prefix.tables` gives them, on the device and on the host. They are there where nothing is shared too:
    layers are compiled once for both."""
    packed_shared_host: Tensor
    packed_calls: Tensor | None
    """As `carried_state.Carried` has them, this on the device as the next one; None: nothing is shared, or no layer
    carries a state."""
    packed_tails: Tensor | None
    packed_parents_host: Tensor | None


class _Arguments(PackedLengths, total=False):
    """Arguments by name of a call of attention. A decoder that we do not support may leave out `PackedLengths`."""

    scaling: float
    sliding_window: int | None
    softcap: float | None
    s_aux: Tensor | None
    """The heads' sinks."""


def varlen_arguments(  # noqa: PLR0913
    cu_seqlens: Tensor,
    cu_seqlens_host: Tensor,
    max_seqlen: int,
    group: str | None = None,
    images_IF: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    carried: Carried | None = None,
) -> PackedLengths:
    """Return the lengths of the packed samples as arguments of the model's forward. `images_IF` are the tokens of
    images that see each other, `shared` the segments that several samples see, on the device and on the host, and
    `carried` what layers with a state need for them."""
    if shared is None:
        bounds, table = tables([])
        shared = torch.zeros_like(bounds, device=cu_seqlens.device), table
    return PackedLengths(
        packed_cu_seqlens=cu_seqlens,
        packed_cu_seqlens_host=cu_seqlens_host,
        packed_max_seqlen=max_seqlen,
        packed_group=group,
        packed_images=None if images_IF is None else images_IF.flatten(),
        packed_image_tokens=0 if images_IF is None else images_IF.shape[1],
        packed_shared=shared[0],
        packed_shared_host=shared[1],
        packed_calls=None if carried is None else carried.calls,
        packed_tails=None if carried is None else carried.tails,
        packed_parents_host=None if carried is None else carried.parents_host,
    )


def _per_sample_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Unpack[_Arguments],
) -> tuple[Tensor, None]:
    """Attend: query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D].

    The mask is transformers' own [1, 1, T, T]; a sample needs its block on the diagonal. Windows are in the mask, and
    no model with them shares segments.
    """
    _require_lengths(module, arguments)
    others = {name: value for name, value in arguments.items() if name not in PackedLengths.__annotations__}
    is_plain = others.get("softcap") is not None or others.get("s_aux") is not None
    image_T, parts = _image_of_tokens(arguments, query.shape[2], query.device), []
    table = arguments.get("packed_shared_host")
    shared = [] if table is None else rows_of(table)
    for begin, end in pairwise(arguments["packed_cu_seqlens_host"].tolist()):
        sample = [tensor[:, :, begin:end] for tensor in (query, key, value)]
        mask = None if attention_mask is None else attention_mask[:, :, begin:end, begin:end]
        mask = mask if image_T is None else _with_images(mask, image_T[begin:end])
        if seen := prefixes_of(shared, begin):
            tokens_seen = (*seen, slice(begin, end))
            sample[1:] = [torch.cat([tensor[:, :, tokens] for tokens in tokens_seen], 2) for tensor in (key, value)]
            mask = _window_mask(end - begin, end - begin, query.device) if mask is None else mask
            mask = F.pad(mask, (sample[1].shape[2] - (end - begin), 0), value=True)  # all keys before its own
        parts.append(
            plain_attention(sample, mask, arguments["scaling"], arguments.get("softcap"), arguments.get("s_aux"))
            if is_plain
            else sdpa_attention_forward(module, *sample, mask, **others)[0]
        )
    return torch.cat(parts, dim=1), None


def _per_sample_by_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    **arguments: Unpack[_Arguments],
) -> tuple[Tensor, None]:
    """Attend as `_packed_attention`, in plain torch."""
    _require_lengths(module, arguments)
    window, scale, group = attention_mask, arguments["scaling"], arguments["packed_group"]
    softcap, sinks_H = arguments.get("softcap"), _own_sinks(arguments.get("s_aux"), group)
    qkv = _to_heads([one[0].transpose(0, 1) for one in (query, key, value)], group)
    image_T, parts = _image_of_tokens(arguments, len(qkv[0]), query.device), []
    for begin, end in pairwise(arguments["packed_cu_seqlens_host"].tolist()):
        query, key, value = sample = [one_THD[begin:end].transpose(0, 1)[None] for one_THD in qkv]
        mask = None if window is None else _window_mask(end - begin, window, query.device)
        mask = mask if image_T is None else _with_images(mask, image_T[begin:end])
        if softcap is not None or sinks_H is not None:
            parts.append(plain_attention(sample, mask, scale, softcap, sinks_H)[0])
        else:
            out = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
    return _to_tokens(torch.cat(parts), group)[None], None


def _window_mask(num_tokens: int, window: int, device: torch.device) -> Tensor:
    """Return [1, 1, T, T], true where a token sees another: itself and those before it, `window` in all."""
    is_before_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    return is_before_TT.triu(1 - window)[None, None]


def _image_of_tokens(arguments: _Arguments, num_tokens: int, device: torch.device) -> Tensor | None:
    """Return [T], the number of the image whose tokens a token sees, -1 for others; None if there are no such
    images."""
    images = arguments.get("packed_images")
    if images is None:
        return None
    images_IF = images.view(-1, arguments["packed_image_tokens"])
    image_T = torch.full((num_tokens,), -1, device=device)
    image_T[images_IF] = torch.arange(len(images_IF), device=device)[:, None]
    return image_T


def _with_images(mask: Tensor | None, image_T: Tensor) -> Tensor:
    """Return [1, 1, T, T], a sample's mask, the causal one if it has none, in which tokens of an image see each
    other."""
    if mask is None:
        mask = torch.ones(len(image_T), len(image_T), dtype=torch.bool, device=image_T.device).tril()[None, None]
    return mask | ((image_T[:, None] == image_T) & (image_T >= 0))


def _to_heads(qkv: Sequence[Tensor], group: str | None) -> list[Tensor]:
    """Return query [T, H, D], key and value [T, G, D] of this rank's heads, from those of all heads of its tokens."""
    return list(qkv) if group is None else own_heads(qkv, group)


def own_heads(of_all: Sequence[Tensor], group: str) -> list[Tensor]:
    """Return the same tensors [T, heads, D] of this rank's heads, from those of all heads of its tokens.

    The first has as many heads as there are, and others may have fewer, for several of them: each rank has those that
    its heads need, repeated where ranks would share one.
    """
    first, *others = of_all
    return [to_heads(one, group) for one in (first, *(_for_each_rank(one, first.shape[1], group) for one in others))]


def _for_each_rank(of_all: Tensor, num_heads: int, group: str) -> Tensor:
    """Repeat heads [T, G, D] that several of `num_heads` share, until ranks can divide them."""
    num_shared, size = of_all.shape[1], num_ranks(group)
    repeats = next(
        times
        for times in range(1, num_heads + 1)
        if num_shared * times % size == 0 and num_heads % (num_shared * times) == 0
    )
    return of_all.repeat_interleave(repeats, 1) if repeats > 1 else of_all


def _to_tokens(out_THD: Tensor, group: str | None) -> Tensor:
    """Return all heads of this rank's tokens, from attention's output for its heads."""
    return out_THD if group is None else to_tokens(out_THD, group)


def _own_sinks(sinks_H: Tensor | None, group: str | None) -> Tensor | None:
    """Return the sinks of this rank's heads, from those of all."""
    return sinks_H if sinks_H is None or group is None else own_part(sinks_H, group)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    **arguments: Unpack[_Arguments],
) -> tuple[Tensor, None]:
    """Attend: query [1, heads, T, D]; key and value [1, key heads, T, D]; returns [1, T, heads, D].

    The mask is `_window`: some decoders give attention their window too, and others do not.
    """
    _require_lengths(module, arguments)
    window, own_window, sinks_H = attention_mask, arguments.get("sliding_window"), arguments.get("s_aux")
    if arguments.get("softcap") is not None:
        raise BackendFailed(f"softcap in {type(module).__name__} is not supported in bfloat16 on CUDA; float32 is")
    if sinks_H is not None and sinks_H.requires_grad:
        raise BackendFailed(
            f"the sinks of {type(module).__name__} are not trained in bfloat16 on CUDA; in float32 they are"
        )
    if own_window and own_window != window:
        raise BackendFailed(
            f"{type(module).__name__} is not supported in bfloat16 on CUDA: it has a window of {own_window} tokens,"
            f" and its mask one of {window}; float32 is supported"
        )
    group = arguments["packed_group"]
    query, key, value = _to_heads([tensor[0].transpose(0, 1) for tensor in (query, key, value)], group)
    varlen = arguments["packed_cu_seqlens"], arguments["packed_cu_seqlens_host"], arguments["packed_max_seqlen"]
    width, value = value.shape[-1], _as_wide_as(key, value)
    images = arguments.get("packed_images"), arguments.get("packed_image_tokens", 0)
    own_sinks_H = _own_sinks(sinks_H, group)
    shared = arguments.get("packed_shared"), arguments.get("packed_shared_host")
    out, _ = packed_attention(query, key, value, *varlen, arguments["scaling"], window, own_sinks_H, *images, *shared)
    return _to_tokens(out[..., :width], group)[None], None


def _as_wide_as(key_TGD: Tensor, value: Tensor) -> Tensor:
    """Return [T, G, D], with zeros behind the values of latent attention, which are narrower than keys: kernels take
    one width. It is laid out as the keys, as the kernels' tests at start are."""
    width = value.shape[-1]
    if width == key_TGD.shape[-1]:
        return value
    wide_TGD = torch.zeros_like(key_TGD)
    wide_TGD[..., :width] = value
    return wide_TGD


def _window(
    *_: object,
    config: PretrainedConfig,
    local_size: int | None = None,
    use_vmap: bool = False,
    refusal: tuple[str, str] = ("in bfloat16 on CUDA", "float32 is"),
    **__: object,
) -> int | None:
    """Return the tokens that a token of a layer sees, itself included, in place of a mask; None: all before it.

    A size of 0 means that the window is switched off. Raises BackendFailed for any other mask: `refusal` says where it
    is not supported, and what is instead.
    """
    is_window = not local_size or local_size == getattr(config, "sliding_window", None)  # chunks have a size too
    is_causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    if use_vmap or not is_window or not is_causal:  # `use_vmap`: functions of its own make the mask
        raise BackendFailed(
            f"{_architecture(config)} is not supported {refusal[0]}: tokens attend to others than those before them, or"
            f" those of a window; {refusal[1]}"
        )
    return local_size or None


def _without_cu_seqlens(module: nn.Module) -> BackendFailed:
    """Return the error for architectures whose forward passes nothing on to their attention."""
    assert isinstance(module.config, PretrainedConfig)  # transformers has found us by it
    return BackendFailed(
        f"{_architecture(module.config)} is not supported: in transformers its {type(module).__name__} does not get"
        " the lengths of packed samples, and they would attend to each other"
    )


def _architecture(config: PretrainedConfig) -> str:
    """Return the architecture's name; for a config within another, its model type."""
    return str((config.architectures or [config.model_type])[0])


def _require_lengths(module: nn.Module, arguments: Mapping[str, object]) -> None:
    if arguments.get("packed_cu_seqlens_host") is None:
        raise _without_cu_seqlens(module)
