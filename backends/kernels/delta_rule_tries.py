"""The delta rule of tries of segments, call by call: parents before their children, and in backward behind them.

A call's segments begin with the last states of their parents, whose gradient is the sum of those of all children.

T tokens of a microbatch, N of a call, S segments of a call and an empty one, H heads, K and V widths of a key and a
value
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinker_server.backends.kernels.carried_state import Call

Forward = Callable[[list[Tensor], Tensor, Tensor | None, bool], tuple[tuple[Tensor, ...], Tensor | None]]
"""Computes what is known of tokens [N, ...], between the bounds of segments, from the states [S, H, K, V] that they
begin with, None for 0; returns what tokens have then, and with True the last states."""
Backward = Callable[[list[Tensor], Tensor, Tensor | None, Tensor | None], tuple[tuple[Tensor, ...], Tensor | None]]
"""The same from what forward has saved, and with the gradients of the last states, None for 0, in place of True;
returns the gradients of tokens, and of the states that segments begin with."""


def run(inputs: Sequence[Tensor], of: Sequence[Call], kept: Tensor, forward: Forward) -> list[Tensor]:
    """Return what forward gives for the tokens [T, ...] of all calls. Fills `kept`, the table of states, which is 0."""
    found: list[Tensor] = []
    for call in of:
        parts, last = forward(
            [tensor[call.token_N] for tensor in inputs], call.cu_seqlens, _begins(call, kept), _keeps(call)
        )
        found = _put(parts, found, call, len(inputs[0]))
        if last is not None:
            kept[call.row_K] = last[call.parent_K]
    return found


def run_backward(saved: Sequence[Tensor], of: Sequence[Call], kept: Tensor, backward: Backward) -> list[Tensor]:
    """Return the gradients of the tokens [T, ...] of all calls; `kept` as `run` has filled it."""
    found: list[Tensor] = []
    of_kept = torch.zeros_like(kept)
    for call in reversed(of):
        of_last = None
        if _keeps(call):
            of_last = kept.new_zeros(len(call.cu_seqlens), *kept.shape[1:])
            of_last[call.parent_K] = of_kept[call.row_K]
        given = [tensor[call.token_N] for tensor in saved]
        parts, of_begins = backward(given, call.cu_seqlens, _begins(call, kept), of_last)
        found = _put(parts, found, call, len(saved[0]))
        if call.begins is not None and of_begins is not None:
            of_kept.index_add_(0, call.begins, of_begins)
    return found


def _put(parts: Sequence[Tensor], found: list[Tensor], call: Call, num_tokens: int) -> list[Tensor]:
    """Write a call's tokens into those of all calls, which the first call makes."""
    found = found or [tensor.new_empty(num_tokens, *tensor.shape[1:]) for tensor in parts]
    for whole, part in zip(found, parts, strict=True):
        whole[call.token_N] = part
    return found


def _begins(call: Call, kept: Tensor) -> Tensor | None:
    return None if call.begins is None else kept[call.begins]


def _keeps(call: Call) -> bool:
    return len(call.row_K) > 0
