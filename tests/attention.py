"""References for the attention of packed microbatches, and a kernel in plain operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinker_server.backends.kernels import varlen_attention
from tinker_server.backends.kernels.flash_attention import Span


def span_rows(long: int) -> dict[str, list[int]]:
    """Lengths of samples, by the kind of span that they make in a microbatch.

    Samples of `long` tokens have a kernel call of their own. The others are as for one of 4,096, and shorter in
    proportion where it is less.
    """

    def part(num_tokens: int) -> int:
        return max(1, num_tokens * long // 4096)

    edges = [1, 2, 127, 128, 129, long - 1, long, long + 1]
    short, shorter, middle = part(300), part(17), part(700)
    longer = long + part(905)
    return {
        **{f"one sample of {length}": [length] for length in edges},
        "several": [short, shorter, middle],
        "all of one token": [1] * 4,
        "130 of one token": [1] * 130,
        "a row of graphs' padding": [part(40), 1, 3, part(212)],
        "one token among short ones": [short, 1, shorter],
        "one token between long ones": [long + 5, 1, long],
        "one token first": [1, long, short],
        "several of one token behind long ones": [long + part(1253), long + part(2189), 1, 1, 1, 1],
        "several of one token before a long one": [1, 1, 1, long + part(100)],
        "130 of one token between long ones": [long, *[1] * 130, long + 1],
        "several of two tokens behind a long one": [long, 2, 2, 2, 2],
        "several of three tokens behind a long one": [long, 3, 3, 3, 3],
        "one and two tokens behind a long one": [long, 1, 2, 1],
        "a long one first": [long + part(1904), short, shorter],
        "a long one last": [short, shorter, long + part(1904)],
        "a long one twice": [longer, longer],
        "long and short in turn": [short, longer, shorter, long, long + part(1904), 2, middle],
        "every edge": edges,
    }


def one_by_one(qkv: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    """[T, H, D]: causal attention of each sample alone, by torch's own, of query [T, H, D], key and value [T, G, D]."""
    parts = []
    for query, key, value in zip(*(tensor.split(lengths) for tensor in qkv), strict=True):
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def masked_softmax(
    qkv: list[Tensor],
    grad_THD: Tensor,
    lengths: list[int],
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> list[Tensor]:
    """Output [T, H, D], log-sum-exp [H, T], and the gradients of query, key and value, all in float32. A token sees
    itself and those before it, or `window` of them; a sink is one more score, without a value.

    Written out as it is defined, sample by sample and key head by key head, with no attention kernel and no autograd.
    """
    floats = [tensor.detach().float() for tensor in (*qkv, grad_THD)]
    found = [torch.zeros_like(tensor) for tensor in (floats[0], *floats[:3])]
    lse_HT = floats[0].new_zeros(floats[0].shape[1], len(floats[0]))
    group = floats[0].shape[1] // floats[1].shape[1]
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for begin, end in pairwise(bounds):
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool, device=lse_HT.device).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        for key_head in range(floats[1].shape[1]):
            heads = slice(key_head * group, (key_head + 1) * group)
            query_HTD, grad_HTD = (one[begin:end, heads].transpose(0, 1) for one in (floats[0], floats[3]))
            key_TD, value_TD = (one[begin:end, key_head] for one in floats[1:3])
            scores_HTT = (scale * query_HTD @ key_TD.T).masked_fill_(hidden, -torch.inf)
            if sinks_H is not None:
                sinks = sinks_H[heads, None, None].float().expand(-1, end - begin, 1)
                scores_HTT = torch.cat([scores_HTT, sinks], -1)
            lse_HT[heads, begin:end] = scores_HTT.logsumexp(-1)
            weights_HTT = scores_HTT.softmax(-1)[..., : end - begin]
            del scores_HTT
            out_HTD = weights_HTT @ value_TD
            grad_scores_HTT = grad_HTD @ value_TD.T
            grad_scores_HTT.sub_((grad_HTD * out_HTD).sum(-1, keepdim=True)).mul_(weights_HTT).mul_(scale)
            found[0][begin:end, heads] = out_HTD.transpose(0, 1)
            found[1][begin:end, heads] = (grad_scores_HTT @ key_TD).transpose(0, 1)
            found[2][begin:end, key_head] = (grad_scores_HTT.mT @ query_HTD).sum(0)
            found[3][begin:end, key_head] = (weights_HTT.mT @ grad_HTD).sum(0)
    return [found[0], lse_HT, *found[1:]]


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> tuple[Tensor, Tensor]:
    """[..., H, T, D] and [..., H, T, 1]: causal attention as it is defined."""
    key, value = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for tensor in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if window is not None:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril(-window), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)


def plain_backward(saved: list[Tensor], scale: float, window: int | None = None) -> tuple[Tensor, ...]:
    """By the saved log-sum-exp, as kernels do (arXiv 2205.14135, algorithm 4)."""
    grad, query, key, value, out, lse = saved
    keys, values = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for tensor in (key, value))
    weights = (scale * query @ keys.transpose(-1, -2) - lse).exp().tril()
    weights = weights if window is None else weights.triu(1 - window)
    grad_scores = weights * (grad @ values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    grouped = [
        tensor.unflatten(-3, (key.shape[-3], -1)).sum(-3)
        for tensor in (grad_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad)
    ]
    return grad_scores @ keys, *grouped


def plain_across(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `plain`, without a mask."""
    key, value = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for tensor in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)


def plain_across_backward(saved: list[Tensor], scale: float) -> tuple[Tensor, ...]:
    """As `plain_backward`, without a mask."""
    grad, query, key, value, out, lse = saved
    keys, values = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for tensor in (key, value))
    weights = (scale * query @ keys.transpose(-1, -2) - lse).exp()
    grad_scores = weights * (grad @ values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    grouped = [
        tensor.unflatten(-3, (key.shape[-3], -1)).sum(-3)
        for tensor in (grad_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad)
    ]
    return grad_scores @ keys, *grouped


class PlainKernel:
    """Replaces FlashAttention, in the precision of what it is given."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []
        self.windows: list[int | None] = []
        self.widths: list[set[int]] = []

    def forward(self, qkv: list[Tensor], span: Span, scale: float) -> tuple[Tensor, Tensor]:
        bounds = span.cu_seqlens.tolist()
        self.spans.append([end - begin for begin, end in pairwise(bounds)])
        assert max(self.spans[-1]) <= span.longest
        self.windows.append(span.window)
        self.widths.append({one.shape[-1] for one in qkv})
        found = []
        for begin, end, first, last in self._bounds(span):
            query, key, value = qkv[0][begin:end], qkv[1][first:last], qkv[2][first:last]
            own = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
            is_causal = span.cu_keys is None
            found.append(plain(*own, scale, span.window) if is_causal else plain_across(*own, scale))
        return torch.cat([out.transpose(0, 1) for out, _ in found]), torch.cat([lse[..., 0] for _, lse in found], 1)

    def backward(self, grad_THD: Tensor, saved: list[Tensor], span: Span, scale: float) -> tuple[Tensor, ...]:
        query, key, value, out, lse = saved
        found = []
        for begin, end, first, last in self._bounds(span):
            parts = grad_THD[begin:end], query[begin:end], key[first:last], value[first:last], out[begin:end]
            rows = [*(tensor.transpose(0, 1) for tensor in parts), lse[:, begin:end, None]]
            is_causal = span.cu_keys is None
            gradients = plain_backward(rows, scale, span.window) if is_causal else plain_across_backward(rows, scale)
            found.append([gradient.transpose(0, 1) for gradient in gradients])
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def _bounds(self, span: Span) -> list[tuple[int, int, int, int]]:
        """First and last query and key of each sample."""
        queries = span.cu_seqlens.tolist()
        keys = queries if span.cu_keys is None else span.cu_keys.tolist()
        lengths = [end - begin for begin, end in pairwise(keys)]
        assert span.cu_keys is None or max(lengths) == span.longest_keys
        return [(*own, *seen) for own, seen in zip(pairwise(queries), pairwise(keys), strict=True)]


@contextmanager
def kernels_in_plain_operations() -> Iterator[PlainKernel]:
    """The operator's two kernels are plain operations, and samples of 16 tokens are long."""
    kernel = PlainKernel()
    checks = (
        varlen_attention._cudnn_serves,
        varlen_attention._require_windows,
        varlen_attention._require_images,
        varlen_attention._require_prefixes,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_attention, "LONG", 16)
        patch.setattr(varlen_attention, "_flash", kernel)
        patch.setattr(varlen_attention, "_cudnn_forward", plain)
        patch.setattr(varlen_attention, "_cudnn_backward", plain_backward)
        for check in checks:
            check.cache_clear()
        yield kernel
        for check in checks:
            check.cache_clear()


def packed_qkv(lengths: list[int], heads: tuple[int, int], size: int, seed: int) -> list[Tensor]:
    """Random query, key and value of a packed microbatch; `heads` are those of queries and of keys."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(lengths), number, size, dtype=torch.float64, generator=generator).requires_grad_()
        for number in (heads[0], heads[1], heads[1])
    ]
