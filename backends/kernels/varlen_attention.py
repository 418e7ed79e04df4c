"""Causal attention of a packed microbatch on CUDA, in 16 bits, as an operator that compiled layers call.

FlashAttention 2 takes all samples together, whatever their lengths. A long sample takes half the time in cuDNN's
kernel on Hopper and later, which needs samples of one length, and 0.1 s of planning for each new length. So each long
sample goes there alone, padded at its end to one of eight lengths between a power of two and the next: padding behind
a causal sample changes nothing in it, and has no gradient. Windows are FlashAttention's alone, which skips what they
hide.

A head's sink is a further score in the softmax, without a value. With m the log-sum-exp of the other scores and
l = log(exp(m) + exp(sink)) that of all, the output is the kernel's times exp(m - l). Backward is the kernel's own: the
gradient of a score s is exp(s - l) (dO V^T - sum(dO O)), O being the whole output: the sink's value, 0, adds nothing to
that sum. So the kernel is given O and l in place of its own output and m.

Tokens of an image may see those behind them too: that part is added in the same way (`whole_images.py`), as is a
prefix that is packed once for several samples (`shared_prefix.py`).

T tokens of a microbatch, N samples, H query heads, G key heads, D values of a head
"""

import functools
import logging
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinker_server.backends.kernels.autograd import Context
from tinker_server.backends.kernels.cards import choices_on
from tinker_server.backends.kernels.defined_attention import (
    CLOSE,
    TESTED_IMAGE,
    TESTED_WINDOWS,
    Samples,
    random_samples,
    require_as_defined,
)
from tinker_server.backends.kernels.flash_attention import Flash, Kernel, Span
from tinker_server.backends.kernels.shared_prefix import Level, add_prefix_gradients, add_prefixes, levels, tables
from tinker_server.backends.kernels.whole_images import add_later_gradients, add_later_tokens

log = logging.getLogger(__name__)
LONG = 4096
"""Tokens of a sample from which a call of cuDNN of its own is worth it."""
_BEYOND = 1e4
"""Log-sum-exp of the scores of padding, nats: exp(score - this) is 0 in backward."""
_TESTED_TOKENS = 637
"""Tokens of the sample by which cuDNN is tested, which is padded."""


class Padded:
    """cuDNN's kernel for a sample, padded at its end."""

    def forward(self, qkv: list[Tensor], span: Span, scale: float) -> tuple[Tensor, Tensor]:
        num_tokens = span.end - span.begin
        query, key, value = map(_as_batch, qkv)
        out, lse = _cudnn_forward(query, key, value, scale)
        return out[0].transpose(0, 1)[:num_tokens], lse[0, :, :num_tokens, 0]

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: Span, scale: float) -> tuple[Tensor, ...]:
        *tensors, lse_HT = saved
        num_tokens = span.end - span.begin
        padded_lse = F.pad(lse_HT, (0, round_up_length(num_tokens) - num_tokens), value=_BEYOND)
        gradients = _cudnn_backward([*map(_as_batch, (grad_THD, *tensors)), padded_lse[None, :, :, None]], scale)
        return tuple(gradient[0].transpose(0, 1)[:num_tokens] for gradient in gradients)


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return [1, H, T, D], and the log-sum-exp of the scores [1, H, T, 1]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return out, lse.reshape(*out.shape[:3], 1)


def _cudnn_backward(saved: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value [1, H or G, T, D]; `saved` is the output's gradient, these three and
    forward's results."""
    no_dropout = (torch.zeros((), dtype=torch.int64, device=saved[0].device),) * 2
    size = saved[0].shape[2]
    gradients: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *saved, *no_dropout, None, None, None, size, size, 0.0, True, scale=scale
    )
    return gradients


_flash: Kernel = Flash()
_padded: Kernel = Padded()


def round_up_length(num_tokens: int) -> int:
    """Round up to a multiple of an eighth of the largest power of two that is at most `num_tokens`."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens // step) * step


def _as_batch(tensor_THD: Tensor) -> Tensor:
    """Return [1, H, T', D], T' the padded length."""
    missing = round_up_length(len(tensor_THD)) - len(tensor_THD)
    padded = F.pad(tensor_THD, (0, 0, 0, 0, 0, missing)) if missing else tensor_THD
    return padded.transpose(0, 1)[None]


def _spans(cu_seqlens: Tensor, ends: list[int], longest: int, *, split_long: bool) -> Iterator[Span]:
    """Yield each long sample alone, and those between them together; without `split_long` all together."""
    if not split_long:
        yield Span(0, ends[-1], cu_seqlens, longest, is_long=False)
        return
    lengths = [end - begin for begin, end in pairwise(ends)]
    for is_long, group in groupby(range(len(lengths)), key=lambda sample: lengths[sample] >= LONG):
        samples = list(group)
        for part in [[sample] for sample in samples] if is_long else [samples]:
            first, last = part[0], part[-1] + 1
            cu = cu_seqlens[first : last + 1] - cu_seqlens[first]
            yield Span(ends[first], ends[last], cu, max(lengths[first:last]), is_long)


def _plan_attention(  # noqa: PLR0913
    query_THD: Tensor,
    key_TGD: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_host: Tensor,
    longest: int,
    window: int | None,
) -> list[Span]:
    if window is not None and window < longest:
        like = query_THD.device, query_THD.dtype, query_THD.shape[1:], key_TGD.shape[1]
        _require_windows(*like)
        return [Span(0, len(query_THD), cu_seqlens, longest, is_long=False, window=window)]
    has_long = longest >= LONG and cu_seqlens_host[-1].item() > 0  # or the device alone knows
    split_long = has_long and _cudnn_serves(
        query_THD.device,
        query_THD.dtype,
        query_THD.shape[1:],
        key_TGD.shape[1],
        heads_first=query_THD.stride(0) < query_THD.stride(1),
    )
    return list(_spans(cu_seqlens, cu_seqlens_host.tolist(), longest, split_long=split_long))


def _forward(qkv: list[Tensor], spans: list[Span], scale: float) -> tuple[Tensor, Tensor]:
    """Attend as `packed_attention`; one span is the whole microbatch."""
    if len(spans) == 1:
        out, lse_HT = _kernel(spans[0]).forward(qkv, spans[0], scale)
        return _laid_out_as(qkv[0], out), lse_HT.contiguous()
    out, lse_HT = torch.empty_like(qkv[0]), _empty_lse(qkv[0])
    for span in spans:
        kernel, tokens = _kernel(span), slice(span.begin, span.end)
        out[tokens], lse_HT[:, tokens] = kernel.forward([tensor[tokens] for tensor in qkv], span, scale)
    return out, lse_HT


def _gradients(grad_THD: Tensor, saved: list[Tensor], spans: list[Span], scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; `saved` are these three and forward's results."""
    if len(spans) == 1:
        whole = _kernel(spans[0]).backward(grad_THD, saved, spans[0], scale)
        return tuple(_laid_out_as(like, gradient) for like, gradient in zip(saved, whole, strict=False))
    *tensors, lse_HT = saved
    gradients = tuple(torch.empty_like(tensor) for tensor in tensors[:3])
    for span in spans:
        kernel, tokens = _kernel(span), slice(span.begin, span.end)
        of_span = [*(tensor[tokens] for tensor in tensors), lse_HT[:, tokens].contiguous()]
        parts = kernel.backward(grad_THD[tokens], of_span, span, scale)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[tokens] = part
    return gradients


def _across(level: Level) -> Span:
    """Return the span of a call in which a level's queries see its keys."""
    num_queries = len(level.query_Q)
    return Span(0, num_queries, level.cu_queries, level.longest_queries, False, None, level.cu_keys, level.longest_keys)


def _attend_across(qkv: list[Tensor], level: Level, scale: float) -> tuple[Tensor, Tensor]:
    return _flash.forward(qkv, _across(level), scale)


def _attend_across_backward(grad_QHD: Tensor, saved: list[Tensor], level: Level, scale: float) -> tuple[Tensor, ...]:
    return _flash.backward(grad_QHD, saved, _across(level), scale)


def _with_sinks(out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp, given those without sinks."""
    whole_HT = torch.logaddexp(lse_HT, sinks_H[:, None].to(lse_HT.dtype))
    part_TH1 = (lse_HT - whole_HT).exp().T[..., None]
    return _laid_out_as(out_THD, (out_THD * part_TH1).to(out_THD.dtype)), whole_HT


def _kernel(span: Span) -> Kernel:
    return _padded if span.is_long else _flash


def _laid_out_as(like: Tensor, result: Tensor) -> Tensor:
    """Lay a result out as `like`: compiled code reads an operator's result with the strides that it expects."""
    expected = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == expected else torch.empty_like(like).copy_(result)


# A custom operator: torch.compile does not trace it, and so compiles once for every mixture of lengths.
@torch.library.custom_op("tinker_server::packed_attention", mutates_args=())
def packed_attention(  # noqa: PLR0913
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_host: Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    images: Tensor | None = None,
    image_tokens: int = 0,
    shared: Tensor | None = None,
    shared_host: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return [T, H, D], and the log-sum-exp of the scores [H, T] float32, nats.

    `cu_seqlens` [N + 1] int32 on the device; `cu_seqlens_host` the same on the host. If all of the host's are 0, only
    the device knows the lengths, and no sample is long. `window`: tokens that a token sees, itself included.
    `sinks_H` are frozen, and are among the scores of the log-sum-exp. `images` are the tokens of images that see each
    other, one image of `image_tokens` after the other; a window must not be shorter than an image. `shared` and
    `shared_host` are `shared_prefix.tables`, the first on the device: samples are then segments. A window must not be
    shorter than what a token sees.
    """
    spans = _plan_attention(query_THD, key_TGD, cu_seqlens, cu_seqlens_host, longest, window)
    qkv = [query_THD, key_TGD, value_TGD]
    out_THD, lse_HT = _forward(qkv, spans, scale)
    if of := _levels(shared, shared_host):
        _require_prefixes(query_THD.device, query_THD.dtype, query_THD.shape[1:], key_TGD.shape[1])
        out_THD, lse_HT = add_prefixes((out_THD, lse_HT), qkv, of, _attend_across, scale)
    if images is not None:
        _require_images(query_THD.device, query_THD.dtype, query_THD.shape[1:], key_TGD.shape[1])
        out_THD, lse_HT = add_later_tokens((out_THD, lse_HT), qkv, images.view(-1, image_tokens), scale)
    return (out_THD, lse_HT) if sinks_H is None else _with_sinks(out_THD, lse_HT, sinks_H)


@torch.library.custom_op("tinker_server::packed_attention_backward", mutates_args=())
def packed_attention_backward(  # noqa: PLR0913
    grad_THD: Tensor,
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_host: Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
    images: Tensor | None = None,
    image_tokens: int = 0,
    shared: Tensor | None = None,
    shared_host: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    spans = _plan_attention(query_THD, key_TGD, cu_seqlens, cu_seqlens_host, longest, window)
    saved = [query_THD, key_TGD, value_TGD, out_THD, lse_HT]
    gradients = _gradients(grad_THD, saved, spans, scale)
    if of := _levels(shared, shared_host):
        gradients = add_prefix_gradients(gradients, grad_THD, saved, of, _attend_across_backward, scale)
    if images is not None:
        gradients = add_later_gradients(gradients, grad_THD, saved, images.view(-1, image_tokens), scale)
    query, key, value = gradients
    return query, key, value


def _levels(shared: Tensor | None, shared_host: Tensor | None) -> list[Level]:
    return [] if shared is None or shared_host is None else list(levels(shared, shared_host))


@functools.cache
def _cudnn_serves(
    device: torch.device, dtype: torch.dtype, heads: torch.Size, num_key_heads: int, *, heads_first: bool
) -> bool:
    """Return whether cuDNN is faster here, and gives what FlashAttention gives for heads of this shape.

    `heads_first`: heads come before tokens in memory.
    """
    if device.type == "cuda" and not choices_on(device).cudnn_for_long_samples:
        return False
    generator = torch.Generator(device).manual_seed(0)

    def random(num_heads: int, *, heads_first: bool) -> Tensor:
        shape = (num_heads, _TESTED_TOKENS) if heads_first else (_TESTED_TOKENS, num_heads)
        found = torch.randn(*shape, heads[1], dtype=dtype, device=device, generator=generator)
        return found.transpose(0, 1) if heads_first else found

    qkv = [random(number, heads_first=heads_first) for number in (heads[0], num_key_heads, num_key_heads)]
    grad_THD, scale = random(heads[0], heads_first=False), heads[1] ** -0.5
    cu = torch.tensor([0, _TESTED_TOKENS], dtype=torch.int32, device=device)
    found = []
    try:
        for is_long in (False, True):
            spans = [Span(0, _TESTED_TOKENS, cu, _TESTED_TOKENS, is_long)]
            out, lse_HT = _forward(qkv, spans, scale)
            found.append([out, *_gradients(grad_THD, [*qkv, out, lse_HT], spans, scale)])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("cuDNN attention disabled: %s", error)
        return False
    worst: float = max(
        ((expected - other).norm() / expected.norm()).item() for expected, other in zip(*found, strict=True)
    )
    if not worst < CLOSE:
        log.warning("cuDNN attention disabled: relative error %.3g against FlashAttention", worst)
    return worst < CLOSE


@functools.cache
def _require_windows(device: torch.device, dtype: torch.dtype, heads: torch.Size, num_key_heads: int) -> None:
    """Raise BackendFailed if FlashAttention, for heads of this shape, gives other numbers with a window than its
    definition: no other kernel here could take over."""
    for window in TESTED_WINDOWS:
        require_as_defined(_flash_attention, random_samples(device, dtype, heads, num_key_heads), window, None)


@functools.cache
def _require_images(device: torch.device, dtype: torch.dtype, heads: torch.Size, num_key_heads: int) -> None:
    """Require as `_require_windows`, with images whose tokens see each other."""
    for window in (None, max(TESTED_WINDOWS)):
        require_as_defined(_flash_attention, random_samples(device, dtype, heads, num_key_heads), window, TESTED_IMAGE)


@functools.cache
def _require_prefixes(device: torch.device, dtype: torch.dtype, heads: torch.Size, num_key_heads: int) -> None:
    """Require as `_require_windows`, where samples are packed as a prefix and what is behind it."""
    require_as_defined(_flash_attention_in_two, random_samples(device, dtype, heads, num_key_heads), None, None)


def _flash_attention_in_two(given: Samples, _: int | None, __: Tensor | None) -> list[Tensor]:
    """Return the output and gradients, each sample computed as two segments."""
    ends = given.cu_seqlens.tolist()
    middles = [(begin + end) // 2 for begin, end in pairwise(ends)]
    host = sorted([*ends, *middles])
    bounds = torch.tensor(host, dtype=torch.int32, device=given.cu_seqlens.device)
    spans = [Span(0, ends[-1], bounds, max(end - begin for begin, end in pairwise(host)), is_long=False)]
    table = [(0, middle, end, begin, middle) for middle, (begin, end) in zip(middles, pairwise(ends), strict=True)]
    flat, shared_host = tables(table)
    of = list(levels(flat.to(bounds.device), shared_host))
    out, lse_HT = add_prefixes(_forward(given.qkv, spans, given.scale), given.qkv, of, _attend_across, given.scale)
    saved, grad_THD = [*given.qkv, out, lse_HT], given.grad_THD
    gradients = _gradients(grad_THD, saved, spans, given.scale)
    return [out, *add_prefix_gradients(gradients, grad_THD, saved, of, _attend_across_backward, given.scale)]


def _flash_attention(given: Samples, window: int | None, images_IF: Tensor | None) -> list[Tensor]:
    """Return the output and gradients, by FlashAttention alone."""
    spans = [Span(0, len(given.grad_THD), given.cu_seqlens, max(given.lengths), is_long=False, window=window)]
    out, lse_HT = _forward(given.qkv, spans, given.scale)
    if images_IF is not None:
        out, lse_HT = add_later_tokens((out, lse_HT), given.qkv, images_IF, given.scale)
    saved = [*given.qkv, out, lse_HT]
    gradients = _gradients(given.grad_THD, saved, spans, given.scale)
    if images_IF is not None:
        gradients = add_later_gradients(gradients, given.grad_THD, saved, images_IF, given.scale)
    return [out, *gradients]


def _empty_lse(query_THD: Tensor) -> Tensor:
    return query_THD.new_empty(query_THD.shape[1], query_THD.shape[0], dtype=torch.float32)


@packed_attention.register_fake
def _(query_THD: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query_THD), _empty_lse(query_THD)


@packed_attention_backward.register_fake
def _(_grad_THD: Tensor, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, *_: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query_THD), torch.empty_like(key_TGD), torch.empty_like(value_TGD)


class _AttentionContext(Context, Protocol):
    longest: int
    scale: float
    window: int | None
    image_tokens: int


def _save(
    ctx: _AttentionContext,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    *tensors, ctx.longest, ctx.scale, ctx.window, _, images, ctx.image_tokens, shared, shared_host = inputs
    qkv, bounds = tensors[:3], tensors[3:]
    ctx.save_for_backward(*qkv, *output, *bounds, images, shared, shared_host)


def _backward(ctx: _AttentionContext, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, images, shared, shared_host = ctx.saved_tensors
    numbers = ctx.longest, ctx.scale, ctx.window
    gradients = packed_attention_backward(grad_THD, *saved, *numbers, images, ctx.image_tokens, shared, shared_host)
    return *gradients, *(None,) * 10


packed_attention.register_autograd(_backward, setup_context=_save)
