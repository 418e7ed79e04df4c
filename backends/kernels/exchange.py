"""The exchange of context parallelism: ranks turn slices of tokens with all heads into all tokens of some heads, and
back (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509).

N ranks, S tokens of a rank's slice, T = N * S tokens of the microbatch, H heads, D values of a head
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tinker_server.backends.kernels.autograd import Context

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""By name: an operator takes no group."""


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which `to_heads` and `to_tokens` know a group."""
    name: str = group.group_name
    _GROUPS[name] = group
    return name


def num_ranks(name: str) -> int:
    """Return N of a named group."""
    return _GROUPS[name].size()


def own_part(of_heads: Tensor, name: str) -> Tensor:
    """Return what belongs to this rank's heads, of a tensor [H, ...] of all heads."""
    return of_heads.chunk(num_ranks(name))[_GROUPS[name].rank()]


# Custom operators: torch.compile does not trace them.
@torch.library.custom_op("tinker_server::to_heads", mutates_args=())
def to_heads(x_SHD: Tensor, group: str) -> Tensor:
    """Return [T, H / N, D]: the rank's own heads of all tokens, from all heads of its own tokens. N divides H."""
    size = num_ranks(group)
    sent = x_SHD.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    return _exchange(sent, group).flatten(0, 1)


@torch.library.custom_op("tinker_server::to_tokens", mutates_args=())
def to_tokens(x_THD: Tensor, group: str) -> Tensor:
    """Return [S, H, D]: all heads of the rank's own tokens, from H / N heads of all tokens [T, H / N, D]."""
    received = _exchange(x_THD.contiguous(), group)
    whole: Tensor = received.unflatten(0, (num_ranks(group), -1)).transpose(0, 1).flatten(1, 2).contiguous()
    return whole


def _exchange(sent: Tensor, group: str) -> Tensor:
    """Send each rank its part of equal parts of the first dimension; return what came, by rank."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_GROUPS[group])
    return received


@to_heads.register_fake
def _(x_SHD: Tensor, group: str) -> Tensor:
    size = num_ranks(group)
    return x_SHD.new_empty(size * x_SHD.shape[0], x_SHD.shape[1] // size, *x_SHD.shape[2:])


@to_tokens.register_fake
def _(x_THD: Tensor, group: str) -> Tensor:
    size = num_ranks(group)
    return x_THD.new_empty(x_THD.shape[0] // size, size * x_THD.shape[1], *x_THD.shape[2:])


class _ExchangeContext(Context, Protocol):
    group: str


def _save(ctx: _ExchangeContext, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG001
    _, ctx.group = inputs


def _heads_backward(ctx: _ExchangeContext, grad_THD: Tensor) -> tuple[Tensor, None]:
    return to_tokens(grad_THD, ctx.group), None


def _tokens_backward(ctx: _ExchangeContext, grad_SHD: Tensor) -> tuple[Tensor, None]:
    return to_heads(grad_SHD, ctx.group), None


to_heads.register_autograd(_heads_backward, setup_context=_save)
to_tokens.register_autograd(_tokens_backward, setup_context=_save)
