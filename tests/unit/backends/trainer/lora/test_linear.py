"""The operators of LoRA's linears against the functions that eager code on a CPU calls in their place, and against
closed forms."""

import pytest
import torch
from torch import Tensor

from tinker_server.backends.families.rows import Rows
from tinker_server.backends.trainer.lora import linear

T, R, SIZES = 7, 3, (5, 12, 4)
ADAPTERS = [
    [(0, Rows(0, 5)), (1, Rows(0, 12)), (2, Rows(0, 4))],
    [(0, Rows(1, 2)), (0, Rows(2, 4)), (1, Rows(0, 1, 3)), (1, Rows(2, 4, 3))],
    [(0, Rows(0, 5)), (0, Rows(0, 2)), (0, Rows(4, 5)), (1, Rows(0, 12)), (1, Rows(1, 3, 3)), (2, Rows(0, 4))],
    [],
]
"""Each linear's: of all rows, of some, in one run or in several blocks, or none at all."""


def outputs_and_gradients(adapters: list[tuple[int, Rows]], *, compiled: bool) -> list[Tensor]:
    """Those of three linears of one x, in eager code or as compiled code calls them."""
    random = numbers()
    x = random(2, T, 6).requires_grad_()
    weights = [random(o, 6) for o in SIZES]
    as_RI, bs_RO = [random(R, 6) for _ in adapters], [random(R, len(rows)) for _, rows in adapters]
    grad_as, grad_bs = [torch.zeros_like(a) for a in as_RI], [torch.zeros_like(b) for b in bs_RO]
    scales_TR = random(2 * T, R).round()
    places = [number for index, rows in adapters for number in (index, rows.begin, rows.end, rows.num_blocks)]
    function = linear._linears_operator if compiled else linear.lora_linears
    *ys, _ = function(x, weights, as_RI, bs_RO, grad_as, grad_bs, scales_TR, places, list(SIZES))
    torch.autograd.backward(ys, [random(2, T, o) for o in SIZES])
    assert x.grad is not None
    return [*ys, x.grad, *grad_as, *grad_bs]


def by_autograd(adapters: list[tuple[int, Rows]]) -> list[Tensor]:
    """The same by whole matrices, in which each row is written by its index."""
    random = numbers()
    x = random(2, T, 6).requires_grad_()
    weights = [random(o, 6) for o in SIZES]
    as_RI = [random(R, 6).requires_grad_() for _ in adapters]
    bs_RO = [random(R, len(rows)).requires_grad_() for _, rows in adapters]
    scales_TR = random(2 * T, R).round().view(2, T, R)
    ys = [x @ weight.T for weight in weights]
    for (index, rows), a_RI, b_RO in zip(adapters, as_RI, bs_RO, strict=True):
        size = SIZES[index] // rows.num_blocks
        places = [block * size + row for block in range(rows.num_blocks) for row in range(rows.begin, rows.end)]
        part = (x @ a_RI.T * scales_TR) @ b_RO
        ys[index] = ys[index].index_add(2, torch.tensor(places), part)
    torch.autograd.backward(ys, [random(2, T, o) for o in SIZES])
    return [*ys, *(leaf.grad for leaf in (x, *as_RI, *bs_RO) if leaf.grad is not None)]


def numbers():
    """Return random numbers in the order of the calls."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("adapters", ADAPTERS)
def test_rows_of_linears_get_their_adapters_and_gradients_as_by_autograd(adapters):
    found = outputs_and_gradients(adapters, compiled=False)
    torch.testing.assert_close(found, by_autograd(adapters), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adapters", ADAPTERS)
def test_eager_linears_and_their_gradients_are_bitwise_those_of_the_operator(adapters):
    for eager, operator in zip(
        outputs_and_gradients(adapters, compiled=False), outputs_and_gradients(adapters, compiled=True), strict=True
    ):
        assert eager.any()
        assert torch.equal(eager, operator)


def test_eager_linears_call_no_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs_and_gradients(ADAPTERS[0], compiled=False)
    assert not [event.key for event in profile.key_averages() if event.key.startswith("tinker_server::")]
