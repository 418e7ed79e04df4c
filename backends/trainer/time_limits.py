"""How many seconds a piece of work may take before its process counts as hung.

A limit is for noticing what will never end, so each is about ten times what a slow machine needs.
"""

import torch

_FLOPS = {"cpu": 2e9, "cuda": 2e12}
"""Floating-point operations a second: a tenth of two busy cores, a fiftieth of a data-centre GPU."""
_IMAGE_S = 30
"""To decode and process the largest image, 50 megapixels, took 3 s."""
_BODY_BYTES_PER_S = 500_000
"""Decoding JSON and checking it runs at 5 MB/s or more."""
_FILE_BYTES_PER_S = 2_000_000
"""A network disk; with fsync."""


def decoding_s(size_bytes: int) -> float:
    """To decode and check a request's body."""
    return size_bytes / _BODY_BYTES_PER_S


def microbatch_s(num_tokens: int, num_images: int, num_parameters: int, device: torch.device) -> float:
    """Forward, recomputation of the head, and backward: about 8 operations per token and parameter."""
    return 8 * num_tokens * num_parameters / _FLOPS[device.type] + num_images * _IMAGE_S


def files_s(size_bytes: int) -> float:
    """To read or write files and make them durable."""
    return size_bytes / _FILE_BYTES_PER_S
