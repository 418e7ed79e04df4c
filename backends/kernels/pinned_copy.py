"""Copies to a GPU without a wait of the host."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, from pinned memory: from other memory the copy would begin once the device has done
    all queued work, and the host would wait for it."""
    if device.type == "cpu" or tensor.device == device:
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() or not tensor.is_cpu else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
