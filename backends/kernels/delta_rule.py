"""The gated delta rule of a packed microbatch on CUDA, in 16 bits, as an operator that compiled layers call.

The kernels are flash-linear-attention's and our own, `delta_rule_gradients.py`, in chunks of 64 tokens (Yang et
al., arXiv 2412.06464, section 3.3); no chunk holds two samples. They read where samples begin from the device alone, so
that a graph serves samples of any lengths. Of tries of segments (`carried_state.py`) they know on the host.

T tokens of a microbatch, S samples, H heads, K and V widths of a key and a value, C tokens of a chunk, R chunks
"""

import functools
import importlib
import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from tinker_server.backends.kernels import carried_state
from tinker_server.backends.kernels.autograd import Context
from tinker_server.backends.kernels.cards import Sizes, choices_on, keep_sizes
from tinker_server.backends.kernels.carried_state import Call
from tinker_server.backends.kernels.delta_rule_tries import run, run_backward
from tinker_server.backends.kernels.targets import DELTA_RULE
from tinker_server.backends.patches import require_as_written
from tinker_server.backends.protocol import BackendFailed

CHUNK = 64
"""C."""
_TESTED_LENGTHS = (130, 1, 2003, 64, 67)
"""Samples by which the kernels are tested; the longest is not compared."""
_CLOSE, _SMALL = 0.05, 1e-3
"""Bound of a difference, as a part of the norm; and what is as good as 0."""
_TUNED: dict[str, Sizes] = {
    "ops.utils.cumsum:chunk_local_cumsum_scalar_kernel": ({}, 4, 3),
    "ops.gated_delta_rule.chunk_fwd:chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 2, 3),
    "ops.gated_delta_rule.wy_fast:recompute_w_u_fwd_kernel": ({}, 4, 3),
    "ops.gated_delta_rule.wy_fast:prepare_wy_repr_bwd_kernel": ({}, 4, 3),
    "ops.common.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 3),
    "ops.common.chunk_delta_h:chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 3),
    "ops.common.chunk_o:chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "ops.common.chunk_o:chunk_bwd_kernel_dv_local": ({}, 4, 3),
}
"""Sizes, warps and stages of each kernel on Hopper. The fastest of those that the library tries, on an H100 at heads of
128; trying them takes minutes at each first start, and each process could choose others, which round differently."""


@functools.cache
def _kernels() -> SimpleNamespace:
    """Return the functions of DELTA_RULE, by their names there."""
    if any(patch.state == "absent" for patch in DELTA_RULE):
        raise BackendFailed(
            "linear attention on CUDA needs fla-core, which the extra gpu brings: pip install fla-core==0.6.0"
        )
    require_as_written(DELTA_RULE)
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # kernels of other packages would take over where these are there
    if choices_on(torch.device("cuda", torch.cuda.current_device())).tuned_delta_rule:
        keep_sizes("fla", _TUNED)
    targets = [patch.target.partition(":") for patch in DELTA_RULE]
    return SimpleNamespace(**{name: getattr(importlib.import_module(module), name) for module, _, name in targets})


def has_kernels(tensor: Tensor) -> bool:
    """Return whether the kernels take tensors of this type, where they are."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def chunk_indices(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the bounds [S + 2] of the samples and of an empty one behind them, and sample and number [R, 2] of each
    chunk. R is as large as S samples of T tokens may need; the chunks that are left over are the empty sample's.

    Both are new tensors: the kernels remember what they made of a tensor by its identity, and a graph's stays the same.
    """
    bounds = F.pad(cu_seqlens.long(), (0, 1), value=num_tokens)
    counts = (bounds.diff() + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    empty = len(counts) - 1
    place_R = torch.arange(num_tokens // CHUNK + empty, device=cu_seqlens.device)
    sample_R = torch.searchsorted(ends, place_R, right=True).clamp(max=empty)
    number_R = torch.where(sample_R < empty, place_R - (ends - counts)[sample_R], 0)
    return bounds, torch.stack([sample_R, number_R], 1)


# A custom operator: torch.compile does not trace it, and so compiles once for every mixture of lengths.
@torch.library.custom_op("tinker_server::packed_delta_rule", mutates_args=())
def packed_delta_rule(  # noqa: PLR0913
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_host: Tensor | None = None,
    parents_host: Tensor | None = None,
    calls: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [T, H, V]; and for backward the decay accumulated in each chunk [T, H] float32, and each chunk's inverted
    triangular system [T, H, C].

    Queries and keys have norm 1. `decay_TH` is logarithmic, float32, at most 0. `cu_seqlens` [S + 1] on the device.
    The last three, where samples are segments of tries: `carried_state.Carried` has them, the last on the device.
    """
    like = query_THK.device, query_THK.dtype, query_THK.shape[1:], value_THV.shape[2]
    _require_as_defined(*like)
    inputs = [query_THK, key_THK, value_THV, decay_TH, beta_TH]
    if of := _calls(calls, cu_seqlens_host, parents_host):
        _require_tries_as_defined(*like)
        out, passed, solved = run(inputs, of, _state_table(query_THK, value_THV, parents_host), _forward)
        return out, passed, solved
    (out, passed, solved), _ = _forward(inputs, cu_seqlens)
    return out, passed, solved


def _calls(flat: Tensor | None, cu_seqlens_host: Tensor | None, parents_host: Tensor | None) -> list[Call]:
    if flat is None or cu_seqlens_host is None or parents_host is None:
        return []
    return list(carried_state.calls(flat, cu_seqlens_host, parents_host))


def _state_table(query_THK: Tensor, value_THV: Tensor, parents_host: Tensor | None) -> Tensor:
    """Return the table of states, 0."""
    assert parents_host is not None
    shape = carried_state.num_kept(parents_host) + 1, *query_THK.shape[1:], value_THV.shape[2]
    return query_THK.new_zeros(shape, dtype=torch.float32)


def _forward(
    inputs: Sequence[Tensor], cu_seqlens: Tensor, begins: Tensor | None = None, keeps: bool = False
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Implement `delta_rule_tries.Forward`."""
    query_THK, _, value_THV, *_ = inputs
    bounds, indices = chunk_indices(cu_seqlens, len(query_THK))
    passed, out, solved, last, *_ = _kernels().chunk_gated_delta_rule_fwd(
        **_batch(*inputs),
        scale=query_THK.shape[-1] ** -0.5,
        initial_state=begins,
        output_final_state=keeps,
        cu_seqlens=bounds,
        chunk_indices=indices,
        chunk_size=CHUNK,
    )
    return (out[0].to(value_THV.dtype), passed[0], solved[0]), last


@torch.library.custom_op("tinker_server::packed_delta_rule_backward", mutates_args=())
def packed_delta_rule_backward(  # noqa: PLR0913
    grad_THV: Tensor,
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    beta_TH: Tensor,
    passed_TH: Tensor,
    solved_THC: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_host: Tensor | None = None,
    parents_host: Tensor | None = None,
    calls: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, decay and beta."""
    saved = [grad_THV, query_THK, key_THK, value_THV, beta_TH, passed_TH, solved_THC]
    if of := _calls(calls, cu_seqlens_host, parents_host):
        kept = _state_table(query_THK, value_THV, parents_host)
        run(saved, [call for call in of if len(call.row_K)], kept, _states)
        of_query, of_key, of_value, of_decay, of_beta = run_backward(saved, of, kept, _gradients)
    else:
        (of_query, of_key, of_value, of_decay, of_beta), _ = _gradients(saved, cu_seqlens)
    return of_query, of_key, of_value, of_decay, of_beta


def _states(
    saved: Sequence[Tensor], cu_seqlens: Tensor, begins: Tensor | None, keeps: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Implement `delta_rule_tries.Forward` for the states alone."""
    _, _, key_THK, value_THV, beta_TH, passed_TH, solved_THC = saved
    k, v, beta, g, solved = (
        tensor.contiguous()[None] for tensor in (key_THK, value_THV, beta_TH, passed_TH, solved_THC)
    )
    bounds, indices = chunk_indices(cu_seqlens, len(key_THK))
    lengths = {"cu_seqlens": bounds, "chunk_indices": indices}
    w, u = _kernels().recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=g, **lengths)
    _, _, last = _kernels().chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=g, initial_state=begins, output_final_state=keeps, **lengths
    )
    return (), last


def _gradients(
    saved: Sequence[Tensor], cu_seqlens: Tensor, begins: Tensor | None = None, of_last: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Implement `delta_rule_tries.Backward`."""
    from tinker_server.backends.kernels.delta_rule_gradients import (
        of_queries_and_keys,  # Triton is there only with CUDA
    )

    grad_THV, query_THK, key_THK, value_THV, beta_TH, passed_TH, solved_THC = saved
    bounds, indices = chunk_indices(cu_seqlens, len(query_THK))
    lengths = {"cu_seqlens": bounds, "chunk_indices": indices}
    kernels, scale = _kernels(), query_THK.shape[-1] ** -0.5
    given = _batch(query_THK, key_THK, value_THV, passed_TH, beta_TH)
    q, k, v, g, beta = given.values()
    grad, solved = grad_THV.contiguous()[None], solved_THC.contiguous()[None]
    w, u = kernels.recompute_w_u_fwd(k=k, v=v, beta=beta, A=solved, g=g, **lengths)
    states, new, _ = kernels.chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=g, initial_state=begins, output_final_state=False, **lengths
    )
    of_new = kernels.chunk_bwd_dv_local(q=q, k=k, g=g, do=grad, scale=scale, **lengths)
    of_states, of_begins, of_new = kernels.chunk_gated_delta_rule_bwd_dhu(
        q=q, k=k, w=w, g=g, h0=begins, dht=of_last, do=grad, dv=of_new, scale=scale, **lengths
    )
    tensors = q[0], k[0], new[0], g[0], grad[0], of_new[0], states[0], of_states[0]
    of_query, of_key, of_w, of_decay = of_queries_and_keys(tensors, bounds, indices, CHUNK)
    of_key_too, of_value, of_beta, of_decay_too = kernels.prepare_wy_repr_bwd(
        k=k, v=v, beta=beta, g=g, A=solved, dw=of_w[None], du=of_new, **lengths
    )
    of_decay = kernels.chunk_local_cumsum((of_decay + of_decay_too[0])[None], chunk_size=CHUNK, reverse=True, **lengths)
    found = (
        of_query,
        (of_key + of_key_too[0]).to(key_THK.dtype),
        of_value[0].to(value_THV.dtype),
        of_decay[0].to(passed_TH.dtype),
        of_beta[0].to(beta_TH.dtype),
    )
    return found, of_begins


@functools.cache
def _require_as_defined(device: torch.device, dtype: torch.dtype, heads: torch.Size, width: int) -> None:
    """Raise BackendFailed if the kernels give other numbers than the recurrence, token by token, for heads of this
    shape."""
    inputs, grad_THV = _random_samples(device, dtype, heads, width)
    cu_seqlens = torch.tensor([0, *_TESTED_LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    (out, *saved), _ = _forward(inputs, cu_seqlens)
    query, key, value, _, beta = inputs
    gradients, _ = _gradients([grad_THV, query, key, value, beta, *saved], cu_seqlens)
    _compare((out, *gradients), inputs, grad_THV)


@functools.cache
def _require_tries_as_defined(device: torch.device, dtype: torch.dtype, heads: torch.Size, width: int) -> None:
    """Require as `_require_as_defined`, where each sample is packed as segments, of which each follows the last."""
    inputs, grad_THV = _random_samples(device, dtype, heads, width)
    begins = [0]
    parents: list[int] = []
    for length in _TESTED_LENGTHS:
        cuts = sorted({-(-length // 3), -(-length * 2 // 3), length})
        parents += [len(parents) + place - 1 if place else -1 for place in range(len(cuts))]
        first = begins[-1]
        begins += [first + cut for cut in cuts]
    flat, _, parents_host = carried_state.tables(begins, parents)
    bounds_host = torch.tensor(begins)
    carried = bounds_host, parents_host, flat.to(device)
    of, kept = _calls(carried[2], bounds_host, parents_host), _state_table(inputs[0], inputs[2], parents_host)
    out, *saved = run(inputs, of, kept, _forward)
    query, key, value, _, beta = inputs
    gradients = packed_delta_rule_backward(grad_THV, query, key, value, beta, *saved, bounds_host, *carried)
    _compare((out, *gradients), inputs, grad_THV)


def _random_samples(
    device: torch.device, dtype: torch.dtype, heads: torch.Size, width: int
) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of samples of `_TESTED_LENGTHS`, and a gradient of the output."""
    num_heads, size = heads
    made = torch.Generator(device).manual_seed(0)
    num_tokens = sum(_TESTED_LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, *shape, device=device, generator=made)

    units = (F.normalize(random(size), dim=-1).to(dtype) for _ in range(2))
    inputs = [*units, random(width).to(dtype), -random().abs(), random().sigmoid().to(dtype)]
    return inputs, random(width).to(dtype)


def _compare(found: Sequence[Tensor], inputs: Sequence[Tensor], grad_THV: Tensor) -> None:
    """Raise BackendFailed if the output and the gradients of the samples of `_TESTED_LENGTHS` are not those of the
    recurrence."""
    for begin, end in pairwise([0, *accumulate(_TESTED_LENGTHS)]):
        sample, length = slice(begin, end), end - begin
        if length > _TESTED_LENGTHS[0]:
            continue
        wanted = _by_recurrence([tensor[sample] for tensor in inputs], grad_THV[sample])
        for part, whole in zip((tensor[sample].float() for tensor in found), wanted, strict=True):
            # A sample of one token has no gradient of its decay.
            apart: float = ((part - whole).norm() / (whole.norm() + _SMALL * whole.numel() ** 0.5)).item()
            if not apart < _CLOSE:
                num_heads, size = inputs[0].shape[1:]
                raise BackendFailed(
                    f"the kernels of linear attention give other numbers than its definition, for {num_heads} heads of"
                    f" {size} and {grad_THV.shape[2]} values and a sample of {length} tokens: {apart:.3g} of their norm"
                )


def _by_recurrence(inputs: list[Tensor], grad_THV: Tensor) -> list[Tensor]:
    """Return the output of a sample and the gradients of its inputs, in float32 and without autograd, which an
    operator's code does not have (equation 10 of arXiv 2412.06464)."""
    query, key, value, decay, beta = floats = [tensor.float() for tensor in inputs]
    scale, kept = query.shape[-1] ** -0.5, decay.exp()
    outputs, states, missing = [], [query.new_zeros(*query.shape[1:], value.shape[2])], []
    for q, k, v, keep, rate in zip(query, key, value, kept, beta, strict=True):
        state = states[-1] * keep[:, None, None]
        missing.append(v - (k[..., None] * state).sum(1))
        states.append(state + k[..., None] * (missing[-1] * rate[:, None])[:, None])
        outputs.append((q[..., None] * states[-1]).sum(1) * scale)
    found = [torch.zeros_like(tensor) for tensor in floats]
    grad_state = torch.zeros_like(states[0])
    for at in reversed(range(len(query))):
        q, k, keep, rate, grad_out = (
            query[at],
            key[at],
            kept[at][:, None, None],
            beta[at][:, None],
            grad_THV[at].float(),
        )
        grad_state = grad_state + q[..., None] * grad_out[:, None] * scale
        grad_missing = (k[..., None] * grad_state).sum(1)
        of_query = (states[at + 1] * grad_out[:, None]).sum(-1) * scale
        of_key = (grad_state * (missing[at] * rate)[:, None]).sum(-1)
        of_key = of_key - (states[at] * keep * (grad_missing * rate)[:, None]).sum(-1)
        of_beta = (grad_missing * missing[at]).sum(-1)
        grad_state = grad_state - k[..., None] * (grad_missing * rate)[:, None]
        of_decay = (grad_state * states[at] * keep).sum((1, 2))
        grad_state = grad_state * keep
        for total, of_token in zip(found, (of_query, of_key, grad_missing * rate, of_decay, of_beta), strict=True):
            total[at] = of_token
    return [torch.stack(outputs), *found]


def _batch(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> dict[str, Tensor]:
    """Return the tensors as the kernels name them, and as they lie in memory there."""
    named = {"q": query, "k": key, "v": value, "g": decay, "beta": beta}
    return {name: tensor.contiguous()[None] for name, tensor in named.items()}


@packed_delta_rule.register_fake
def _(_query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_heads = value_THV.shape[:2]
    return (
        value_THV.new_empty(value_THV.shape),
        value_THV.new_empty(num_tokens, num_heads, dtype=torch.float32),
        key_THK.new_empty(num_tokens, num_heads, CHUNK),
    )


@packed_delta_rule_backward.register_fake
def _(_grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    query, key, value, beta, passed, *_ = tensors
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value, passed, beta))


def _save(ctx: Context, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, _, beta, *lengths = inputs
    _, passed, solved = output
    ctx.save_for_backward(query, key, value, beta, passed, solved, *lengths)


def _backward(ctx: Context, grad_THV: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *packed_delta_rule_backward(grad_THV, *ctx.saved_tensors), None, None, None, None


packed_delta_rule.register_autograd(_backward, setup_context=_save)
