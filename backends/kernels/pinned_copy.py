"""Copies to a GPU that the host does not wait for."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there. From pinned memory: from any other the copy would begin once the device has done all that it
    was given, and the host would wait for it."""
    if device.type == "cpu" or tensor.device == device:
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() or not tensor.is_cpu else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
