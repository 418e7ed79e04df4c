"""Frozen experts of a mixture with the LoRA adapters of all models of a packed microbatch.

Each expert has an adapter of its own on each of its three matrices, or two if it has no gate, of its model's rank (as
in PEFT and vLLM). The router is frozen: gradients pass through its weights to earlier layers, as in transformers.

T tokens of a microbatch, K experts of a token, S = T * K (token, expert) pairs in the experts' order, E experts, H
hidden width, I inputs and O outputs of a matrix, R summed ranks of the microbatch's models
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.families.biased_experts import BiasedExperts
from backends.families.gpt_oss import gated
from backends.kernels.autograd import Context
from backends.trainer.lora.linear import TokenScales, add_product, scaled


class StackedExperts(Protocol):
    """A mixture's experts as transformers has them, without biases. They have one of the first two tensors."""

    gate_up_proj: nn.Parameter
    """[E, 2 I, H]: gate above up."""
    up_proj: nn.Parameter
    """[E, I, H], where there is no gate."""
    has_gate: bool
    down_proj: nn.Parameter
    """[E, H, I]"""
    act_fn: nn.Module


class ExpertAdapters:
    """The adapters of one matrix of every expert of a layer for the current microbatch; `Adapters.load` sets them."""

    a: Tensor
    """[E, R, I]"""
    b: Tensor
    """[E, R, O], transposed."""
    grad_a: Tensor
    grad_b: Tensor

    def __init__(self, num_experts: int, outputs: int, inputs: int) -> None:
        self.num_matrices = num_experts
        self.matrix_shape = torch.Size((outputs, inputs))

    def take(self, a_ERI: Tensor, b_ERO: Tensor, grad_a_ERI: Tensor, grad_b_ERO: Tensor) -> None:
        """Set the adapters and where their gradients are accumulated."""
        self.a, self.b, self.grad_a, self.grad_b = a_ERI, b_ERO, grad_a_ERI, grad_b_ERO

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A, B and their accumulated gradients."""
        return self.a, self.b, self.grad_a, self.grad_b


class LoraExperts(nn.Module):
    """Replaces a layer's experts."""

    def __init__(self, base: StackedExperts | BiasedExperts, scales: TokenScales) -> None:
        super().__init__()
        # FSDP2 knows the experts by their module: it stays where their weights are.
        self.base, self._scales = base, scales
        self.has_gate = base.has_gate
        num_experts, hidden, inner = base.down_proj.shape
        shapes = {name: (inner, hidden) for name in self._into} | {"down_proj": (hidden, inner)}
        self.adapters = {name: ExpertAdapters(num_experts, *shape) for name, shape in shapes.items()}

    @property
    def _into(self) -> tuple[str, ...]:
        """The matrices that an expert's input passes first."""
        return ("gate_proj", "up_proj") if self.has_gate else ("up_proj",)

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return [T, H], the sum of each token's experts, weighted by the router."""
        num_experts, _, inner = self.base.down_proj.shape
        experts_S, order_S = experts_TK.flatten().sort(stable=True)
        ends_E = torch.searchsorted(
            experts_S, torch.arange(num_experts, device=experts_S.device), right=True, out_int32=True
        )
        token_S = order_S // experts_TK.shape[1]
        x_SH, scales_SR = hidden_TH[token_S], self._scales.scales_TR[token_S]
        weights = self.base.gate_up_proj if self.has_gate else cast(StackedExperts, self.base).up_proj
        parts_SI = [
            lora_grouped(x_SH, weight_EIH, *self.adapters[name].all, scales_SR, ends_E)[0]
            for name, weight_EIH in zip(self._into, weights.split(inner, dim=1), strict=True)
        ]
        inner_SI = self._activated(parts_SI, experts_S)
        y_SH = lora_grouped(inner_SI, self.base.down_proj, *self.adapters["down_proj"].all, scales_SR, ends_E)[0]
        if isinstance(self.base, BiasedExperts):
            y_SH = y_SH + self.base.down_bias[experts_S]
        y_SH = y_SH * weights_TK.flatten()[order_S, None]
        # Back to the tokens' order and summed there: adding by index is not deterministic on a GPU.
        position_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        y_TKH: Tensor = y_SH[position_S].unflatten(0, experts_TK.shape)
        return y_TKH.sum(1).to(hidden_TH.dtype)  # some routers' weights are in float32

    def _activated(self, parts_SI: Sequence[Tensor], experts_S: Tensor) -> Tensor:
        if not isinstance(self.base, BiasedExperts):
            first_SI: Tensor = self.base.act_fn(parts_SI[0])
            return first_SI * parts_SI[1] if self.has_gate else first_SI
        gate_SI, up_SI = parts_SI
        gate_bias_EI, up_bias_EI = self.base.gate_up_bias.chunk(2, 1)
        return gated(gate_SI + gate_bias_EI[experts_S], up_SI + up_bias_EI[experts_S])


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
    which adds to `grad_a_ERI` and `grad_b_ERO`. `ends_E` is int32: the end of each expert's pairs."""
    inner_SR = scaled(_grouped(x_SI, a_ERI.mT, ends_E), scales_SR)
    return _grouped(x_SI, weight_EOI.mT, ends_E).add_(_grouped(inner_SR, b_ERO, ends_E)), inner_SR


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
    grad_inner_SR = scaled(_grouped(grad_y_SO, b_ERO.mT, ends_E), scales_SR)
    _add_grouped_product(grad_b_ERO, inner_SR, grad_y_SO, ends_E)
    _add_grouped_product(grad_a_ERI, grad_inner_SR, x_SI, ends_E)
    return _grouped(grad_y_SO, weight_EOI, ends_E).add_(_grouped(grad_inner_SR, a_ERI, ends_E))


def _grouped(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
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
def _(x_SI: Tensor, weight_EOI: Tensor, a_ERI: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return x_SI.new_empty(x_SI.shape[0], weight_EOI.shape[1]), x_SI.new_empty(x_SI.shape[0], a_ERI.shape[1])


@lora_grouped_backward.register_fake
def _(_grad_y_SO: Tensor, x_SI: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(x_SI)


lora_grouped.register_autograd(_backward, setup_context=_save)
