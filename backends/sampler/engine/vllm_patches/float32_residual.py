"""The engine's residual stream in float32 where its weights are in 16 bits, as in the trainer.

Each norm of vLLM's decoders adds to it what the layer before has computed. Rounded to bfloat16 there, as by vLLM, the
engine's log probabilities of a model of 36 layers differ by 0.013 nats on average from the engine's own in another
order of summation. The norms are registered as out-of-tree operators, which vLLM makes in place of its own.

T tokens, H hidden width
"""

import inspect

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.triton_utils import tl, triton

Normed = Tensor | tuple[Tensor, Tensor]


class StreamNorm(RMSNorm):  # type: ignore[misc]
    """An RMSNorm whose sums with the residual stream are in float32 in a decoder's layers."""

    adds_in_float32 = False
    """Marks decoder norms. Vision norms are unmarked and unchanged."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        """Return the norm of x; with a residual, the norm of their sum, and the sum."""
        if residual is not None and _adds_in_float32(self.adds_in_float32, x, residual):
            return add_and_norm(x, residual, self.weight.data, self.variance_epsilon)
        return super().forward_native(x, residual)  # type: ignore[no-any-return]

    forward_cuda = forward_native


class GemmaStreamNorm(GemmaRMSNorm):  # type: ignore[misc]
    """The same of Gemma's, which multiplies by 1 + its weight."""

    adds_in_float32 = False

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        """Return the same as `StreamNorm.forward_native`."""
        if residual is not None and _adds_in_float32(self.adds_in_float32, x, residual):
            return add_and_norm(x, residual, self.weight.data.float() + 1, self.variance_epsilon)
        return super().forward_native(x, residual)  # type: ignore[no-any-return]

    forward_cuda = forward_native


def _adds_in_float32(is_marked: bool, x: Tensor, residual: Tensor) -> bool:
    # The decoder's last norm, too, is given what its layers added up.
    return x.dtype != torch.float32 and (is_marked or residual.dtype == torch.float32)


def register_norms() -> None:
    """Have vLLM make these norms. Once per process, before the engine is made."""
    RMSNorm.register_oot(StreamNorm)
    GemmaRMSNorm.register_oot(GemmaStreamNorm)


def mark(model: nn.Module) -> None:
    """Mark the norms of layers that take the stream, and pass it on, beside what the layer before has computed."""
    for layer in model.modules():
        if "residual" in inspect.signature(type(layer).forward).parameters:
            for norm in layer.children():
                if isinstance(norm, StreamNorm | GemmaStreamNorm):
                    norm.adds_in_float32 = True


def add_and_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm of their sum, rounded once to the type of `x_TH`, and the sum in float32.

    The sum overwrites `residual_TH` where that is in float32 on a GPU.
    """
    if not x_TH.is_cuda:
        sum_TH = x_TH.float() + residual_TH
        scale_T1 = torch.rsqrt(sum_TH.pow(2).mean(-1, keepdim=True) + epsilon)
        return (sum_TH * scale_T1 * weight_H.float()).to(x_TH.dtype), sum_TH
    x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
    num_tokens, width = x_TH.shape
    normed_TH = torch.empty_like(x_TH)
    sum_TH = residual_TH if residual_TH.dtype == torch.float32 else torch.empty_like(x_TH, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 512))
    tensors = x_TH, residual_TH, weight_H, normed_TH, sum_TH
    _add_and_norm[num_tokens,](*tensors, width, epsilon, BLOCK=block, num_warps=warps)
    return normed_TH, sum_TH


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_and_norm(x, residual, weight, normed, total, width, epsilon, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: PLR0913
    """Compute a token."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    offset = tl.program_id(0).to(tl.int64) * width + column
    summed = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    summed += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + offset, summed, mask=inside)
    scale = tl.rsqrt(tl.sum(summed * summed) / width + epsilon)
    scaled = summed * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + offset, scaled.to(normed.dtype.element_ty), mask=inside)
