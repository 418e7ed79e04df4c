"""AdamW as every model here uses it: its settings at each step, its state, and the test that a step was finite."""

import torch
from torch import Tensor

from api_schemas.training import AdamParams
from backends.protocol import InvalidInput

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of what Adam keeps of a tensor, beside the number of steps."""


def set_adam(optimizer: torch.optim.AdamW, adam: AdamParams) -> None:
    """Set the values that came with this optim_step."""
    for group in optimizer.param_groups:
        group.update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )


def step_on_device(optimizer: torch.optim.AdamW, step: Tensor, parameter: Tensor) -> Tensor:
    """Copy a step count to where torch keeps it: on the CPU for unfused Adam, on the device for fused."""
    return step.clone().to(parameter.device if optimizer.defaults["fused"] else "cpu")


def take_step(optimizer: torch.optim.AdamW) -> bool:
    """Take a step. Return False if it cannot be taken, on the CPU for a step size beyond float32."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        return False
    return True


def not_finite(adam: AdamParams, norm: Tensor) -> InvalidInput:
    """The error for a step that must not be taken; `norm` is the gradient's."""
    return InvalidInput(
        f"the step makes weights that are not finite (learning_rate {adam.learning_rate:g}, eps {adam.eps:g},"
        f" gradient norm {norm.item():g}); the gradient was cleared and the weights are unchanged"
    )


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether no value is NaN or infinite. Asks for the largest magnitude: sums of finite values may
    overflow."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in (one for one in tensors if one.numel()):
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    largest = [torch.nn.utils.get_total_norm(group, float("inf")) for group in by_device.values()]
    return all(bool(one.isfinite()) for one in largest)
