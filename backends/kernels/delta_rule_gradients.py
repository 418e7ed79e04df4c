"""The part of the delta rule's backward that gives the gradients of queries and keys, as a kernel.

flash-linear-attention's own, `chunk_bwd_dqkwg`, gives wrong numbers on Hopper with Triton from 3.4 to 3.7.0 (its issue
640, where a transposed result that is the left operand of the next product is found to be the cause). A left operand
that was computed stays in registers, which ptxas before CUDA 13.3 may reuse too early (triton-lang/triton, pull request
11781). So here all is computed transposed, gradients as [K, C], and what stands at the left was loaded.

T tokens of a microbatch, H heads, K and V widths of a key and a value, C tokens of a chunk, R chunks
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SIZE = 64
"""Width of a part of a key that is computed at once."""
_NUM_WARPS = 4


def of_queries_and_keys(
    tensors: tuple[Tensor, ...], bounds: Tensor, indices: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries [T, H, K] and, in float32, of keys [T, H, K] in the products of a chunk; of `w`
    [T, H, K]; and of the accumulated decay [T, H], float32.

    `tensors`: query, key, new values, accumulated decay (base 2), the gradients of the output and of the new values,
    and each chunk's state [R, H, K, V] and its gradient. Each token is in a chunk of `delta_rule.chunk_indices`.
    """
    assert all(tensor.is_contiguous() for tensor in (*tensors, bounds, indices))
    query_THK, new_THV, decay_TH = tensors[0], tensors[2], tensors[3]
    (_, num_heads, size), width = query_THK.shape, new_THV.shape[2]
    of_query, of_w = torch.empty_like(query_THK), torch.empty_like(query_THK)
    of_key, of_decay = torch.empty_like(query_THK, dtype=torch.float32), torch.empty_like(decay_TH)
    sizes = {"H": num_heads, "K": size, "V": width, "C": chunk}
    blocks = {"BK": min(_SIZE, max(16, triton.next_power_of_2(size))), "BV": max(16, triton.next_power_of_2(width))}
    _of_chunk[len(indices) * num_heads,](
        *tensors,
        *(of_query, of_key, of_w, of_decay),
        *(bounds, indices, size**-0.5),
        **sizes,
        **blocks,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    return of_query, of_key, of_w, of_decay


# One program for each head of each chunk. Products are of 16 bits, and summed in float32.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _of_chunk(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    query,
    key,
    new,
    decay,
    grad,
    of_new,
    states,
    of_states,
    of_query,
    of_key,
    of_w,
    of_decay,
    bounds,
    indices,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    sample = tl.load(indices + 2 * chunk)
    begin = tl.load(bounds + sample) + tl.load(indices + 2 * chunk + 1) * C
    num_tokens = tl.minimum(tl.load(bounds + sample + 1) - begin, C).to(tl.int32)
    if num_tokens <= 0:  # a chunk that is left over
        return
    row, state = begin * H + head, (chunk * H + head) * (K * V)
    place, width = tl.arange(0, C), tl.arange(0, BV)
    inside = place < num_tokens
    at_CV = place[:, None] * (H * V) + width[None, :]
    is_CV = inside[:, None] & (width < V)[None, :]
    v = tl.load(new + row * V + at_CV, mask=is_CV, other=0.0)
    do = tl.load(grad + row * V + at_CV, mask=is_CV, other=0.0)
    dv = tl.load(of_new + row * V + at_CV, mask=is_CV, other=0.0)
    g = tl.load(decay + row + place * H, mask=inside, other=0.0)
    g_last = tl.load(decay + row + (num_tokens - 1) * H)

    # Scores [i, j] of token i, which sees token j; then [j, i], by a product of their own.
    seen = inside[:, None] & (place[:, None] >= place[None, :])
    scores = tl.dot(do, tl.trans(v)) * tl.exp2(g[:, None] - g[None, :]) * scale
    scores = tl.where(seen, scores, 0.0).to(query.dtype.element_ty)
    seen = inside[None, :] & (place[None, :] >= place[:, None])
    turned = tl.dot(v, tl.trans(do)) * tl.exp2(g[None, :] - g[:, None]) * scale
    turned = tl.where(seen, turned, 0.0).to(query.dtype.element_ty)

    of_passed, of_last, of_state = tl.zeros([C], tl.float32), 0.0, 0.0
    # What is the same for each block is computed anew: kept, it would not fit in the registers.
    for first in tl.range(0, K, BK, num_stages=1, disable_licm=True):
        size = first + tl.arange(0, BK)
        at_KV = size[:, None] * V + width[None, :]
        is_KV = (size < K)[:, None] & (width < V)[None, :]
        h = tl.load(states + state + at_KV, mask=is_KV, other=0.0)
        dh = tl.load(of_states + state + at_KV, mask=is_KV, other=0.0)
        of_state += tl.sum(h.to(tl.float32) * dh.to(tl.float32))

        at_KC = size[:, None] + place[None, :] * (H * K)
        is_KC = (size < K)[:, None] & inside[None, :]
        dw = -tl.dot(h, tl.trans(dv))
        tl.store(of_w + row * K + at_KC, dw.to(of_w.dtype.element_ty), mask=is_KC)

        q = tl.load(query + row * K + at_KC, mask=is_KC, other=0.0)
        k = tl.load(key + row * K + at_KC, mask=is_KC, other=0.0)
        dq = tl.dot(h, tl.trans(do)) * (tl.exp2(g) * scale)[None, :]
        dq = tl.dot(k, turned, dq)
        tl.store(of_query + row * K + at_KC, dq.to(of_query.dtype.element_ty), mask=is_KC)
        of_passed += tl.sum(dq * q.to(tl.float32), 0)

        dk = tl.dot(dh, tl.trans(v)) * tl.where(inside, tl.exp2(g_last - g), 0.0)[None, :]
        of_last += tl.sum(dk * k.to(tl.float32))
        dk = tl.dot(q, scores, dk)
        tl.store(of_key + row * K + at_KC, dk, mask=is_KC)
        of_passed -= tl.sum(dk * k.to(tl.float32), 0)

    # The last token's decay is the whole chunk's, by which the state is passed on.
    of_last += of_state * tl.exp2(g_last)
    of_passed = tl.where(place == num_tokens - 1, of_passed + of_last, of_passed)
    tl.store(of_decay + row + place * H, of_passed, mask=inside)
