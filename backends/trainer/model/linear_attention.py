"""Linear attention (the gated delta rule, Mamba2) over packed microbatches: each sample has a state of its own, and a
segment of a trie of samples begins with that of the segment before it.

transformers carries state and convolution from one packed sample into the next. Its two functions are replaced, for
calls with the lengths of packed samples (`attention.varlen_arguments`) alone. Where ranks have slices of the tokens,
each computes all tokens of some heads and channels (`kernels/exchange.py`). Mamba2 is in `state_space.py`. The delta
rule is computed chunk by chunk, as by Yang et al., "Gated Delta Networks" (arXiv 2412.06464, section 3.3), and in the
notation of transformers' own `torch_chunk_gated_delta_rule`: but a chunk never holds two samples, and all samples take
a step of the scan together. In bfloat16 on CUDA it has kernels (`kernels/delta_rule.py`).

T tokens of the microbatch, H heads, K and V widths of a key and a value, C tokens of a chunk, R chunks, S samples
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from tinker_server.backends.families.linear_attention import CONVOLUTIONS, DELTA_RULES, SCANS
from tinker_server.backends.kernels.carried_state import MOST_BEFORE, tails
from tinker_server.backends.kernels.delta_rule import has_kernels, packed_delta_rule
from tinker_server.backends.kernels.exchange import own_part, to_heads, to_tokens
from tinker_server.backends.patches import Patch
from tinker_server.backends.trainer.model.sample_chunks import Chunks, chunks_of
from tinker_server.backends.trainer.model.state_space import packed_scan

_EPS = 1e-6
"""Added to the squared norm of queries and keys, as transformers does."""
_REPLACED: set[str] = set()
"""Modules whose functions are replaced."""


def pack_linear_attention(decoder: nn.Module) -> None:
    """Let the decoder's layers of linear attention begin anew at each packed sample."""
    modules = _modules(decoder) - _REPLACED
    for module in modules:
        for patches, make in ((CONVOLUTIONS, _convolution), (DELTA_RULES, _delta_rule), (SCANS, packed_scan)):
            if module in patches:
                own = _function(patches[module])
                patches[module].replace(functools.wraps(own)(make(own)))
    _REPLACED.update(modules)


@contextmanager
def in_plain_torch(decoder: nn.Module) -> Iterator[None]:
    """While it is active, the decoder's layers of linear attention run transformers' own functions in plain torch, of a
    single sample. Outside, transformers takes those of flash-linear-attention where it is installed, whose kernels do
    not run on a CPU."""
    with ExitStack() as replaced:
        for module in _modules(decoder):
            for patch in (patches[module] for patches in (CONVOLUTIONS, DELTA_RULES, SCANS) if module in patches):
                function = _function(patch)
                patch.replace(_of_one_sample(inspect.unwrap(function)))
                replaced.callback(patch.replace, function)
        yield


def _of_one_sample(plain: Callable[..., object]) -> Callable[..., object]:
    taken = inspect.signature(plain).parameters

    def function(*args: object, **others: object) -> object:
        return plain(*args, **{name: value for name, value in others.items() if name in taken})

    return function


def _modules(decoder: nn.Module) -> set[str]:
    """Return the modules of transformers whose functions the decoder's layers of linear attention call."""
    return {type(module).__module__ for module in decoder.modules()} & CONVOLUTIONS.keys()


def _function(patch: Patch) -> Callable[..., Any]:
    module, _, name = patch.target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _convolution(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(  # noqa: PLR0913
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        packed_cu_seqlens: Tensor | None = None,
        packed_tails: Tensor | None = None,
        packed_group: str | None = None,
        **other: object,
    ) -> Tensor:
        """Convolve [1, channels, T] with [channels, width], each sample for itself."""
        if packed_cu_seqlens is None:
            return own(hidden_states, weight, bias, activation=activation, **other)
        row_CT = hidden_states[0]
        if packed_group is not None:
            weight = own_part(weight, packed_group)
            bias = None if bias is None else own_part(bias, packed_group)
            row_CT = to_heads(row_CT.T[..., None], packed_group)[..., 0].T
        wide = torch.promote_types(torch.promote_types(row_CT.dtype, weight.dtype), torch.float32)
        row_CT, weight = row_CT.to(wide), weight.to(wide)
        out_CT = _convolved(row_CT, weight, _places(packed_cu_seqlens, row_CT.shape[1]))
        out_CT = out_CT if packed_tails is None else _with_tails(out_CT, row_CT, weight, packed_tails)
        out_CT = out_CT if bias is None else out_CT + bias.to(wide)[:, None]
        out_CT = (out_CT if activation is None else _activated(activation, out_CT)).to(hidden_states.dtype)
        if packed_group is not None:
            out_CT = to_tokens(out_CT.T[..., None], packed_group)[..., 0].T
        return out_CT[None]

    return convolution


def _places(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return each token's index in its sample [T]."""
    token_T = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return token_T - cu_seqlens[torch.searchsorted(cu_seqlens, token_T, right=True) - 1]


def _convolved(row_CT: Tensor, weight: Tensor, place_T: Tensor) -> Tensor:
    """Sum the products of shifted rows: compiled code fuses them with what comes before and after."""
    num_tokens, width = row_CT.shape[1], weight.shape[1]
    out_CT = row_CT * weight[:, -1:]
    for back in range(1, width):
        earlier_CT = F.pad(row_CT, (back, 0))[:, :num_tokens].masked_fill(place_T < back, 0)
        out_CT = out_CT + earlier_CT * weight[:, width - 1 - back, None]
    return out_CT


def _with_tails(out_CT: Tensor, row_CT: Tensor, weight: Tensor, flat: Tensor) -> Tensor:
    """Add what the first tokens of segments read of the segments before; `flat` as `carried_state.tails` reads it."""
    token_F, before_FB = tails(flat)
    width = weight.shape[1]
    assert width - 1 <= MOST_BEFORE, "sharing is refused for a wider convolution"
    before_FB = before_FB[:, : width - 1]
    read_CFB = row_CT[:, before_FB.clamp(min=0)].masked_fill(before_FB < 0, 0)
    return out_CT.index_add(1, token_F, (read_CFB * weight[:, :-1].flip(1)[:, None]).sum(-1))


def _activated(name: str, tensor: Tensor) -> Tensor:
    return F.silu(tensor) if name in ("silu", "swish") else ACT2FN[name](tensor)


def _delta_rule(own: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def delta_rule(  # noqa: PLR0913
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        packed_cu_seqlens: Tensor | None = None,
        packed_cu_seqlens_host: Tensor | None = None,
        packed_parents_host: Tensor | None = None,
        packed_calls: Tensor | None = None,
        packed_group: str | None = None,
        **other: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Query and key [1, T, H, K], value [1, T, H, V], g and beta [1, T, H]; returns [1, T, H, V] and no state."""
        if packed_cu_seqlens is None or packed_cu_seqlens_host is None:
            return own(query, key, value, g=g, beta=beta, **other)
        assert other.get("initial_state") is None and not other.get("output_final_state"), "training keeps no states"
        assert other.get("use_qk_l2norm_in_kernel"), "all models here have normalised queries and keys"
        query, key, value, g, beta = query[0], key[0], value[0], g[0], beta[0]
        if packed_group is not None:
            query, key, value = (to_heads(one, packed_group) for one in (query, key, value))
            g, beta = (to_heads(one[..., None], packed_group)[..., 0] for one in (g, beta))
        wide = torch.promote_types(query.dtype, torch.float32)
        unit_query, unit_key = (_normalised(one.to(wide)) for one in (query, key))
        if has_kernels(query):
            units = unit_query.to(query.dtype), unit_key.to(key.dtype)
            given = (*units, value, g.float(), beta, packed_cu_seqlens)
            if packed_parents_host is None:
                out_THV, *_ = packed_delta_rule(*given)
            else:
                out_THV, *_ = packed_delta_rule(*given, packed_cu_seqlens_host, packed_parents_host, packed_calls)
        else:
            chunks = chunks_of(packed_cu_seqlens_host, query.device, packed_parents_host)
            out_THV = _packed_delta_rule(unit_query, unit_key, value.to(wide), g.to(wide), beta.to(wide), chunks)
            out_THV = out_THV.to(query.dtype)
        return (out_THV if packed_group is None else to_tokens(out_THV, packed_group))[None], None

    return delta_rule


def _packed_delta_rule(  # noqa: PLR0913
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, chunks: Chunks
) -> Tensor:
    """Return [T, H, V]. Queries and keys have norm 1; `decay_TH` is logarithmic, at most 0."""

    def chunked(tensor: Tensor) -> Tensor:
        """Return [R, H, C, ...] of [T, H, ...]; padding is 0, and changes no state."""
        padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
        return padded[chunks.token_RC].transpose(1, 2)

    query, key, value, decay, beta = map(chunked, (query_THK, key_THK, value_THV, decay_TH, beta_TH))
    query = query * query.shape[-1] ** -0.5
    size = chunks.token_RC.shape[1]
    future_CC = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    passed = decay.cumsum(-1)
    between = (passed[..., :, None] - passed[..., None, :]).masked_fill(future_CC, -torch.inf).exp()
    key_beta = key * beta[..., None]
    system = (key_beta @ key.mT) * between
    attention = (query @ key.mT) * between
    written = torch.linalg.solve_triangular(system, value * beta[..., None], upper=False, unitriangular=True)
    read = torch.linalg.solve_triangular(system, key_beta * passed.exp()[..., None], upper=False, unitriangular=True)
    query = query * passed.exp()[..., None]
    key = key * (passed[..., -1:] - passed).exp()[..., None]
    lasting = passed[..., -1].exp()[..., None, None]
    state_SHKV = query.new_zeros(chunks.steps[0], *key.shape[1:2], key.shape[-1], value.shape[-1])
    outputs, begin = [], 0
    for step, num_samples in enumerate(chunks.steps):
        rows = slice(begin, begin + num_samples)
        state_SHKV = chunks.states(state_SHKV, step) if step else state_SHKV
        new = written[rows] - read[rows] @ state_SHKV
        outputs.append(query[rows] @ state_SHKV + attention[rows] @ new)
        state_SHKV = state_SHKV * lasting[rows] + key[rows].mT @ new
        begin += num_samples
    out_RCHV = torch.cat(outputs).transpose(1, 2)
    return out_RCHV.flatten(0, 1).index_select(0, chunks.place_T)


def _normalised(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + _EPS)
