"""Rotary positions (RoFormer, arXiv:2104.09864) of a vision tower's queries and keys as a kernel.

P patches, H heads, D width of a head
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinker_server.backends.kernels.autograd import Context


def rotate(qkv_PX: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    """Return [P, 3 * H * D], queries and keys of `qkv_PX` rotated in place, values unchanged. Bitwise equal to
    transformers' `apply_rotary_pos_emb_vision`, for angles whose second half is the first."""
    result: Tensor = _Rotated.apply(qkv_PX, cos_PD, sin_PD)  # type: ignore[no-untyped-call]
    return result


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, qkv_PX: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_PD, sin_PD)
        ctx.mark_dirty(qkv_PX)
        return _rotate_in_place(qkv_PX, cos_PD, sin_PD)

    @staticmethod
    def backward(ctx: Context, grad_PX: Tensor) -> tuple[Tensor, None, None]:
        cos_PD, sin_PD = ctx.saved_tensors
        return _rotate_in_place(grad_PX.clone(memory_format=torch.contiguous_format), cos_PD, -sin_PD), None, None


def _rotate_in_place(qkv_PX: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
    """Rotate in place."""
    assert qkv_PX.is_contiguous()
    (num_patches, width), size = qkv_PX.shape, cos_PD.shape[1]
    num_heads = width // 3 * 2 // size
    heads, half = triton.next_power_of_2(num_heads), triton.next_power_of_2(size // 2)
    # No fused multiply-add, which rounds once: transformers rounds each product.
    options = {"HEADS": heads, "HALF": half, "enable_fp_fusion": False}
    _rotate[num_patches,](qkv_PX, cos_PD.contiguous(), sin_PD.contiguous(), width, num_heads, size // 2, **options)
    return qkv_PX


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    qkv, cos, sin, width, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr
) -> None:
    patch = tl.program_id(0).to(tl.int64)
    head, index = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    angle, inside = patch * 2 * half + index, (head < num_heads) & (index < half)
    c = tl.load(cos + angle, mask=index < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=index < half, other=0.0).to(tl.float32)
    first = qkv + patch * width + head * 2 * half + index
    x = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (x * c - y * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(first + half, (y * c + x * s).to(qkv.dtype.element_ty), mask=inside)
