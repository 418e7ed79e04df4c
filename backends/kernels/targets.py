"""What the kernels call of torch and flash-linear-attention that is private there."""

from tinker_server.backends.patches import Patch

_WHY = "A private operator that is called here by position; its schema says what the arguments mean."
OPERATORS = [
    Patch(
        "flash-attention",
        "torch.ops:aten._flash_attention_forward",
        (  # of torch 2.11, and of 2.13, which has two more arguments with defaults
            "5867cae3eb0071ebe71250e2291396b99330845471c0246cd6315289f147c7d2",
            "866d2453d6eb8acdd947bb16b57bceca572dcfe4f6d0db1efef9ce294f9ce36c",
        ),
        _WHY,
        how="relied on",
        device="cuda",
    ),
    Patch(
        "flash-attention-backward",
        "torch.ops:aten._flash_attention_backward",
        "e44551bb1d16a66dce49c11d6a5f9be2bbe4a881085afbbdcb41f6aaedd82fd3",
        _WHY,
        how="relied on",
        device="cuda",
    ),
    Patch(
        "cudnn-attention",
        "torch.ops:aten._scaled_dot_product_cudnn_attention",
        "3a8a0dbb4d3628394970e385484e66dab381b400fafddacba4dad0d1a06f328a",
        _WHY,
        how="relied on",
        device="cuda",
    ),
    Patch(
        "cudnn-attention-backward",
        "torch.ops:aten._scaled_dot_product_cudnn_attention_backward",
        "493cb297834fa0baa14ac42a8e86310e9c739556d37f0edf99e39f2dd5bc18ea",
        _WHY,
        how="relied on",
        device="cuda",
    ),
]
DELTA_RULE = [
    Patch(
        f"delta-rule-{name}",
        target,
        sha256,
        "A launch of kernels without autograd, which is called here; its tensors and their order.",
        how="relied on",
        device="cuda",
    )
    for name, target, sha256 in (
        (
            "forward",
            "fla.ops.gated_delta_rule.chunk:chunk_gated_delta_rule_fwd",
            "410bc6aa1893494cbbcb01050ca3200f60f96f6880f514a5247c2b2b6390a90f",
        ),
        (
            "states",
            "fla.ops.common.chunk_delta_h:chunk_gated_delta_rule_fwd_h",
            "0970db26f0e19ac4356e99d182793ce120c931de88a47ea4445a6bd4d167c5f5",
        ),
        (
            "states-backward",
            "fla.ops.common.chunk_delta_h:chunk_gated_delta_rule_bwd_dhu",
            "53690192cea7f4367246788c0dac873fe5c8af57a4244583fdd73efda72fb62e",
        ),
        (
            "values-backward",
            "fla.ops.common.chunk_o:chunk_bwd_dv_local",
            "309a3a0db9f0a556108db8ff90e9d741b948a7dd40094aa7f80b10fb06d3615c",
        ),
        (
            "system",
            "fla.ops.gated_delta_rule.wy_fast:recompute_w_u_fwd",
            "22817b1df23c8a47d8c74a18a51e76b339ce15e84184af0b9fcbffe5a1bbdbc4",
        ),
        (
            "system-backward",
            "fla.ops.gated_delta_rule.wy_fast:prepare_wy_repr_bwd",
            "7089b4e73fb0bc5ce5110a5eb22234569a16ad081b193aca461ece8b5ac11e42",
        ),
        (
            "sums",
            "fla.ops.utils.cumsum:chunk_local_cumsum",
            "783de5a421023c01de92a82e1f397cffe04b40bab37e3f86993b7162959c3e46",
        ),
    )
]
