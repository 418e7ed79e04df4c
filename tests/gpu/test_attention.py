"""Attention of packed rows on CUDA, against a masked softmax in float32: every kind of span that a row is cut into.

pytest tests/gpu/test_attention.py
"""

import pytest
import torch
from torch import Tensor

from backends.kernels.varlen_attention import LONG, _cudnn_serves, packed_attention
from tests.attention import masked_softmax

pytestmark = pytest.mark.gpu
EDGES = [1, 2, 127, 128, 129, LONG - 1, LONG, LONG + 1]
ROWS = {
    **{f"one sample of {length}": [length] for length in EDGES},
    "several": [300, 17, 700],
    "all of one token": [1] * 4,
    "130 of one token": [1] * 130,
    "a row of graphs' padding": [40, 1, 3, 212],
    "one token among short ones": [300, 1, 17],
    "one token between long ones": [LONG + 5, 1, LONG],
    "one token first": [1, LONG, 300],
    "several of one token behind long ones": [5349, 6285, 1, 1, 1, 1],
    "several of one token before a long one": [1, 1, 1, LONG + 100],
    "130 of one token between long ones": [LONG, *[1] * 130, LONG + 1],
    "several of two tokens behind a long one": [LONG, 2, 2, 2, 2],
    "several of three tokens behind a long one": [LONG, 3, 3, 3, 3],
    "one and two tokens behind a long one": [LONG, 1, 2, 1],
    "a long one first": [6000, 300, 17],
    "a long one last": [300, 17, 6000],
    "a long one twice": [LONG + 905, LONG + 905],
    "long and short in turn": [300, LONG + 905, 17, LONG, 6000, 2, 700],
    "every edge": EDGES,
}


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


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 16, 64), (4, 2, 16)], ids=str)
@pytest.mark.parametrize("heads_first", [False, True], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("row", ROWS)
def test_every_kind_of_span_is_near_a_masked_softmax_forward_and_backward(row, heads, heads_first):
    lengths = ROWS[row]
    *qkv, grad_THD = random_row(lengths, heads, heads_first=heads_first)
    if torch.cuda.get_device_capability() >= (9, 0):
        like = (qkv[0].device, torch.bfloat16, qkv[0].shape[1:], heads[1])
        assert _cudnn_serves(*like, heads_first=heads_first)
    scale = heads[2] ** -0.5
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    for tensor in qkv:
        tensor.requires_grad_()
    out, lse_HT = packed_attention(*qkv, bounds.cuda(), bounds, max(lengths), scale)
    out_wanted, lse_wanted, *wanted = masked_softmax(qkv, grad_THD, lengths, scale)
    # The log-sum-exp is of scores in float32; 2e-5 nats was seen on one H100.
    assert (lse_HT - lse_wanted).abs().max() < 1e-3
    got = torch.autograd.grad(out, qkv, grad_THD)
    for name, one, other in zip(("out", "query", "key", "value"), [out, *got], [out_wanted, *wanted], strict=True):
        for number, (part, whole) in enumerate(zip(one.split(lengths), other.split(lengths), strict=True)):
            # 0.003 is usual on an H100; a neighbour's token in a sample is off by far more. The gradients of query and
            # key of a sample of one token are 0.
            error, size = (part - whole).norm(), whole.norm()
            # 0.012 of the keys' of samples of two tokens and heads of 16 values.
            assert error < 0.02 * size + 1e-3, (name, number, error, size)
