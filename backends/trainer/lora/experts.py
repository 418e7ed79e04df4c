"""Frozen experts of a mixture with the LoRA adapters of all models of a packed microbatch.

A model's experts have adapters of either of two layouts, of its rank:

- `own`: each expert has an adapter of its own on each of its three matrices, or two if it has no gate (as in PEFT and
  vLLM).
- `service`: all experts of a layer share the factor on the hidden side, A of gate and up and B of down; the other is
  each expert's own. A product with a shared factor is computed once a token: of down's, the sum over a token's experts
  is taken before it, in R numbers instead of H.

The router is frozen: gradients pass through its weights to earlier layers, as in transformers.

T tokens of a microbatch, K experts of a token, S = T * K (token, expert) pairs in the experts' order, E experts, H
hidden width, I inputs and O outputs of a matrix, R summed ranks of the microbatch's models
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from tinker_server.api_schemas.training import Layout
from tinker_server.backends.families.gpt_oss import apply_gate
from tinker_server.backends.families.gpt_oss.experts import BiasedExperts
from tinker_server.backends.trainer.lora.grouped import expert_factor, lora_grouped, multiply_by_expert
from tinker_server.backends.trainer.lora.linear import TokenScales
from tinker_server.backends.trainer.lora.packed_fp8 import PackedExperts
from tinker_server.backends.trainer.lora.shared_factors import multiply_a, multiply_b


class StackedExperts(Protocol):
    """A mixture's experts as transformers has them, without biases. They have either of the first two tensors."""

    gate_up_proj: nn.Parameter
    """[E, 2 I, H]: gate above up."""
    up_proj: nn.Parameter
    """[E, I, H], where there is no gate."""
    has_gate: bool
    down_proj: nn.Parameter
    """[E, H, I]"""
    act_fn: nn.Module


class ExpertAdapters:
    """The adapters of a matrix of every expert of a layer for the current microbatch, of the models of the same layout;
    `Adapters.load` sets them. R is 0 if it has no such model."""

    a: Tensor
    """[E, R, I], or [R, I] if the experts share it."""
    b: Tensor
    """[E, R, O], transposed, or [R, O]."""
    grad_a: Tensor
    grad_b: Tensor

    def __init__(self, num_experts: int, outputs: int, inputs: int, shared: Literal["a", "b"] | None = None) -> None:
        """`shared`: the factor that all experts share."""
        self.num_experts = num_experts
        self.num_matrices = (1 if shared == "a" else num_experts, 1 if shared == "b" else num_experts)
        """Of A, and of B."""
        self.matrix_shape = torch.Size((outputs, inputs))
        self._shared = shared

    def take(self, a_ERI: Tensor, b_ERO: Tensor, grad_a_ERI: Tensor, grad_b_ERO: Tensor) -> None:
        """Set the adapters and where their gradients are accumulated."""
        self.a, self.b, self.grad_a, self.grad_b = a_ERI, b_ERO, grad_a_ERI, grad_b_ERO
        # Not in compiled code: torch 2.11 adds the offset of a gradient's view there twice.
        if self._shared == "a":
            self.a, self.grad_a = a_ERI[0], grad_a_ERI[0]
        if self._shared == "b":
            self.b, self.grad_b = b_ERO[0], grad_b_ERO[0]

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A, B and their accumulated gradients."""
        return self.a, self.b, self.grad_a, self.grad_b

    @property
    def is_loaded(self) -> bool:
        """Whether the microbatch has models of this layout."""
        return self.a.shape[-2] > 0


class _Pairs(NamedTuple):
    """The (token, expert) pairs of a microbatch, in the experts' order."""

    experts_S: Tensor
    order_S: Tensor
    """Places in the tokens' order."""
    token_S: Tensor
    ends_E: Tensor
    """int32: the end of each expert's pairs."""
    position_TK: Tensor
    """Each pair's place among these, in the tokens' order."""
    scales_SR: Tensor

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int, scales_TR: Tensor) -> "_Pairs":
        experts_S, order_S = experts_TK.flatten().sort(stable=True)
        ends_E = torch.searchsorted(
            experts_S, torch.arange(num_experts, device=experts_S.device), right=True, out_int32=True
        )
        position_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        token_S = order_S // experts_TK.shape[1]
        return cls(experts_S, order_S, token_S, ends_E, position_S.view(experts_TK.shape), scales_TR[token_S])

    def sum_weighted(self, y_SN: Tensor, weights_TK: Tensor) -> Tensor:
        """Return [T, N], the sum of each token's experts."""
        y_SN = y_SN * weights_TK.flatten()[self.order_S, None]
        # Back to the tokens' order and summed there: adding by index is not deterministic on a GPU.
        y_TKN: Tensor = y_SN[self.position_TK.flatten()].unflatten(0, self.position_TK.shape)
        return y_TKN.sum(1)


class LoraExperts(nn.Module):
    """Replaces a layer's experts."""

    def __init__(self, base: StackedExperts | BiasedExperts | PackedExperts, scales: TokenScales) -> None:
        super().__init__()
        # FSDP2 knows the experts by their module: it stays where their weights are.
        self.base, self._scales = base, scales
        self.has_gate = base.has_gate
        sizes = base.sizes if isinstance(base, PackedExperts | BiasedExperts) else base.down_proj.shape
        count, hidden, inner = sizes
        self._num_experts = count
        into = {name: (inner, hidden) for name in self._into}
        own = {name: ExpertAdapters(count, *shape) for name, shape in into.items()}
        shared = {name: ExpertAdapters(count, *shape, "a") for name, shape in into.items()}
        self.adapters: dict[Layout, dict[str, ExpertAdapters]] = {
            "own": own | {"down_proj": ExpertAdapters(count, hidden, inner)},
            "service": shared | {"down_proj": ExpertAdapters(count, hidden, inner, "b")},
        }

    @property
    def _into(self) -> tuple[str, ...]:
        """The matrices that an expert's input passes first."""
        return ("gate_proj", "up_proj") if self.has_gate else ("up_proj",)

    def forward(self, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return [T, H], the sum of each token's experts, weighted by the router."""
        scales_TR = self._scales.scales_TR
        pairs = _Pairs.of(experts_TK, self._num_experts, scales_TR)
        x_SH = hidden_TH[pairs.token_S]
        weights = self.base.gate_up_proj if self.has_gate else cast(StackedExperts, self.base).up_proj
        parts_SI = [
            self._product(name, x_SH, weight_EIH, pairs)
            for name, weight_EIH in zip(self._into, self._halves(weights), strict=True)
        ]
        shared = self.adapters["service"]
        if shared["up_proj"].is_loaded:
            into = [shared[name] for name in self._into]
            inner_TN = multiply_a(hidden_TH, [of.a for of in into], [of.grad_a for of in into], scales_TR)
            inners_SR = [inner_TR[pairs.token_S] for inner_TR in inner_TN.chunk(len(into), 1)]
            parts_SI = [
                part_SI + expert_factor(inner_SR, of.b, of.grad_b, pairs.ends_E, False)
                for part_SI, inner_SR, of in zip(parts_SI, inners_SR, into, strict=True)
            ]
        inner_SI = self._activate(parts_SI, pairs.experts_S)
        y_SH = self._product("down_proj", inner_SI, self.base.down_proj, pairs)
        if isinstance(self.base, BiasedExperts):
            y_SH = y_SH + self.base.down_bias[pairs.experts_S]
        y_TH = pairs.sum_weighted(y_SH, weights_TK)
        if (down := shared["down_proj"]).is_loaded:
            inner_SR = expert_factor(inner_SI, down.a, down.grad_a, pairs.ends_E, True)
            inner_TR = pairs.sum_weighted(inner_SR, weights_TK).to(hidden_TH.dtype)
            y_TH = y_TH + multiply_b(inner_TR, down.b, down.grad_b, scales_TR)[0]
        return y_TH.to(hidden_TH.dtype)  # some routers' weights are in float32

    def _halves(self, both: Tensor) -> Sequence[Tensor]:
        """Return a tensor's part of gates and its part of ups, or of ups alone."""
        if isinstance(self.base, BiasedExperts):
            return self.base.gates_and_ups(both)
        return both.chunk(len(self._into), dim=1)

    def _product(self, name: str, x_SI: Tensor, weight_EOI: Tensor, pairs: _Pairs) -> Tensor:
        """Return [S, O], each pair by its expert's matrix and own adapter."""
        own = self.adapters["own"][name]
        if not own.is_loaded:
            return cast(Tensor, multiply_by_expert(x_SI, weight_EOI, pairs.ends_E, own.matrix_shape[0]))
        return cast(Tensor, lora_grouped(x_SI, weight_EOI, *own.all, pairs.scales_SR, pairs.ends_E)[0])

    def _activate(self, parts_SI: Sequence[Tensor], experts_S: Tensor) -> Tensor:
        if not isinstance(self.base, BiasedExperts):
            first_SI: Tensor = self.base.act_fn(parts_SI[0])
            return first_SI * parts_SI[1] if self.has_gate else first_SI
        gate_SI, up_SI = parts_SI
        gate_bias_EI, up_bias_EI = self._halves(self.base.gate_up_bias)
        return apply_gate(gate_SI + gate_bias_EI[experts_S], up_SI + up_bias_EI[experts_S])
