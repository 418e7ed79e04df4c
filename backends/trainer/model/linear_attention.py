"""Linear attention (the gated delta rule) over packed microbatches: each sample begins with a state of its own.

transformers carries state and convolution from one packed sample into the next. Its two functions are replaced, for
calls with the lengths of packed samples (`attention.varlen_arguments`) alone. Where ranks have slices of the tokens,
each computes all tokens of some heads and channels (`kernels/exchange.py`). The rule is computed chunk by chunk, as
by Yang et al., "Gated Delta Networks" (arXiv 2412.06464, section 3.3), and in the notation of transformers' own
`torch_chunk_gated_delta_rule`: but a chunk never holds two samples, and all samples take a step of the scan together.

T tokens of the microbatch, H heads, K and V widths of a key and a value, C tokens of a chunk, R chunks, S samples
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary
from transformers.activations import ACT2FN

from backends.families.linear_attention import CONVOLUTIONS, DELTA_RULES
from backends.kernels.exchange import own_part, to_heads, to_tokens
from backends.kernels.pinned_copy import to_device

_CHUNKS = (64, 32, 16, 8, 4, 2, 1)
"""Lengths of chunks, the fastest first; the result is the same up to rounding."""
_MOST_PADDING = 1.25
"""Tokens with padding over tokens, above which chunks are shorter: a thousand samples of two tokens would fill the
memory of 64,000."""
_EPS = 1e-6
"""Added to the squared norm of queries and keys, as transformers does."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of a packed microbatch, the first ones of all samples first, of the longest sample first."""

    token_RC: Tensor
    """Index of each token; T for padding."""
    place_T: Tensor
    """Index of each token in the R * C of the chunks."""
    steps: list[int]
    """Chunks of each step of the scan: one of every sample that is as long. Samples that end are the last ones."""
    spaced: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By padding P: index of each token in a row with P places before every sample, T for such a place; and the index
    of each token's output in a convolution of width P + 1 over that row."""


_KNOWN = WeakIdKeyDictionary()
"""Chunks by the lengths of samples that they were made for, which all layers of a forward and backward have."""
_REPLACED: set[str] = set()
"""Modules whose functions are replaced."""


def pack_linear_attention(decoder: nn.Module) -> None:
    """Let the decoder's layers of linear attention begin anew at each packed sample."""
    modules = {type(one).__module__ for name, one in decoder.named_modules() if name.endswith(".linear_attn")}
    for module in modules - _REPLACED:
        for patches, make in ((CONVOLUTIONS, _convolution), (DELTA_RULES, _delta_rule)):
            own = getattr(importlib.import_module(module), patches[module].target.rpartition(":")[2])
            patches[module].replace(make(own))
        _REPLACED.add(module)


def _convolution(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(  # noqa: PLR0913
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        packed_cu_seqlens_host: Tensor | None = None,
        packed_group: str | None = None,
        **other: object,
    ) -> Tensor:
        """Convolve [1, channels, T] with [channels, width], each sample for itself."""
        if packed_cu_seqlens_host is None:
            return own(hidden_states, weight, bias, activation=activation, **other)
        of_tokens_TC = hidden_states[0].T
        if packed_group is not None:
            weight = own_part(weight, packed_group)
            bias = None if bias is None else own_part(bias, packed_group)
            of_tokens_TC = to_heads(of_tokens_TC[..., None], packed_group)[..., 0]
        spaced_N, kept_T = _spaced(packed_cu_seqlens_host, weight.shape[-1] - 1, hidden_states.device)
        row = F.pad(of_tokens_TC.T[None].to(weight.dtype), (0, 1)).index_select(-1, spaced_N)
        out = F.conv1d(row, weight.unsqueeze(1), bias, groups=weight.shape[0]).index_select(-1, kept_T)
        out = out if activation is None else ACT2FN[activation](out)
        out = out.to(hidden_states.dtype)
        if packed_group is not None:
            out = to_tokens(out[0].T[..., None], packed_group)[..., 0].T[None]
        return out

    return convolution


def _delta_rule(own: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def delta_rule(  # noqa: PLR0913
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        packed_cu_seqlens_host: Tensor | None = None,
        packed_group: str | None = None,
        **other: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Query and key [1, T, H, K], value [1, T, H, V], g and beta [1, T, H]; returns [1, T, H, V] and no state."""
        if packed_cu_seqlens_host is None:
            return own(query, key, value, g=g, beta=beta, **other)
        assert other.get("initial_state") is None and not other.get("output_final_state"), "training keeps no states"
        assert other.get("use_qk_l2norm_in_kernel"), "all models here have normalised queries and keys"
        chunks = _chunks(packed_cu_seqlens_host, query.device)
        if packed_group is None:
            return _packed_delta_rule(query[0], key[0], value[0], g[0], beta[0], chunks)[None], None
        query, key, value = (to_heads(one[0], packed_group) for one in (query, key, value))
        g, beta = (to_heads(one[0][..., None], packed_group)[..., 0] for one in (g, beta))
        out_THV = _packed_delta_rule(query, key, value, g, beta, chunks)
        return to_tokens(out_THV, packed_group)[None], None

    return delta_rule


def _packed_delta_rule(  # noqa: PLR0913
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, decay_TH: Tensor, beta_TH: Tensor, chunks: Chunks
) -> Tensor:
    """[T, H, V] in the queries' dtype, computed in float32 at least. `decay_TH` is logarithmic, at most 0."""
    wide = torch.promote_types(query_THK.dtype, torch.float32)

    def chunked(tensor: Tensor) -> Tensor:
        """[R, H, C, ...] of [T, H, ...]; padding is 0, and changes no state."""
        padded = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]).to(wide)
        return padded[chunks.token_RC].transpose(1, 2)

    query, key, value, decay, beta = map(chunked, (query_THK, key_THK, value_THV, decay_TH, beta_TH))
    query = _normalised(query) * query.shape[-1] ** -0.5
    key = _normalised(key)
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
    for num_samples in chunks.steps:
        rows = slice(begin, begin + num_samples)
        state_SHKV = state_SHKV[:num_samples]
        new = written[rows] - read[rows] @ state_SHKV
        outputs.append(query[rows] @ state_SHKV + attention[rows] @ new)
        state_SHKV = state_SHKV * lasting[rows] + key[rows].mT @ new
        begin += num_samples
    out_RCHV = torch.cat(outputs).transpose(1, 2)
    return out_RCHV.flatten(0, 1).index_select(0, chunks.place_T).to(query_THK.dtype)


def _normalised(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + _EPS)


def _chunks(cu_seqlens_host: Tensor, device: torch.device) -> Chunks:
    known: Chunks | None = _KNOWN.get(cu_seqlens_host)
    if known is None or known.token_RC.device != device:
        known = _KNOWN[cu_seqlens_host] = make_chunks(cu_seqlens_host.numpy(), device)
    return known


def make_chunks(cu_seqlens: np.ndarray, device: torch.device) -> Chunks:
    """Lay the samples between `cu_seqlens` [S + 1] out in chunks."""
    begins, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    num_tokens = int(cu_seqlens[-1])
    size = next(size for size in _CHUNKS if (-(-lengths // size) * size).sum() <= _MOST_PADDING * num_tokens)
    order = np.argsort(-lengths, kind="stable")
    begins, lengths = begins[order], lengths[order]
    counts = -(-lengths // size)
    steps = [int((counts > step).sum()) for step in range(counts[0])]
    sample_R = np.concatenate([np.arange(num_samples) for num_samples in steps])
    step_R = np.repeat(np.arange(len(steps)), steps)
    offset_RC = step_R[:, None] * size + np.arange(size)
    token_RC = begins[sample_R][:, None] + offset_RC
    is_token_RC = offset_RC < lengths[sample_R][:, None]
    place_T = np.empty(num_tokens, np.int64)
    place_T[token_RC[is_token_RC]] = np.flatnonzero(is_token_RC)
    token_RC[~is_token_RC] = num_tokens
    return Chunks(_placed(token_RC, device), _placed(place_T, device), steps)


def _spaced(cu_seqlens_host: Tensor, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    known = _chunks(cu_seqlens_host, device).spaced
    if padding not in known:
        known[padding] = make_spaced(cu_seqlens_host.numpy(), padding, device)
    return known[padding]


def make_spaced(cu_seqlens: np.ndarray, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of `Chunks.spaced`."""
    num_tokens, num_samples = int(cu_seqlens[-1]), len(cu_seqlens) - 1
    sample_T = np.repeat(np.arange(num_samples), np.diff(cu_seqlens))
    kept_T = np.arange(num_tokens) + sample_T * padding
    spaced_N = np.full(num_tokens + num_samples * padding, num_tokens)
    spaced_N[kept_T + padding] = np.arange(num_tokens)
    return _placed(spaced_N, device), _placed(kept_T, device)


def _placed(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
