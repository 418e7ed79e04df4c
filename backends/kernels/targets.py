"""The private operators of torch that the kernels call."""

from backends.patches import Patch

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
