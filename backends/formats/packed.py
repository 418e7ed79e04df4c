"""Weights that stay packed in memory, whatever their format: in fp8 by blocks, a matrix is its bytes [B]; in MXFP4, it
is its rows [N, R]. A stack of experts has a dimension more.

In fp8 the ups of a stack stand behind its gates. In MXFP4, gates and ups alternate, as in the files.

N outputs, K inputs of a matrix, B bytes of it, R bytes of a row; E experts of a mixture, S (token, expert) pairs
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from tinker_server.backends.formats import block_fp8, mxfp4

_EXPERT_IN_FP8, _EXPERT_IN_MXFP4 = 1, 2
"""Dimensions of an expert's packed matrix."""


def byte_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a packed tensor: of a matrix [N, K], which is then in fp8, or of a stack [E, N, K] of a
    mixture in MXFP4."""
    return (block_fp8.packed_bytes(*shape),) if len(shape) == 2 else (*shape[:2], mxfp4.row_bytes(shape[2]))


def is_in_mxfp4(stack: Tensor) -> bool:
    """Return whether a packed stack of experts is in MXFP4."""
    return stack.dim() == 1 + _EXPERT_IN_MXFP4


def alternating(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return gates and ups [E, I, ...] of a stack, or of its biases, where they alternate. They share its memory."""
    return both[:, ::2], both[:, 1::2]


def gates_and_ups(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Return the halves of a packed stack of experts. They share its memory."""
    if is_in_mxfp4(stack):
        return alternating(stack)
    gates, ups = stack.chunk(2, 1)
    return gates, ups


def halves(weight: Tensor, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Return numbers and scales of a packed stack, as its format has them. They share its memory."""
    if is_in_mxfp4(weight):
        return mxfp4.halves(weight, num_inputs)
    return block_fp8.halves(weight, num_outputs, num_inputs)


def unpack(weight: Tensor, found_NK: Tensor) -> Tensor:
    """Write a dequantised matrix to `found_NK`, which is contiguous, and return it."""
    return mxfp4.unpack(weight, found_NK) if weight.dim() == _EXPERT_IN_MXFP4 else block_fp8.unpack(weight, found_NK)


def multiply_by_expert(x_SK: Tensor, stack: Tensor, ends_E: Tensor, found_SN: Tensor, *, is_transposed: bool) -> None:
    """Write each pair's x W^T, or x W if `is_transposed`, to its row of `found_SN`. W is the dequantised matrix of the
    pair's expert; pairs are in the experts' order, and `ends_E` is int32: the end of each expert's."""
    shape = found_SN.shape[1], x_SK.shape[1]
    shape = shape[::-1] if is_transposed else shape
    if x_SK.dtype == torch.bfloat16 and _has_kernel(stack):
        from tinker_server.backends.kernels.packed_experts import SortedPairs, product_by_expert

        pairs = SortedPairs(ends_E)
        product_by_expert(x_SK.contiguous(), halves(stack, *shape), pairs, found_SN, is_transposed=is_transposed)
        return
    whole_NK = x_SK.new_empty(shape)
    for expert, (begin, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        if end > begin:
            unpack(stack[expert], whole_NK)
            torch.mm(x_SK[begin:end], whole_NK if is_transposed else whole_NK.T, out=found_SN[begin:end])


def _has_kernel(stack: Tensor) -> bool:
    return stack.is_cuda and (is_in_mxfp4(stack) or block_fp8.has_kernel(stack.device))


def joined(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, staying: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the files' tensors by name, those that are quantised as soon as both of theirs have come: packed, if they
    are of `staying`, or else dequantised. Raises ValueError if either never comes."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        ending = _ending(name, tensor)
        if not ending and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
            continue
        matrix = name.removesuffix(ending)
        found = waiting.setdefault(matrix, {})
        found[ending] = tensor
        if len(found) == 2:
            del waiting[matrix]
            yield matrix, _join(found, dtype, stays=matrix in staying)
    if waiting:
        raise ValueError(f"tensors in fp8 or mxfp4, or their scales, are missing: {', '.join(sorted(waiting))}")


def _ending(name: str, tensor: Tensor) -> str:
    """Return the ending of a tensor that is a part of a quantised one, or nothing."""
    if tensor.dtype == torch.uint8:
        return next((ending for ending in (mxfp4.BLOCKS, mxfp4.SCALES) if name.endswith(ending)), "")
    return block_fp8.SCALE if name.endswith(block_fp8.SCALE) else ""


def _join(found: dict[str, Tensor], dtype: torch.dtype, *, stays: bool) -> Tensor:
    if mxfp4.BLOCKS in found:
        both = found[mxfp4.BLOCKS], found[mxfp4.SCALES]
        if stays:
            return mxfp4.pack(*both)
        # Inputs come before outputs in files that are not quantised.
        return mxfp4.dequantise(both[0].flatten(-2), both[1], dtype).mT.contiguous()
    numbers, scale = found[""], found[block_fp8.SCALE]
    return block_fp8.packed(numbers, scale) if stays else block_fp8.dequantised(numbers, scale, dtype)
