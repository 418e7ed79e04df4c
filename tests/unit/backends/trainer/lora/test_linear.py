"""The operators of LoRA's linears against the functions that eager code on a CPU calls in their place."""

import torch
from torch import Tensor

from backends.trainer.lora import linear

T, R, SIZES = 7, 3, (5, 4)


def outputs_and_gradients(*, compiled: bool) -> list[Tensor]:
    """Those of two linears of one x, in eager code or as compiled code calls them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = random(2, T, 6).requires_grad_()
    weights, as_RI, bs_RO = [random(o, 6) for o in SIZES], [random(R, 6) for _ in SIZES], [random(R, o) for o in SIZES]
    grad_as, grad_bs = [torch.zeros_like(a) for a in as_RI], [torch.zeros_like(b) for b in bs_RO]
    scales_TR = torch.rand(2 * T, R, generator=generator).round()
    function = linear._linears_operator if compiled else linear.lora_linears
    *ys, inner = function(x, weights, as_RI, bs_RO, grad_as, grad_bs, scales_TR)
    torch.autograd.backward(ys, [random(2, T, o) for o in SIZES])
    assert x.grad is not None
    return [*ys, inner, x.grad, *grad_as, *grad_bs]


def test_eager_linears_and_their_gradients_are_bitwise_those_of_the_operator():
    for eager, operator in zip(
        outputs_and_gradients(compiled=False), outputs_and_gradients(compiled=True), strict=True
    ):
        assert eager.any()
        assert torch.equal(eager, operator)


def test_eager_linears_call_no_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs_and_gradients(compiled=False)
    assert not [event.key for event in profile.key_averages() if event.key.startswith("tinker_server::")]
