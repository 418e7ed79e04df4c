"""Samples of a packed microbatch are divided between the two kernels; here these are plain operations in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention import (
    PlainKernel,
    kernels_in_plain_operations,
    masked_softmax,
    one_by_one,
    packed_qkv,
    plain,
    span_rows,
)
from tests.factories import present
from tinker_server.backends.kernels import varlen_attention as packed
from tinker_server.backends.kernels.flash_attention import Span
from tinker_server.backends.kernels.plain_attention import plain_attention
from tinker_server.backends.kernels.varlen_attention import packed_attention, round_up_length
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.model import attention

HEADS, KEY_HEADS, SIZE = 4, 2, 8
SCALE = 0.3
LONG = 512
SPAN_ROWS = span_rows(LONG)
WINDOWS = (1, 2, 127, 128, 129, LONG - 1, LONG, 10 * LONG)


class Attention(torch.nn.Module):
    """The attributes of a layer that transformers' attention reads."""

    is_causal = True
    num_key_value_groups = HEADS // KEY_HEADS


def per_sample_attention() -> Callable[..., tuple[Tensor, None]]:
    """As transformers finds it."""
    name = attention.implementation(torch.device("cpu"), torch.float32)
    found: Callable[..., tuple[Tensor, None]] = ALL_ATTENTION_FUNCTIONS[name]
    return found


@pytest.fixture
def flash() -> Iterator[PlainKernel]:
    with kernels_in_plain_operations() as kernel:
        yield kernel


def row(lengths: list[int]) -> list[Tensor]:
    return packed_qkv(lengths, (HEADS, KEY_HEADS), SIZE, seed=sum(lengths))


def attend(qkv: list[Tensor], lengths: list[int]) -> Tensor:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out: Tensor = packed_attention(*qkv, cu_seqlens, cu_seqlens, max(lengths), SCALE)[0]
    return out


@pytest.mark.parametrize(
    ("lengths", "together"),
    [
        ([3, 15, 2], [[3, 15, 2]]),
        ([16], []),
        ([47], []),
        ([5, 17, 33, 4, 9, 100], [[5], [4, 9]]),
        ([64, 3, 1], [[3, 1]]),
    ],
)
def test_a_microbatch_gives_what_its_samples_give_alone_forward_and_backward(flash, lengths, together):
    qkv = row(lengths)
    attend(qkv, lengths)  # at the first use the kernels are compared
    flash.spans.clear()
    out, expected = attend(qkv, lengths), one_by_one(qkv, lengths, SCALE)
    assert flash.spans == together
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    got, wanted = (torch.autograd.grad((one * weights).sum(), qkv) for one in (out, expected))
    assert (out - expected).abs().max() < 1e-12
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()  # the log-sum-exp is float32


@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("row_of", SPAN_ROWS)
def test_every_kind_of_span_is_near_a_masked_softmax_forward_and_backward(flash, row_of, heads_first, monkeypatch):
    """The same lengths go to a GPU's kernels in tests/gpu/test_attention.py."""
    monkeypatch.setattr(packed, "LONG", LONG)
    lengths = SPAN_ROWS[row_of]
    qkv = [one.detach() for one in row(lengths)]
    if heads_first:
        qkv = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in qkv]
    for one in qkv:
        one.requires_grad_()
    grad_THD = torch.randn(qkv[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    out, lse_HT = packed_attention(*qkv, cu_seqlens, cu_seqlens, max(lengths), SCALE)
    got = [out, lse_HT, *torch.autograd.grad(out, qkv, grad_THD)]
    for one, wanted in zip(got, masked_softmax(qkv, grad_THD, lengths, SCALE), strict=True):
        assert (one - wanted).abs().max() < 1e-4  # in float32 as it is written out


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("row_of", ["several", "130 of one token", "long and short in turn", "every edge"])
def test_a_window_is_near_a_masked_softmax_and_never_reaches_into_the_sample_before(flash, row_of, window, monkeypatch):
    monkeypatch.setattr(packed, "LONG", LONG)
    lengths = SPAN_ROWS[row_of]
    qkv = [one.detach().requires_grad_() for one in row(lengths)]
    grad_THD = torch.randn(qkv[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    for cu_seqlens_host in (cu_seqlens, torch.zeros(2, dtype=torch.int32)):  # a graph's are unknown
        out, lse_HT = packed_attention(*qkv, cu_seqlens, cu_seqlens_host, max(lengths), SCALE, window)
        got = [out, lse_HT, *torch.autograd.grad(out, qkv, grad_THD)]
        for one, wanted in zip(got, masked_softmax(qkv, grad_THD, lengths, SCALE, window), strict=True):
            assert (one - wanted).abs().max() < 1e-4  # in float32 as it is written out


@pytest.mark.parametrize("row_of", ["several", "130 of one token", "long and short in turn", "every edge"])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_sinks_are_one_more_score_without_a_value_forward_and_backward(flash, row_of, window, monkeypatch):
    """Both kernels: autograd of the softmax as it is defined, in float64, is the reference."""
    monkeypatch.setattr(packed, "LONG", LONG)
    lengths = SPAN_ROWS[row_of]
    qkv, sinks_H = row(lengths), torch.tensor([-50.0, 0.3, 2.0, 6.0], dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    out, lse_HT = packed_attention(*qkv, cu_seqlens, cu_seqlens, max(lengths), SCALE, window, sinks_H)
    parts = []
    for sample in zip(*(one.split(lengths) for one in qkv), strict=True):
        mask = torch.ones(len(sample[0]), len(sample[0]), dtype=torch.bool).tril()
        mask = mask if window is None else mask.triu(1 - window)
        parts.append(plain_attention([one.transpose(0, 1)[None] for one in sample], mask, SCALE, None, sinks_H)[0])
    expected = torch.cat(parts)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    got, wanted = (torch.autograd.grad((one * weights).sum(), qkv) for one in (out, expected))
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        assert (one - other).norm() < 2e-6 * other.norm() + 1e-6  # the log-sum-exp is float32
    without = packed_attention(*qkv, cu_seqlens, cu_seqlens, max(lengths), SCALE, window)
    assert (without[0][:, 0] - out[:, 0]).abs().max() < 1e-6  # a sink far below the scores
    assert (without[0][:, 3] - out[:, 3]).norm() > 0.5 * without[0][:, 3].norm()
    assert (lse_HT >= without[1]).all() and (lse_HT[1:] > without[1][1:]).all()


def test_a_window_that_no_sample_fills_leaves_long_samples_to_their_own_kernel(flash):
    qkv = row([40, 5])
    cu_seqlens = torch.tensor([0, 40, 45], dtype=torch.int32)
    for window, windows in ((39, [39]), (40, [None])):
        attend(qkv, [40, 5])  # kernels are compared at their first use
        packed_attention(*qkv, cu_seqlens, cu_seqlens, 40, SCALE, window)
        assert flash.windows[-len(windows) :] == windows
        assert flash.spans[-1] == ([40, 5] if windows == [39] else [5])


@pytest.mark.parametrize("window", [1, 100])
@pytest.mark.parametrize("fault", ["one token more", "other tokens in backward"])
def test_a_kernel_whose_windows_are_wrong_stops_the_trainer(fault, window, flash, monkeypatch):
    forward, backward = flash.forward, flash.backward

    def wrong(span: Span, by: int) -> Span:
        return replace(span, window=max(1, present(span.window) + by)) if span.window == window else span

    if fault == "one token more":
        monkeypatch.setattr(flash, "forward", lambda qkv, span, scale: forward(qkv, wrong(span, 1), scale))
    else:
        monkeypatch.setattr(
            flash, "backward", lambda grad, saved, span, scale: backward(grad, saved, wrong(span, 9), scale)
        )
    with pytest.raises(BackendFailed, match=f"FlashAttention with a window of {window} tokens is .* away from its def"):
        packed_attention(*row([40]), *(torch.tensor([0, 40], dtype=torch.int32),) * 2, 40, SCALE, 7)


@pytest.mark.parametrize("row_of", SPAN_ROWS)
def test_attention_sample_by_sample_on_the_cpu_is_near_the_same_masked_softmax(row_of):
    lengths = SPAN_ROWS[row_of]
    qkv = [one.detach().float().requires_grad_() for one in row(lengths)]
    grad_THD = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    module = Attention()
    heads_first = [one.transpose(0, 1)[None] for one in qkv]
    out, _ = per_sample_attention()(module, *heads_first, None, packed_cu_seqlens_host=bounds, scaling=SCALE)
    got = [out[0], *torch.autograd.grad(out[0], qkv, grad_THD)]
    out_wanted, _, *wanted = masked_softmax(qkv, grad_THD, lengths, SCALE)
    for one, other in zip(got, [out_wanted, *wanted], strict=True):
        assert (one - other).abs().max() < 1e-4


def test_adjacent_tokens_keep_their_layout(flash):
    qkv = [tensor.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for tensor in row([40, 5])]
    assert qkv[0].stride(0) < qkv[0].stride(1)
    out, expected = attend(qkv, [40, 5]), one_by_one(qkv, [40, 5], SCALE)
    got, wanted = (torch.autograd.grad(one.square().sum(), qkv) for one in (out, expected))
    for one, other in zip([out, *got], [expected, *wanted], strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()
    assert packed._cudnn_serves.cache_info().currsize == 1


def test_high_scores_leave_no_trace_in_padding(flash):
    qkv = row([41])
    with torch.no_grad():
        for tensor in qkv:
            tensor.mul_(40)  # exp(score) alone would be infinite
    out, expected = attend(qkv, [41]), one_by_one(qkv, [41], SCALE)
    got, wanted = (torch.autograd.grad(one.sum(), qkv) for one in (out, expected))
    for one, other in zip(got, wanted, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).norm() < 1e-3 * max(tensor.norm() for tensor in wanted)


def test_a_kernel_that_differs_or_breaks_is_not_used_and_the_log_says_so(flash, monkeypatch, caplog):
    def off(*tensors: Any) -> tuple[Tensor, Tensor]:
        out, lse = plain(*tensors)
        return out * 1.05, lse

    def broken(*_: object) -> None:
        raise RuntimeError("no kernel for this")

    for kernel, said in ((off, "relative error 0.05 against FlashAttention"), (broken, "no kernel for this")):
        monkeypatch.setattr(packed, "_cudnn_forward", kernel)
        packed._cudnn_serves.cache_clear()
        caplog.clear()
        flash.spans.clear()
        qkv = row([20, 30])
        assert (attend(qkv, [20, 30]) - one_by_one(qkv, [20, 30], SCALE)).abs().max() < 1e-12
        assert [20, 30] in flash.spans
        assert said in caplog.text


def test_a_microbatch_whose_lengths_only_the_device_knows_has_no_long_sample(flash):
    """However long the longest may be: a graph's is as long as its microbatch."""
    for lengths, longest in (([5, 7], 7), ([5, 7], 12), ([15, 5, 12], 32)):
        qkv = row(lengths)
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        unknown = torch.zeros(2, dtype=torch.int32)
        out, _ = packed_attention(*qkv, cu_seqlens, unknown, longest, SCALE)
        expected = one_by_one(qkv, lengths, SCALE)
        assert (out - expected).abs().max() < 1e-12
        got, wanted = (torch.autograd.grad(one.square().sum(), qkv) for one in (out, expected))
        assert all((one - other).abs().max() < 1e-12 for one, other in zip(got, wanted, strict=True))


def test_samples_are_padded_by_an_eighth_at_most_and_to_few_lengths():
    lengths = [*range(1, 70_000, 7)]
    padded = [round_up_length(length) for length in lengths]
    assert all(length <= size < 1.125 * length + 1 for length, size in zip(lengths, padded, strict=True))
    assert len({size for size in padded if 4096 <= size <= 65536}) == 4 * 8 + 1


def test_the_operator_can_be_compiled(flash):
    qkv = [one.detach().float().requires_grad_() for one in row([20, 3])]
    cu_seqlens = torch.tensor([0, 20, 23], dtype=torch.int32)
    for window, sinks_H in ((None, None), (5, None), (5, torch.randn(HEADS))):
        torch.library.opcheck(packed_attention, (*qkv, cu_seqlens, cu_seqlens, 20, SCALE, window, sinks_H))
