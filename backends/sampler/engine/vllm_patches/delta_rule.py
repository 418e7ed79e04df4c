"""Sizes of the delta rule's kernels in the engine, on Hopper.

vLLM tries 88 by 64 tokens of noise, and a first start compiles all of them, for 85 s on an H200. There all of them take
the time of their launch, so that engines choose differently, and round differently.
"""

import torch

from tinker_server.backends.kernels.cards import Sizes, choices_on, keep_sizes

_TUNED: dict[str, Sizes] = {
    "chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 3),
    "chunk_o:chunk_fwd_kernel_o": ({"BK": 128, "BV": 128}, 4, 3),
    "chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel": ({"BK": 64}, 4, 4),
    "cumsum:chunk_local_cumsum_scalar_kernel": ({}, 1, 3),
    "solve_tril:merge_16x16_to_64x64_inverse_kernel": ({}, 4, 3),
    "wy_fast:recompute_w_u_fwd_kernel": ({}, 4, 4),
}
"""What an H200 computes fastest, weighed over 8 x 512, 8 x 1,024, 64 x 128 and 1 x 8,192 tokens of 32 and 48 heads."""


def keep_delta_rule_sizes() -> None:
    """Have vLLM try no other sizes. Imports its kernels, which begin CUDA: for an engine's process alone."""
    if choices_on(torch.device("cuda", torch.cuda.current_device())).tuned_delta_rule:
        keep_sizes("vllm.third_party.flash_linear_attention.ops", _TUNED)
