"""Mamba2's scan over packed microbatches: each sample begins with a state of its own, and a segment of a trie of
samples with the last state of the segment before it.

It is computed chunk by chunk, as by Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060, section 6), and in the
notation of transformers' own `mamba2_chunk_scan`: but a chunk never holds two samples, and all samples take a step of
the scan together. Where ranks have slices of the tokens, each computes all tokens of some heads.

T tokens of the microbatch, H heads, G groups of K heads that share B and C, P width of a head, N width of the state,
C tokens of a chunk, R chunks, S samples
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tinker_server.backends.kernels.exchange import own_part, to_tokens
from tinker_server.backends.trainer.model.attention import own_heads
from tinker_server.backends.trainer.model.sample_chunks import Chunks, chunks_of


def packed_scan(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the scan that takes the place of transformers' `own`, which calls without lengths go to."""

    def scan(  # noqa: PLR0913
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        packed_cu_seqlens_host: Tensor | None = None,
        packed_parents_host: Tensor | None = None,
        packed_group: str | None = None,
        **other: object,
    ) -> Tensor:
        """Scan hidden states [1, T, H, P], the result's shape; dt [1, T, H], A, D and dt_bias [H], B and C
        [1, T, G, N]."""
        if packed_cu_seqlens_host is None:
            return own(hidden_states, dt, A, B, C, D=D, dt_bias=dt_bias, **other)
        assert other.get("initial_states") is None and not other.get("return_final_states"), "training keeps no states"
        assert other.get("dt_softplus") and other.get("dt_limit") == (0.0, torch.inf), "steps are as the engine's"
        chunks = chunks_of(packed_cu_seqlens_host, hidden_states.device, packed_parents_host)
        x, steps, of_state, to_output = hidden_states[0], dt[0], B[0], C[0]
        if packed_group is not None:
            x, of_state, to_output, steps = own_heads([x, of_state, to_output, steps[..., None]], packed_group)
            steps = steps[..., 0]
            A, D, dt_bias = (own_part(one, packed_group) for one in (A, D, dt_bias))
        wide = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(steps.to(wide) + dt_bias.to(wide))
        x_THP = x.to(wide)
        out_THP = _scan(x_THP * steps[..., None], steps * A.to(wide), of_state.to(wide), to_output.to(wide), chunks)
        out_THP = (out_THP + x_THP * D.to(wide)[:, None]).to(x.dtype)
        return (out_THP if packed_group is None else to_tokens(out_THP, packed_group))[None]

    return scan


def _scan(x_THP: Tensor, decay_TH: Tensor, b_TGN: Tensor, c_TGN: Tensor, chunks: Chunks) -> Tensor:
    """Return [T, H, P]: what tokens read by their C of what they and those before have written by their B. `decay_TH`
    is logarithmic, at most 0."""
    num_groups = b_TGN.shape[1]

    def chunked(tensor: Tensor) -> Tensor:
        """Return [R, C, ...] of [T, ...]; padding is 0, and changes no state."""
        return torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])[chunks.token_RC]

    x_RGKCP = chunked(x_THP).unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4)
    decay_RGKC = chunked(decay_TH).unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1)
    b_RGCN, c_RGCN = (chunked(one).transpose(1, 2) for one in (b_TGN, c_TGN))
    between_RGKCC = _passed_between(decay_RGKC)
    out_RGKCP = (between_RGKCC * (c_RGCN @ b_RGCN.mT)[:, :, None]) @ x_RGKCP
    if len(chunks.steps) > 1:
        # The state of a group's heads is one matrix [K P, N].
        lasting_RGKC1 = between_RGKCC[..., -1, :, None]
        written_RGMN = (x_RGKCP * lasting_RGKC1).transpose(3, 4).flatten(2, 3) @ b_RGCN
        before_RGMN = _states_before(written_RGMN, decay_RGKC.sum(-1).exp(), chunks)
        read_RGKPC = (before_RGMN @ c_RGCN.mT).unflatten(2, (-1, x_RGKCP.shape[-1]))
        out_RGKCP = out_RGKCP + read_RGKPC.transpose(3, 4) * decay_RGKC.cumsum(-1).exp()[..., None]
    out_RCHP = out_RGKCP.permute(0, 3, 1, 2, 4).flatten(2, 3)
    out_THP: Tensor = out_RCHP.flatten(0, 1).index_select(0, chunks.place_T)
    return out_THP


def _passed_between(decay: Tensor) -> Tensor:
    """Return [..., C, C]: what is left for a token of what another wrote before it; 0 for those behind it.

    Summed from each token on: differences of sums over the whole chunk would lose small decays behind large ones.
    """
    size = decay.shape[-1]
    is_before_CC = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
    steps = decay[..., None].expand(*decay.shape, size).masked_fill(~is_before_CC.tril(-1), 0)
    return steps.cumsum(-2).masked_fill(~is_before_CC, -torch.inf).exp()


def _states_before(written_RGMN: Tensor, kept_RGK: Tensor, chunks: Chunks) -> Tensor:
    """Return [R, G, M, N]: each chunk's state before its first token."""
    width = written_RGMN.shape[2] // kept_RGK.shape[2]
    kept_RGM1 = kept_RGK.repeat_interleave(width, -1)[..., None]
    state_SGMN = torch.zeros_like(written_RGMN[: chunks.steps[0]])
    states, begin = [], 0
    for step, num_samples in enumerate(chunks.steps):
        rows = slice(begin, begin + num_samples)
        state_SGMN = chunks.states(state_SGMN, step) if step else state_SGMN
        states.append(state_SGMN)
        state_SGMN = state_SGMN * kept_RGM1[rows] + written_RGMN[rows]
        begin += num_samples
    return torch.cat(states)
