"""Factors that a layer's experts share, multiplied by once for each token on CUDA.

vLLM multiplies a token by the shared A once for each of its experts, in the kernel that also multiplies by B, and an
inner activation by the shared B likewise. Here A comes first, and the kernel gets an identity in its place; of the
shared B, the kernel gets an identity, and B multiplies the sum over a token's experts.

T tokens, K experts of a token, E experts, S adapter slots, P parts (gate and up), H hidden width, R LoRA rank
"""

from functools import cache

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU


class SharedFactors(PunicaWrapperGPU):  # type: ignore[misc]
    """vLLM's LoRA kernels on CUDA."""

    def add_lora_fused_moe(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        *args: object,
        add_inputs: bool = True,
        **kwargs: object,
    ) -> None:
        """Add the adapters of a layer's experts to `y` [T, K, N]; a shared factor is a view with stride 0 over E.

        `x` is [T, H] before the experts, where A is shared, and has their inner activations after them, where B is.
        There the first expert's row gets the sum of all.
        """
        assert not kwargs.get("fully_sharded"), "ranks divide neither rank nor hidden width"
        if self.token_mapping_meta.no_lora_flag_cpu.item():
            return  # as vLLM does where no token has an adapter
        if _is_shared(lora_a_stacked[0]):
            low_TR = self._shrink(x, lora_a_stacked)
            units = _units(lora_a_stacked[0].shape[:3], len(lora_a_stacked), x.dtype, x.device)
            super().add_lora_fused_moe(y, low_TR, units, lora_b_stacked, *args, add_inputs=add_inputs, **kwargs)
        elif _is_shared(lora_b_stacked[0]):
            (num_tokens, num_choices, _), (b,) = y.shape, lora_b_stacked
            low_TKR = torch.zeros(num_tokens, num_choices, b.shape[-1], dtype=y.dtype, device=y.device)
            units = _units((*b.shape[:2], b.shape[3]), 1, y.dtype, y.device)
            super().add_lora_fused_moe(low_TKR, x, lora_a_stacked, units, *args, **kwargs)
            low_TR = low_TKR.sum(1, dtype=torch.float32)
            rows_TM = y.view(num_tokens, -1)  # M = K * N, of which the first N are written
            self.add_expand(rows_TM, low_TR[None], (b[:, :1],), (b.shape[2],), add_inputs=add_inputs)
        else:
            super().add_lora_fused_moe(y, x, lora_a_stacked, lora_b_stacked, *args, add_inputs=add_inputs, **kwargs)

    def _shrink(self, x: Tensor, a: tuple[Tensor, ...]) -> Tensor:
        """Return what the shared A of all parts make of `x`, side by side: [T, P * R]."""
        num_parts, num_tokens, rank = len(a), len(x), a[0].shape[2]
        low_PTR = torch.empty(num_parts, num_tokens, rank, dtype=torch.float32, device=x.device)
        self.add_shrink(low_PTR, x, tuple(factor[:, :1] for factor in a), 1.0)
        low_TPR = torch.empty(num_tokens, num_parts, rank, dtype=x.dtype, device=x.device)
        return low_TPR.copy_(low_PTR.transpose(0, 1)).view(num_tokens, -1)


def _is_shared(factor_SEMN: Tensor) -> bool:
    """Tell whether experts share a factor."""
    return factor_SEMN.shape[1] > 1 and factor_SEMN.stride(1) == 0


@cache
def _units(shape: tuple[int, ...], num_parts: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return factors [S, E, R, P * R] of which each takes its own part's R, for the `shape` [S, E, R]. Their memory is
    kept, since kernels note where a factor is."""
    assert not torch.cuda.is_current_stream_capturing(), "a graph's memory has no values before its first run"
    rank = shape[2]
    units_PRM = torch.eye(num_parts * rank, dtype=dtype, device=device).view(num_parts, rank, -1)
    return tuple(unit_RM.expand(*shape, -1) for unit_RM in units_PRM)
