"""Attention of packed microbatches on CUDA, against a masked softmax in float32: every kind of span.

pytest tests/gpu/test_attention.py
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.attention import masked_softmax, span_rows
from tests.tries import datums_of
from tinker_server.backends.kernels.plain_attention import plain_attention
from tinker_server.backends.kernels.shared_prefix import tables
from tinker_server.backends.kernels.varlen_attention import LONG, _cudnn_serves, packed_attention
from tinker_server.backends.trainer.model.shared_prefixes import Prefixes

pytestmark = pytest.mark.gpu
ROWS = span_rows(LONG)


def random_row(lengths: list[int], heads: tuple[int, int, int], *, heads_first: bool) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    num_heads, num_key_heads, size = heads
    generator = torch.Generator("cuda").manual_seed(sum(lengths))
    *qkv, grad_THD = (
        torch.randn(sum(lengths), number, size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for number in (num_heads, num_key_heads, num_key_heads, num_heads)
    )
    if heads_first:
        qkv = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in qkv]
    return [*qkv, grad_THD]


HEADS = [(32, 8, 128), (16, 16, 64), (4, 2, 16)]
WINDOWS = (1, 2, 127, 128, 129, 1024, LONG - 1, LONG, 10 * LONG)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("row", ROWS)
def test_every_kind_of_span_is_near_a_masked_softmax_forward_and_backward(row, heads, heads_first):
    lengths = ROWS[row]
    *qkv, grad_THD = random_row(lengths, heads, heads_first=heads_first)
    if torch.cuda.get_device_capability() >= (9, 0):
        like = (qkv[0].device, torch.bfloat16, qkv[0].shape[1:], heads[1])
        assert _cudnn_serves(*like, heads_first=heads_first)
    near_a_masked_softmax(qkv, grad_THD, lengths)


@pytest.mark.parametrize("heads", [*HEADS, (8, 4, 256), (64, 8, 64)], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("row", ["every edge", "several", "130 of one token between long ones"])
def test_windows_are_near_a_masked_softmax_and_never_reach_into_the_sample_before(row, window, heads):
    lengths = ROWS[row]
    *qkv, grad_THD = random_row(lengths, heads, heads_first=False)
    near_a_masked_softmax(qkv, grad_THD, lengths, window)


@pytest.mark.parametrize("heads", [(64, 8, 64), (4, 2, 16)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("row", ["every edge", "several", "130 of one token between long ones"])
def test_sinks_are_near_a_masked_softmax_with_one_more_score(row, window, heads):
    lengths = ROWS[row]
    *qkv, grad_THD = random_row(lengths, heads, heads_first=False)
    sinks_H = torch.linspace(-3, 6, heads[0], device="cuda", dtype=torch.bfloat16)
    near_a_masked_softmax(qkv, grad_THD, lengths, window, sinks_H)


@pytest.mark.parametrize("heads", [(8, 4, 256), (16, 8, 128), (4, 2, 32)], ids=str)
@pytest.mark.parametrize("window", [None, 256, 1024])
@pytest.mark.parametrize("others", [[700, 3], [LONG, 1]], ids=str)
def test_images_whose_tokens_see_each_other_are_near_their_definition(others, window, heads):
    """Three images in each of two samples, beside others: output, and gradients by autograd in float32."""
    lengths = [3 * 262 + 50, *others, 3 * 262 + 1]
    *qkv, grad_THD = random_row(lengths, heads, heads_first=False)
    begins = torch.tensor([0, *lengths]).cumsum(0)
    firsts = [begins[sample].item() + 3 + 262 * number for sample in (0, 3) for number in range(3)]
    images_IF = torch.tensor(firsts)[:, None] + torch.arange(256)
    bounds, scale = begins.to(torch.int32), heads[2] ** -0.5
    for tensor in qkv:
        tensor.requires_grad_()
    images = images_IF.flatten().cuda()
    out, _ = packed_attention(*qkv, bounds.cuda(), bounds, max(lengths), scale, window, None, images, 256)
    got = [out, *torch.autograd.grad(out, qkv, grad_THD)]
    image_T = torch.full((sum(lengths),), -1)
    image_T[images_IF] = torch.arange(len(images_IF))[:, None]
    floats, parts = [one.detach().float().requires_grad_() for one in qkv], []
    for begin, end in pairwise(begins.tolist()):
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        mask = mask if window is None else mask.triu(1 - window)
        own_T = image_T[begin:end]
        mask |= (own_T[:, None] == own_T) & (own_T >= 0)
        sample = [one[begin:end].transpose(0, 1)[None] for one in floats]
        parts.append(plain_attention(sample, mask.cuda(), scale, None, None)[0])
    expected = torch.cat(parts)
    wanted = [expected, *torch.autograd.grad(expected, floats, grad_THD.float())]
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


TRIES = {
    "a group": ((130, 64), (130, 3), (130, 1)),
    "groups": ((1024, 256), (1024, 255), (1024, 1), (300, 17), (300, 200), (77,)),
    "five levels": ((300, 250, 200, 150, 9), (300, 250, 200, 150, 8), (300, 250, 200, 3), (300, 250, 1), (300, 1)),
    "long prefixes": ((LONG + 5, 40), (LONG + 5, 300), (LONG + 5, LONG + 1)),
}
"""Texts of each datum; equal beginnings of their lengths are equal texts."""


@pytest.mark.parametrize("heads", [*HEADS, (8, 4, 256), (64, 8, 64)], ids=str)
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("trie", TRIES)
def test_prefixes_that_are_packed_once_are_near_a_masked_softmax_of_each_whole_sample(trie, heads, heads_first):
    datums = datums_of(*TRIES[trie])
    found = Prefixes(datums).trie(range(len(datums)))
    assert found.spans()
    lengths = [end - begin for begin, end in pairwise(found.begins)]
    *qkv, _ = random_row(lengths, heads, heads_first=heads_first)
    rows = [torch.from_numpy(found.tokens_of(number)).cuda() for number in range(len(datums))]
    generator = torch.Generator("cuda").manual_seed(1)
    grads = [torch.randn(len(row), heads[0], heads[2], device="cuda", generator=generator) for row in rows]
    summed = torch.zeros_like(qkv[0], dtype=torch.float32).index_add(0, torch.cat(rows), torch.cat(grads))
    grad_THD = summed.bfloat16()
    bounds, (flat, table) = torch.tensor(found.begins, dtype=torch.int32), tables(found.spans())
    scale = heads[2] ** -0.5
    for tensor in qkv:
        tensor.requires_grad_()
    shared = flat.cuda(), table
    out, _ = packed_attention(*qkv, bounds.cuda(), bounds, max(lengths), scale, None, None, None, 0, *shared)
    got = [out, *torch.autograd.grad(out, qkv, grad_THD)]
    floats = [tensor.detach().float().requires_grad_() for tensor in qkv]
    expected, seen = torch.zeros_like(floats[0]), torch.zeros(found.num_tokens, dtype=torch.bool, device="cuda")
    for row in rows:
        whole = plain_attention([one[row].transpose(0, 1)[None] for one in floats], None, scale, None, None)[0]
        new = ~seen[row]
        expected = expected.index_copy(0, row[new], whole[new])
        seen[row] = True
    wanted = [expected, *torch.autograd.grad(expected, floats, grad_THD.float())]
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()


def near_a_masked_softmax(
    qkv: list[Tensor],
    grad_THD: Tensor,
    lengths: list[int],
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> None:
    """Compare the output, the log-sum-exp and the three gradients, with the lengths known on the host and, as in a
    graph, on the device alone."""
    scale = qkv[0].shape[2] ** -0.5
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    for tensor in qkv:
        tensor.requires_grad_()
    wanted = masked_softmax(qkv, grad_THD, lengths, scale, window, sinks_H)
    for host_bounds in (bounds, torch.zeros(2, dtype=torch.int32)):
        out, lse_HT = packed_attention(*qkv, bounds.cuda(), host_bounds, max(lengths), scale, window, sinks_H)
        # The log-sum-exp is of scores in float32; 2e-5 nats was seen on one H100.
        assert (lse_HT - wanted[1]).abs().max() < 1e-3
        got = [out, *torch.autograd.grad(out, qkv, grad_THD)]
        norms = [[part.float().norm() for part in one.split(lengths)] for one in (grad_THD, wanted[0])]
        for name, one, other in zip(("out", "query", "key", "value"), got, [wanted[0], *wanted[2:]], strict=True):
            for number, (part, whole) in enumerate(zip(one.split(lengths), other.split(lengths), strict=True)):
                # 0.003 is usual on an H100; a neighbour's token in a sample is off by far more. The gradients of query
                # and key of a sample of one token, or with a window of one, are 0.
                error, size = (part - whole).norm(), whole.norm()
                # 0.012 of the keys' of samples of two tokens and heads of 16 values.
                bound = 0.02 * size + 1e-3 + 1e-5 * whole.numel() ** 0.5
                if sinks_H is not None and len(part) <= 2:
                    # Backward subtracts the product of the output, which is rounded, and its gradient from a number
                    # that is hardly larger if most of the softmax is one token's and the rest the sink's.
                    bound += torch.finfo(torch.bfloat16).eps / 2 * norms[0][number] * norms[1][number] * scale
                assert error < bound, (name, number, error, size)
