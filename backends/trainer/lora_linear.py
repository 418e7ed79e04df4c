"""Frozen linear layers with the LoRA adapters of all models of a packed row (Hu et al. 2021, arXiv:2106.09685).

For a token x of model m, of rank r:  y = W x + (alpha / r) B_m A_m x.

The adapters of a row's models lie side by side, as R columns; a token has its model's scale in that model's columns
and 0 in all others. Two plain products so serve any mix of models and ranks.

T tokens of a row, I inputs and O outputs of a linear, R rank columns of a row's models
"""

from typing import Any, cast

import torch
from torch import Tensor, nn


class RowScales:
    """What all linears of a model read of the row at hand."""

    def __init__(self) -> None:
        self.scales_TR: Tensor = torch.empty(0, 0)
        """alpha / rank in the columns of the token's own model, else 0; of one row where all tokens are its."""
        self.is_off = False
        """Whether the linears compute alone, whatever adapters are there: to the bit as before they took LoRA."""


class LoraLinear(nn.Module):
    """A frozen linear and the adapters of the row at hand, which `Adapters.load` sets.

    Gradients of the adapters are added to `grad_a_RI` and `grad_b_RO`, in float32: autograd would round them to the
    compute type, and keep each tensor's apart.
    """

    a_RI: Tensor
    b_RO: Tensor
    """B, transposed."""
    grad_a_RI: Tensor
    grad_b_RO: Tensor

    def __init__(self, base: nn.Linear, row: RowScales) -> None:
        super().__init__()
        # FSDP2 knows the linear by its module: it stays where its weight is.
        self.base, self._row = base, row

    num_matrices = 1

    @property
    def weight(self) -> Tensor:
        """[O, I], the linear's own."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """[O], the linear's own."""
        return self.base.bias

    @property
    def matrix_shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.weight.shape

    def take(self, a_1RI: Tensor, b_1RO: Tensor, grad_a_1RI: Tensor, grad_b_1RO: Tensor) -> None:
        """Compute with these from now on."""
        self.a_RI, self.b_RO, self.grad_a_RI, self.grad_b_RO = a_1RI[0], b_1RO[0], grad_a_1RI[0], grad_b_1RO[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O], with the scales of the row's tokens."""
        if self._row.is_off:
            return cast(Tensor, self.base(x))
        adapters = (self.a_RI, self.b_RO, self._row.scales_TR, self.grad_a_RI, self.grad_b_RO)
        y_TO: Tensor = lora_linear(x.flatten(0, -2), self.weight, *adapters)[0]
        if self.bias is not None:
            y_TO = y_TO + self.bias
        return y_TO.reshape(*x.shape[:-1], y_TO.shape[-1])


def scaled(product_TR: Tensor, scales_TR: Tensor) -> Tensor:
    """`product_TR` * `scales_TR` in place. A scale of 0 gives 0, whatever another model's adapter made of the token."""
    if product_TR.is_cuda:
        from backends.trainer.scaled_on_cuda import scale

        return scale(product_TR, scales_TR)
    return product_TR.mul_(scales_TR).masked_fill_(scales_TR == 0, 0)


# Custom operators: torch.compile leaves their inside alone. It would copy y before adding to it, round the adapters'
# gradients to the compute type, and compile again for every R.
@torch.library.custom_op("tinker_server::lora_linear", mutates_args=())
def lora_linear(  # noqa: PLR0913
    x_TI: Tensor, weight_OI: Tensor, a_RI: Tensor, b_RO: Tensor, scales_TR: Tensor, grad_a_RI: Tensor, grad_b_RO: Tensor
) -> tuple[Tensor, Tensor]:
    """[T, O], and the scaled inner products [T, R] for backward, which adds to `grad_a_RI` and `grad_b_RO`.

    The large product is added to the small one, not the other way round: y is then read once less, and rounded once.
    """
    inner_TR = scaled(x_TI @ a_RI.T, scales_TR)
    return (inner_TR @ b_RO).addmm_(x_TI, weight_OI.T), inner_TR


@torch.library.custom_op("tinker_server::lora_linear_backward", mutates_args=("grad_a_RI", "grad_b_RO"))
def lora_linear_backward(  # noqa: PLR0913
    grad_y_TO: Tensor,
    x_TI: Tensor,
    weight_OI: Tensor,
    a_RI: Tensor,
    b_RO: Tensor,
    inner_TR: Tensor,
    scales_TR: Tensor,
    grad_a_RI: Tensor,
    grad_b_RO: Tensor,
) -> Tensor:
    """The gradient of x [T, I]; those of A and B are added where they are gathered."""
    grad_inner_TR = scaled(grad_y_TO @ b_RO.T, scales_TR)
    add_product(grad_b_RO, inner_TR, grad_y_TO)
    add_product(grad_a_RI, grad_inner_TR, x_TI)
    return (grad_inner_TR @ a_RI).addmm_(grad_y_TO, weight_OI)


def add_product(total_RN: Tensor, left_TR: Tensor, right_TN: Tensor) -> None:
    """`total_RN` += left^T right, summed in `total_RN`'s own precision."""
    if total_RN.is_cuda and left_TR.dtype != total_RN.dtype:
        torch.addmm(total_RN, left_TR.T, right_TN, out_dtype=total_RN.dtype, out=total_RN)
    else:
        total_RN.addmm_(left_TR.T.to(total_RN.dtype), right_TN.to(total_RN.dtype))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[1], *inputs[4:])


def _backward(ctx: Any, grad_y_TO: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return lora_linear_backward(grad_y_TO, *ctx.saved_tensors), None, None, None, None, None, None


# shape[0] and never len(), which would fix the number of tokens in compiled code.
@lora_linear.register_fake
def _(x_TI: Tensor, weight_OI: Tensor, a_RI: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0]), x_TI.new_empty(x_TI.shape[0], a_RI.shape[0])


@lora_linear_backward.register_fake
def _(grad_y_TO: Tensor, x_TI: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x_TI)


lora_linear.register_autograd(_backward, setup_context=_save)
