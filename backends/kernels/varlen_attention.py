"""Causal attention of a packed row on CUDA, in 16 bits, as one operator that compiled layers call.

FlashAttention 2 takes a row's samples together, whatever their lengths. A long sample takes half the time in cuDNN's
kernel on Hopper and later, which wants samples of one length, and 0.1 s of planning for each length that it has not
met. So each long sample goes there alone, filled up at its end to one of eight lengths between a power of two and the
next: what stands behind a causal sample changes nothing in it, and has no gradient.

T tokens of a row, N samples, H query heads, G key heads, D values of a head
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.patches import Patch

log = logging.getLogger(__name__)
LONG = 4096
"""Tokens of a sample from which cuDNN is worth a call of its own."""
_BEYOND = 1e4
"""Log-sum-exp of the scores of tokens that fill up, nats: exp(score - this) is 0 in backward."""
_TESTED_TOKENS, _CLOSE = 637, 0.02
"""Of the sample by which cuDNN is tested, which is filled up; relative distance to FlashAttention: 0.004 on an H100."""

_WHY = "A private operator that is called here by position; its schema says what the arguments mean."
OPERATORS = [
    Patch(
        "flash-attention",
        "torch.ops:aten._flash_attention_forward",
        (  # of torch 2.11, and of 2.13, which has two more arguments with defaults
            "5867cae3eb0071ebe71250e2291396b99330845471c0246cd6315289f147c7d2",
            "866d2453d6eb8acdd947bb16b57bceca572dcfe4f6d0db1efef9ce294f9ce36c",
        ),
        _WHY,
        how="relied on",
        device="cuda",
    ),
    Patch(
        "flash-attention-backward",
        "torch.ops:aten._flash_attention_backward",
        "e44551bb1d16a66dce49c11d6a5f9be2bbe4a881085afbbdcb41f6aaedd82fd3",
        _WHY,
        how="relied on",
        device="cuda",
    ),
    Patch(
        "cudnn-attention",
        "torch.ops:aten._scaled_dot_product_cudnn_attention",
        "3a8a0dbb4d3628394970e385484e66dab381b400fafddacba4dad0d1a06f328a",
        _WHY,
        how="relied on",
        device="cuda",
    ),
    Patch(
        "cudnn-attention-backward",
        "torch.ops:aten._scaled_dot_product_cudnn_attention_backward",
        "493cb297834fa0baa14ac42a8e86310e9c739556d37f0edf99e39f2dd5bc18ea",
        _WHY,
        how="relied on",
        device="cuda",
    ),
]


class Kernel(Protocol):
    """Causal attention of the samples of a span: contiguous tokens of a row."""

    def forward(self, qkv: list[Tensor], span: "Span", scale: float) -> tuple[Tensor, Tensor]:
        """[T, H, D], and the log-sum-exp of the scores [H, T] float32, nats."""

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: "Span", scale: float) -> tuple[Tensor, ...]:
        """Of query, key and value; `saved` are these three and what forward gave."""


@dataclass(frozen=True)
class Span:
    """Samples that one kernel takes at once."""

    begin: int
    end: int
    cu_seqlens: Tensor
    """[N + 1] int32, on the device: from the span's begin."""
    longest: int
    is_long: bool


class Flash:
    """FlashAttention 2, as torch has it (arXiv 2307.08691)."""

    def forward(self, qkv: list[Tensor], span: Span, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, *self._bounds(span), 0.0, True, False, scale=scale, window_size_left=-1, window_size_right=0
        )
        return out, lse

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: Span, scale: float) -> tuple[Tensor, ...]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device), grad_THD.new_empty(0)
        gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            grad_THD,
            *saved,
            *self._bounds(span),
            0.0,
            True,
            *no_dropout,
            scale=scale,
            window_size_left=-1,
            window_size_right=0,
        )
        return gradients

    def _bounds(self, span: Span) -> tuple[Tensor, Tensor, int, int]:
        return span.cu_seqlens, span.cu_seqlens, span.longest, span.longest


class Filled:
    """cuDNN's kernel for one sample, filled up at its end."""

    def forward(self, qkv: list[Tensor], span: Span, scale: float) -> tuple[Tensor, Tensor]:
        num_tokens = span.end - span.begin
        query, key, value = map(_as_batch, qkv)
        out, lse = _cudnn_forward(query, key, value, scale)
        return out[0].transpose(0, 1)[:num_tokens], lse[0, :, :num_tokens, 0]

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: Span, scale: float) -> tuple[Tensor, ...]:
        *tensors, lse_HT = saved
        num_tokens = span.end - span.begin
        filled_lse = F.pad(lse_HT, (0, filled_length(num_tokens) - num_tokens), value=_BEYOND)
        gradients = _cudnn_backward([*map(_as_batch, (grad_THD, *tensors)), filled_lse[None, :, :, None]], scale)
        return tuple(gradient[0].transpose(0, 1)[:num_tokens] for gradient in gradients)


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[1, H, T, D], and the log-sum-exp of the scores [1, H, T, 1]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    return out, lse.reshape(*out.shape[:3], 1)


def _cudnn_backward(saved: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    """Of query, key and value [1, H or G, T, D], by the output's gradient, these three and what forward gave."""
    no_dropout = (torch.zeros((), dtype=torch.int64, device=saved[0].device),) * 2
    size = saved[0].shape[2]
    gradients: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *saved, *no_dropout, None, None, None, size, size, 0.0, True, scale=scale
    )
    return gradients


_flash: Kernel = Flash()
_filled: Kernel = Filled()


def filled_length(num_tokens: int) -> int:
    """The least multiple of an eighth of the largest power of two in it that holds so many tokens."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens // step) * step


def _as_batch(tensor_THD: Tensor) -> Tensor:
    """[1, H, T', D], T' the filled length."""
    missing = filled_length(len(tensor_THD)) - len(tensor_THD)
    filled = F.pad(tensor_THD, (0, 0, 0, 0, 0, missing)) if missing else tensor_THD
    return filled.transpose(0, 1)[None]


def _spans(cu_seqlens: Tensor, bounds: list[int], longest: int, *, apart: bool) -> Iterator[Span]:
    """Each long sample, and those between them together; all together where none goes apart."""
    if not apart:
        yield Span(0, bounds[-1], cu_seqlens, longest, is_long=False)
        return
    lengths = [end - begin for begin, end in pairwise(bounds)]
    for is_long, group in groupby(range(len(lengths)), key=lambda sample: lengths[sample] >= LONG):
        samples = list(group)
        for one in [[sample] for sample in samples] if is_long else [samples]:
            first, last = one[0], one[-1] + 1
            cu = cu_seqlens[first : last + 1] - cu_seqlens[first]
            yield Span(bounds[first], bounds[last], cu, max(lengths[first:last]), is_long)


def _row(query_THD: Tensor, key_TGD: Tensor, cu_seqlens: Tensor, bounds: Tensor, longest: int) -> list[Span]:
    has_long = longest >= LONG and bounds[-1].item() > 0  # or the device alone knows
    apart = has_long and _cudnn_serves(
        query_THD.device,
        query_THD.dtype,
        query_THD.shape[1:],
        key_TGD.shape[1],
        heads_first=query_THD.stride(0) < query_THD.stride(1),
    )
    return list(_spans(cu_seqlens, bounds.tolist(), longest, apart=apart))


def _forward(qkv: list[Tensor], spans: list[Span], scale: float) -> tuple[Tensor, Tensor]:
    """As `packed_attention`; one span is the whole row."""
    if len(spans) == 1:
        out, lse_HT = _kernel(spans[0]).forward(qkv, spans[0], scale)
        return _laid_out_as(qkv[0], out), lse_HT.contiguous()
    out, lse_HT = torch.empty_like(qkv[0]), _empty_lse(qkv[0])
    for span in spans:
        kernel, tokens = _kernel(span), slice(span.begin, span.end)
        out[tokens], lse_HT[:, tokens] = kernel.forward([tensor[tokens] for tensor in qkv], span, scale)
    return out, lse_HT


def _gradients(grad_THD: Tensor, saved: list[Tensor], spans: list[Span], scale: float) -> tuple[Tensor, ...]:
    """Of query, key and value; `saved` are these three and what forward gave."""
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


def _kernel(span: Span) -> Kernel:
    return _filled if span.is_long else _flash


def _laid_out_as(like: Tensor, result: Tensor) -> Tensor:
    """Compiled code reads what an operator gives where it expects it: as `like` lies."""
    expected = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == expected else torch.empty_like(like).copy_(result)


# A custom operator: torch.compile leaves its inside alone, and so compiles once for every mixture of lengths.
@torch.library.custom_op("tinker_server::packed_attention", mutates_args=())
def packed_attention(  # noqa: PLR0913
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """[T, H, D], and the log-sum-exp of the scores [H, T] float32, nats.

    `cu_seqlens` [N + 1] int32 on the device; `bounds` the same on the host. Where all of them there are 0, the row's
    lengths are known to the device alone, and none is long.
    """
    spans = _row(query_THD, key_TGD, cu_seqlens, bounds, longest)
    return _forward([query_THD, key_TGD, value_TGD], spans, scale)


@torch.library.custom_op("tinker_server::packed_attention_backward", mutates_args=())
def packed_attention_backward(  # noqa: PLR0913
    grad_THD: Tensor,
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    spans = _row(query_THD, key_TGD, cu_seqlens, bounds, longest)
    query, key, value = _gradients(grad_THD, [query_THD, key_TGD, value_TGD, out_THD, lse_HT], spans, scale)
    return query, key, value


@functools.cache
def _cudnn_serves(
    device: torch.device, dtype: torch.dtype, heads: torch.Size, num_key_heads: int, *, heads_first: bool
) -> bool:
    """Whether cuDNN is the faster one here, and gives what FlashAttention gives for heads of this shape.

    `heads_first`: of the two, tokens and heads, the tokens lie side by side in memory.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
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
        log.warning("cuDNN's attention is not used: %s", error)
        return False
    worst: float = max(((one - other).norm() / one.norm()).item() for one, other in zip(*found, strict=True))
    if not worst < _CLOSE:
        log.warning("cuDNN's attention is not used: it is %.3g of FlashAttention's numbers away from them", worst)
    return worst < _CLOSE


def _empty_lse(query_THD: Tensor) -> Tensor:
    return query_THD.new_empty(query_THD.shape[1], query_THD.shape[0], dtype=torch.float32)


@packed_attention.register_fake
def _(query_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query_THD), _empty_lse(query_THD)


@packed_attention_backward.register_fake
def _(grad_THD: Tensor, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query_THD), torch.empty_like(key_TGD), torch.empty_like(value_TGD)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, cu_seqlens, bounds, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens, bounds)


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = packed_attention_backward(grad_THD, *ctx.saved_tensors, ctx.longest, ctx.scale)
    return *gradients, None, None, None, None


packed_attention.register_autograd(_backward, setup_context=_save)
