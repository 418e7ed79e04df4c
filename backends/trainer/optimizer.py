"""AdamW as every model here uses it: its state, and the trial of a step before it is taken."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from tinker_server.api_schemas.training import AdamParams
from tinker_server.backends.protocol import InvalidInput

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of what Adam keeps of a tensor, beside the number of steps."""
TRIED_AT_ONCE = 1 << 26
"""Numbers of parameters of which a step is tried at once: with copies of all parameters and moments, training would
take as much memory again."""
_BOUND, _LEAST_DECAY = 1e37, 1e-4
"""Magnitude that numbers of a step which needs no trial stay below, a thirtieth of float32's largest; least distance
of a beta from 1 at which torch's corrections of the moments, in float32, are near those here."""
GradientState = Literal["none", "whole", "incomplete"]
"""State of what was accumulated since the last optim_step; incomplete: a part of it failed."""
Piece = tuple[nn.Parameter, slice]
"""Some of a parameter's numbers."""


def step_on_device(optimizer: torch.optim.AdamW, step: Tensor, parameter: Tensor) -> Tensor:
    """Copy a step count to where torch keeps it: on the CPU for unfused Adam, on the device for fused."""
    return step.clone().to(parameter.device if optimizer.defaults["fused"] else "cpu")


def move(parameters: Iterable[nn.Parameter], optimizer: torch.optim.AdamW, device: torch.device) -> None:
    """Move parameters, their gradients and their moments to a device. If it has no room, some have moved, each with
    all that is its own."""
    for parameter in parameters:
        data, gradient = parameter.data.to(device), None if parameter.grad is None else parameter.grad.to(device)
        state = optimizer.state.get(parameter, {})
        moved = {
            kind: step_on_device(optimizer, value, data) if kind == "step" else value.to(device)
            for kind, value in state.items()
        }
        parameter.grad = None  # it must be where its parameter is
        parameter.data, parameter.grad = data, gradient
        state.update(moved)


def prepare_step(optimizer: torch.optim.AdamW, adam: AdamParams, norm: Tensor, *, sums_bits: bool) -> list[Tensor]:
    """Clip the gradient, try the step unless bounds show that it is possible, and make the moments of a first one, so
    that the step itself needs no memory.

    `norm` is the gradient's. `sums_bits`: return sums [] of the bits that float32 parameters and moments will have.
    Raises InvalidInput if any of them would not be finite; parameters and moments are unchanged.
    """
    parameters = [weight for weight in optimizer.param_groups[0]["params"] if weight.grad is not None]
    if adam.grad_clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, adam.grad_clip_norm, norm)
    optimizer.param_groups[0].update(
        lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
    )
    sums: list[Tensor] = []
    is_safe = not sums_bits and optimizer.defaults["fused"] and _stays_finite(optimizer, parameters, adam, norm)
    for pieces in () if is_safe else _pieces(parameters):
        stepped = _try_step(optimizer, pieces)
        if stepped is None or not all_finite(stepped):
            raise _not_finite(adam, norm)
        if sums_bits:
            sums += [tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in stepped]
        del stepped  # or it is there beside the copies of the next pieces
    fresh = {
        parameter: {"step": step_on_device(optimizer, torch.zeros(()), parameter)}
        | {kind: torch.zeros_like(parameter, memory_format=torch.preserve_format) for kind in MOMENTS}
        for parameter in parameters
        if parameter not in optimizer.state
    }
    optimizer.state.update(fresh)
    return sums


def _stays_finite(
    optimizer: torch.optim.AdamW, parameters: Iterable[nn.Parameter], adam: AdamParams, norm: Tensor
) -> bool:
    """Return whether bounds on all numbers of a fused step, which needs no memory, show that it leaves finite ones.

    No gradient is larger than `norm`. A moment is a mean of the last one and of gradients or their squares. An update
    is at most learning_rate / (1 - beta1) x exp_avg / eps. The trial would read and write seven times as much.
    """
    weights = [weight for weight in parameters if weight.numel()]
    states = [state for weight in weights if (state := optimizer.state.get(weight))]
    averages, squares = ([state[kind] for state in states] for kind in MOMENTS)
    if not weights or min(1 - adam.beta1, 1 - adam.beta2) < _LEAST_DECAY:
        return False
    found = [_largest(tensors) if tensors else torch.zeros_like(norm) for tensors in (weights, averages, squares)]
    least = torch.stack([square.amin() for square in squares]).amin() if squares else torch.zeros_like(norm)
    gradient, weight, average, square, least_square = torch.stack([norm, *found, least]).double().tolist()
    average, square = max(average, gradient), max(square, gradient**2)
    step = adam.learning_rate / (1 - adam.beta1)
    decayed = weight * (1 + adam.learning_rate * adam.weight_decay)
    bounds = [square / (1 - adam.beta2), average / adam.eps, decayed + step * max(1.0, average / adam.eps)]
    return least_square >= 0 and all(bound < _BOUND for bound in bounds)


@contextmanager
def keeping_state(optimizer: torch.optim.AdamW) -> Iterator[None]:
    """Drop the moments that `prepare_step` has made on this rank, if what is inside fails on any."""
    before = dict(optimizer.state)
    try:
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise


def _try_step(optimizer: torch.optim.AdamW, pieces: list[Piece]) -> list[Tensor] | None:
    """Return pieces of parameters, and of their moments, as a step would leave them. None if it cannot be taken, on the
    CPU for a step size beyond float32."""
    copies = [nn.Parameter(parameter.detach().reshape(-1)[part].clone()) for parameter, part in pieces]
    trial = torch.optim.AdamW(copies, fused=optimizer.defaults["fused"])
    trial.param_groups[0].update({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
    for copy, (parameter, part) in zip(copies, pieces, strict=True):
        assert parameter.grad is not None
        copy.grad = parameter.grad.reshape(-1)[part]
        state = optimizer.state.get(parameter, {})
        trial.state[copy] = {
            key: (value.reshape(-1)[part] if value.dim() else value).clone() for key, value in state.items()
        }
    try:
        trial.step()
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
        return None
    return [*(copy.detach() for copy in copies), *(trial.state[copy][kind] for copy in copies for kind in MOMENTS)]


def _pieces(parameters: Iterable[nn.Parameter]) -> Iterator[list[Piece]]:
    """Yield all parameters, TRIED_AT_ONCE numbers at a time."""
    pieces: list[Piece] = []
    left = TRIED_AT_ONCE
    for parameter in parameters:
        begin = 0
        while begin < parameter.numel():
            end = min(parameter.numel(), begin + left)
            pieces.append((parameter, slice(begin, end)))
            left, begin = left - (end - begin), end
            if not left:
                yield pieces
                pieces, left = [], TRIED_AT_ONCE
    if pieces:
        yield pieces


def _not_finite(adam: AdamParams, norm: Tensor) -> InvalidInput:
    """Return the error for a step that must not be taken; `norm` is the gradient's."""
    return InvalidInput(
        f"the step makes weights that are not finite (learning_rate {adam.learning_rate:g}, eps {adam.eps:g},"
        f" gradient norm {norm.item():g}); the gradient was cleared and the weights are unchanged"
    )


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether no value is NaN or infinite. Asks for the largest magnitude: sums of finite values may
    overflow."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(bool(_largest(group).isfinite()) for group in by_device.values())


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude [], or NaN; the tensors are on one device."""
    return torch.nn.utils.get_total_norm(tensors, float("inf"))
