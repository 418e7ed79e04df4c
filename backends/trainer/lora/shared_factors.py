"""The factors that all experts of a layer share, on the hidden side: products once a token, not once for each expert.

As operators, for the reasons of `linear.py`.

T tokens of a microbatch, I inputs of A and O outputs of B, R summed ranks of the microbatch's models, N = R for each of
some matrices
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tinker_server.backends.kernels.autograd import Context
from tinker_server.backends.trainer.lora.linear import add_product, apply_scales


@torch.library.custom_op("tinker_server::multiply_a", mutates_args=())
def multiply_a(
    x_TI: Tensor,
    as_RI: Sequence[Tensor],
    grad_as_RI: Sequence[Tensor],  # noqa: ARG001 - kept for backward
    scales_TR: Tensor,
) -> Tensor:
    """Return the scaled inner products [T, N] of the same x. Backward adds to `grad_as_RI`."""
    return apply_scales(x_TI @ torch.cat(list(as_RI)).T, scales_TR)


@torch.library.custom_op("tinker_server::multiply_a_backward", mutates_args=("grad_as_RI",))
def multiply_a_backward(
    grad_inner_TN: Tensor, x_TI: Tensor, as_RI: Sequence[Tensor], grad_as_RI: Sequence[Tensor], scales_TR: Tensor
) -> Tensor:
    """Return the gradient of x [T, I]; accumulate those of A."""
    grad_scaled_TN = apply_scales(grad_inner_TN.clone(), scales_TR)
    for grad_a_RI, grad_TR in zip(grad_as_RI, grad_scaled_TN.chunk(len(as_RI), 1), strict=True):
        add_product(grad_a_RI, grad_TR, x_TI)
    return grad_scaled_TN @ torch.cat(list(as_RI))


@torch.library.custom_op("tinker_server::multiply_b", mutates_args=())
def multiply_b(
    inner_TR: Tensor,
    b_RO: Tensor,
    grad_b_RO: Tensor,  # noqa: ARG001 - kept for backward
    scales_TR: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return [T, O] of inner products [T, R], and these scaled, for backward, which adds to `grad_b_RO`."""
    scaled_TR = apply_scales(inner_TR.clone(), scales_TR)
    return scaled_TR @ b_RO, scaled_TR


@torch.library.custom_op("tinker_server::multiply_b_backward", mutates_args=("grad_b_RO",))
def multiply_b_backward(
    grad_y_TO: Tensor, b_RO: Tensor, grad_b_RO: Tensor, scales_TR: Tensor, scaled_TR: Tensor
) -> Tensor:
    """Return the gradient of the inner products [T, R]; accumulate that of B."""
    add_product(grad_b_RO, scaled_TR, grad_y_TO)
    return apply_scales(grad_y_TO @ b_RO.T, scales_TR)


class _SharedAContext(Context, Protocol):
    num_matrices: int


def save_for_a_gradient(
    ctx: _SharedAContext,
    inputs: tuple[Tensor, list[Tensor], list[Tensor], Tensor],
    output: Tensor,  # noqa: ARG001
) -> None:
    """Save what `backpropagate_a` needs of `multiply_a`: torch's `setup_context`."""
    x_TI, as_RI, grad_as_RI, scales_TR = inputs
    ctx.num_matrices = len(as_RI)
    ctx.save_for_backward(x_TI, scales_TR, *as_RI, *grad_as_RI)


def backpropagate_a(ctx: _SharedAContext, grad_inner_TN: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    x_TI, scales_TR, *tensors = ctx.saved_tensors
    as_RI, grad_as_RI = tensors[: ctx.num_matrices], tensors[ctx.num_matrices :]
    nothing = [None] * ctx.num_matrices
    return multiply_a_backward(grad_inner_TN, x_TI, as_RI, grad_as_RI, scales_TR), nothing, nothing, None


def save_for_b_gradient(ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what `backpropagate_b` needs of `multiply_b`: torch's `setup_context`."""
    ctx.save_for_backward(*inputs[1:], output[1])


def backpropagate_b(ctx: Context, grad_y_TO: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return multiply_b_backward(grad_y_TO.contiguous(), *ctx.saved_tensors), None, None, None


@multiply_a.register_fake
def _(x_TI: Tensor, as_RI: Sequence[Tensor], *_: Sequence[Tensor] | Tensor) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], sum(a_RI.shape[0] for a_RI in as_RI))


@multiply_a_backward.register_fake
def _(_grad_inner_TN: Tensor, x_TI: Tensor, *_: Sequence[Tensor] | Tensor) -> Tensor:
    return torch.empty_like(x_TI)


@multiply_b.register_fake
def _(inner_TR: Tensor, b_RO: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return inner_TR.new_empty(inner_TR.shape[0], b_RO.shape[1]), torch.empty_like(inner_TR)


@multiply_b_backward.register_fake
def _(grad_y_TO: Tensor, b_RO: Tensor, *_: Tensor) -> Tensor:
    return grad_y_TO.new_empty(grad_y_TO.shape[0], b_RO.shape[0])


multiply_a.register_autograd(backpropagate_a, setup_context=save_for_a_gradient)
multiply_b.register_autograd(backpropagate_b, setup_context=save_for_b_gradient)
