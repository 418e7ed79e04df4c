"""FlashAttention 2, as torch has it (arXiv 2307.08691), of samples of any lengths beside each other.

T tokens of a span, N samples, H query heads
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """Causal attention of the samples of a span."""

    def forward(self, qkv: list[Tensor], span: "Span", scale: float) -> tuple[Tensor, Tensor]:
        """Return [T, H, D], and the log-sum-exp of the scores [H, T] float32, nats."""

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: "Span", scale: float) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value; `saved` are these three and forward's results."""


@dataclass(frozen=True)
class Span:
    """Contiguous tokens of samples that a kernel takes at once."""

    begin: int
    end: int
    cu_seqlens: Tensor
    """[N + 1] int32, on the device, from the span's begin."""
    longest: int
    is_long: bool
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    cu_keys: Tensor | None = None
    """[N + 1] int32, of keys that each sample's queries see without a mask, instead of their own; None: their own."""
    longest_keys: int = 0


class Flash:
    """FlashAttention 2."""

    def forward(self, qkv: list[Tensor], span: Span, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, *self._varlen(span), 0.0, self._is_causal(span), False, scale=scale, **self._window(span)
        )
        return out, lse

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: Span, scale: float) -> tuple[Tensor, ...]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device), grad_THD.new_empty(0)
        gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            grad_THD,
            *saved,
            *self._varlen(span),
            0.0,
            self._is_causal(span),
            *no_dropout,
            scale=scale,
            **self._window(span),
        )
        return gradients

    def _window(self, span: Span) -> dict[str, int]:
        """Return the tokens seen before and behind a token."""
        if span.cu_keys is not None:
            return {}
        return {"window_size_left": -1 if span.window is None else span.window - 1, "window_size_right": 0}

    def _varlen(self, span: Span) -> tuple[Tensor, Tensor, int, int]:
        if span.cu_keys is not None:
            return span.cu_seqlens, span.cu_keys, span.longest, span.longest_keys
        return span.cu_seqlens, span.cu_seqlens, span.longest, span.longest

    def _is_causal(self, span: Span) -> bool:
        return span.window is None and span.cu_keys is None
