"""Products of (token, expert) pairs with their expert's matrix, as operators that accumulate adapters' gradients.

S (token, expert) pairs in the experts' order, E experts, I inputs and O outputs of a matrix, R summed ranks of the
microbatch's models, N numbers of a row
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tinker_server.backends.formats import packed
from tinker_server.backends.kernels.autograd import Context
from tinker_server.backends.trainer.lora.linear import add_product, apply_scales


@torch.library.custom_op("tinker_server::lora_grouped", mutates_args=())
def lora_grouped(  # noqa: PLR0913
    x_SI: Tensor,
    weight_EOI: Tensor,
    a_ERI: Tensor,
    b_ERO: Tensor,
    grad_a_ERI: Tensor,  # noqa: ARG001 - kept for backward, like the next
    grad_b_ERO: Tensor,  # noqa: ARG001
    scales_SR: Tensor,
    ends_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return [S, O], each pair by its expert's matrix and adapter, and the scaled inner products [S, R] for backward,
    which adds to `grad_a_ERI` and `grad_b_ERO`. `ends_E` is int32: the end of each expert's pairs. Matrices may be
    packed."""
    inner_SR = apply_scales(_multiply_groups(x_SI, a_ERI.mT, ends_E), scales_SR)
    y_SO = _multiply_by_matrices(x_SI, weight_EOI, ends_E, b_ERO.shape[2])
    return y_SO.add_(_multiply_groups(inner_SR, b_ERO, ends_E)), inner_SR


@torch.library.custom_op("tinker_server::lora_grouped_backward", mutates_args=("grad_a_ERI", "grad_b_ERO"))
def lora_grouped_backward(  # noqa: PLR0913
    grad_y_SO: Tensor,
    x_SI: Tensor,
    weight_EOI: Tensor,
    a_ERI: Tensor,
    b_ERO: Tensor,
    grad_a_ERI: Tensor,
    grad_b_ERO: Tensor,
    scales_SR: Tensor,
    ends_E: Tensor,
    inner_SR: Tensor,
) -> Tensor:
    """Return the gradient of x [S, I]; accumulate those of A and B."""
    grad_inner_SR = apply_scales(_multiply_groups(grad_y_SO, b_ERO.mT, ends_E), scales_SR)
    _add_grouped_product(grad_b_ERO, inner_SR, grad_y_SO, ends_E)
    _add_grouped_product(grad_a_ERI, grad_inner_SR, x_SI, ends_E)
    grad_x_SI = _multiply_by_matrices(grad_y_SO, weight_EOI, ends_E, x_SI.shape[1], is_transposed=True)
    return grad_x_SI.add_(_multiply_groups(grad_inner_SR, a_ERI, ends_E))


@torch.library.custom_op("tinker_server::multiply_by_expert", mutates_args=())
def multiply_by_expert(
    x_SN: Tensor, weight_EOI: Tensor, ends_E: Tensor, num_columns: int, is_transposed: bool = False
) -> Tensor:
    """Return x W^T [S, O] of inputs [S, I], each pair by its expert's frozen matrix, or x W [S, I] of [S, O] if
    `is_transposed`; that many columns. For backward x is not kept."""
    return _multiply_by_matrices(x_SN, weight_EOI, ends_E, num_columns, is_transposed=is_transposed)


@torch.library.custom_op("tinker_server::expert_factor", mutates_args=())
def expert_factor(
    x_SN: Tensor,
    factor_ERN: Tensor,
    grad_factor_ERN: Tensor,  # noqa: ARG001 - kept for backward
    ends_E: Tensor,
    is_a: bool,
) -> Tensor:
    """Return each pair by its expert's A, x A^T [S, R] of inputs [S, I], or by its B, x B [S, O] of inner products
    [S, R]. Backward adds to `grad_factor_ERN`."""
    return _multiply_groups(x_SN, factor_ERN.mT if is_a else factor_ERN, ends_E)


@torch.library.custom_op("tinker_server::expert_factor_backward", mutates_args=("grad_factor_ERN",))
def expert_factor_backward(  # noqa: PLR0913
    grad_y_SN: Tensor,
    x_SN: Tensor,
    factor_ERN: Tensor,
    grad_factor_ERN: Tensor,
    ends_E: Tensor,
    is_a: bool,
) -> Tensor:
    """Return the gradient of x; accumulate that of the factor."""
    inner_SR, outer_SN = (grad_y_SN, x_SN) if is_a else (x_SN, grad_y_SN)
    _add_grouped_product(grad_factor_ERN, inner_SR, outer_SN, ends_E)
    return _multiply_groups(grad_y_SN, factor_ERN if is_a else factor_ERN.mT, ends_E)


def _multiply_by_matrices(
    x_SN: Tensor, weight_EOI: Tensor, ends_E: Tensor, num_columns: int, *, is_transposed: bool = False
) -> Tensor:
    """Multiply each expert's pairs by its frozen matrix, which may be packed."""
    if weight_EOI.dtype != torch.uint8:
        return _multiply_groups(x_SN, weight_EOI if is_transposed else weight_EOI.mT, ends_E)
    found = x_SN.new_empty(x_SN.shape[0], num_columns)
    packed.multiply_by_expert(x_SN, weight_EOI, ends_E, found, is_transposed=is_transposed)
    return found


def _multiply_groups(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's pairs by its matrix: [S, O]."""
    if _in_one_kernel(x_SI):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    y_SO = x_SI.new_empty(x_SI.shape[0], weight_EIO.shape[2])
    for expert, pairs in _pairs_by_expert(ends_E):
        torch.mm(x_SI[pairs], weight_EIO[expert], out=y_SO[pairs])
    return y_SO


def _add_grouped_product(total_ERN: Tensor, left_SR: Tensor, right_SN: Tensor, ends_E: Tensor) -> None:
    """Add each expert's left^T right to its part of `total_ERN`."""
    if _in_one_kernel(left_SR):
        # Rounded once to the compute type, all that the kernel gives; the sum over pairs is in float32.
        product_ERN = F.grouped_mm(left_SR.mT, right_SN, offs=ends_E)
        # On some GPUs it writes nothing for an expert without pairs (pytorch issue 172439) and leaves uninitialised
        # memory.
        is_empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        total_ERN.add_(product_ERN.masked_fill_(is_empty_E[:, None, None], 0))
        return
    for expert, pairs in _pairs_by_expert(ends_E):
        add_product(total_ERN[expert], left_SR[pairs], right_SN[pairs])


def _in_one_kernel(x: Tensor) -> bool:
    """Return whether to use torch's grouped product: made for bfloat16 on CUDA, elsewhere as slow as single
    products."""
    return x.is_cuda and x.dtype == torch.bfloat16


def _pairs_by_expert(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    for expert, (begin, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        if end > begin:
            yield expert, slice(begin, end)


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Context, grad_y_SO: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return lora_grouped_backward(grad_y_SO.contiguous(), *ctx.saved_tensors), *(None,) * 7


@lora_grouped.register_fake
def _(x_SI: Tensor, _weight: Tensor, a_ERI: Tensor, b_ERO: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x_SI.new_empty(x_SI.shape[0], b_ERO.shape[2]), x_SI.new_empty(x_SI.shape[0], a_ERI.shape[1])


@lora_grouped_backward.register_fake
def _(_grad_y_SO: Tensor, x_SI: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x_SI)


lora_grouped.register_autograd(_backward, setup_context=_save)


@multiply_by_expert.register_fake
def _(x_SN: Tensor, _weight: Tensor, _ends: Tensor, num_columns: int, is_transposed: bool = False) -> Tensor:  # noqa: ARG001
    return x_SN.new_empty(x_SN.shape[0], num_columns)


class _ProductContext(Context, Protocol):
    num_inputs: int
    is_transposed: bool


def save_for_product_gradient(
    ctx: _ProductContext,
    inputs: tuple[Tensor, Tensor, Tensor, int, bool],
    output: Tensor,  # noqa: ARG001
) -> None:
    """Save what `backpropagate_product` needs of `multiply_by_expert`: torch's `setup_context`."""
    x_SN, weight_EOI, ends_E, _, ctx.is_transposed = inputs
    ctx.num_inputs = x_SN.shape[1]
    ctx.save_for_backward(weight_EOI, ends_E)


def backpropagate_product(ctx: _ProductContext, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    weight_EOI, ends_E = ctx.saved_tensors
    grad_x = multiply_by_expert(grad_y.contiguous(), weight_EOI, ends_E, ctx.num_inputs, not ctx.is_transposed)
    return grad_x, *(None,) * 4


multiply_by_expert.register_autograd(backpropagate_product, setup_context=save_for_product_gradient)


class _FactorContext(Context, Protocol):
    is_a: bool


@expert_factor.register_fake
def _(x_SN: Tensor, factor_ERN: Tensor, _grad: Tensor, _ends: Tensor, is_a: bool) -> Tensor:
    return x_SN.new_empty(x_SN.shape[0], factor_ERN.shape[1 if is_a else 2])


@expert_factor_backward.register_fake
def _(_grad_y_SN: Tensor, x_SN: Tensor, *_: Tensor | bool) -> Tensor:
    return torch.empty_like(x_SN)


def save_for_factor_gradient(
    ctx: _FactorContext,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, bool],
    output: Tensor,  # noqa: ARG001
) -> None:
    """Save what `backpropagate_factor` needs of `expert_factor`: torch's `setup_context`."""
    *tensors, ctx.is_a = inputs
    ctx.save_for_backward(*tensors)


def backpropagate_factor(ctx: _FactorContext, grad_y_SN: Tensor) -> tuple[Tensor | None, ...]:
    return expert_factor_backward(grad_y_SN.contiguous(), *ctx.saved_tensors, ctx.is_a), *(None,) * 4


expert_factor.register_autograd(backpropagate_factor, setup_context=save_for_factor_gradient)
