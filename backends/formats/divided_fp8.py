"""A rank's part of a packed matrix in fp8 (`block_fp8.py`): some of its rows and columns, packed again, with the same
numbers.

A part has a scale for each block of its own, which is then that of one block of the whole. So a part begins and ends
where blocks do, or lies within one.

N outputs, K inputs, B bytes of a packed matrix
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tinker_server.backends.formats.block_fp8 import BLOCK, halves, packed_bytes


def divides_blocks(size: int, pieces: int) -> bool:
    """Return whether so many equal pieces of rows or columns have scales of their own."""
    piece, rest = divmod(size, pieces)
    return pieces == 1 or (not rest and (piece % BLOCK == 0 or BLOCK % piece == 0))


def rows_of_rank(sizes: Sequence[int], num_rows: int, rank: int, num_ranks: int) -> Tensor:
    """Return the rows of a tensor that a rank has: of each of its parts, one behind the other, so many. Ranks share a
    piece where there are fewer pieces, as of key heads. Raises ValueError for parts that are no equal pieces."""
    here = sum(sizes)
    pieces, rest = divmod(num_rows, here)
    if rest or not pieces or num_ranks % pieces:
        raise ValueError(f"{num_ranks} ranks cannot have {here} of {num_rows} rows each")
    piece, begin, found = rank * pieces // num_ranks, 0, []
    for size in sizes:
        found.append(torch.arange(begin + piece * size, begin + (piece + 1) * size, device="cpu"))
        begin += pieces * size
    return torch.cat(found)


def count_rows(num_bytes: int, num_rows: int, num_inputs: int, num_ranks: int) -> int:
    """Return N of a packed matrix of which each of so many ranks has so many rows. Raises ValueError if no number of
    pieces has these bytes."""
    for pieces in range(1, num_ranks + 1):
        if packed_bytes(pieces * num_rows, num_inputs) == num_bytes:
            return pieces * num_rows
    raise ValueError(f"a matrix in fp8 has {num_bytes} bytes, and {num_ranks} ranks have {num_rows} rows each")


def copy_part(weight_B: Tensor, shape: tuple[int, int], rows_N: Tensor, columns_K: Tensor, found_B: Tensor) -> None:
    """Copy these rows and columns of a matrix of this shape, packed, to `found_B`. Raises ValueError where a block of
    theirs would need several scales, or for columns that are no run.

    Every copy is from a view of the bytes to a view of bytes: whoever watches knows where each is from.
    """
    first, count = int(columns_K[0]), len(columns_K)
    if int(columns_K[-1]) - first + 1 != count:
        raise ValueError("a rank has columns of a matrix in fp8 that are no run")
    numbers, scales = _bytes(weight_B, *shape)
    found_numbers, found_scales = _bytes(found_B, len(rows_N), count)
    _copy_rows(numbers.narrow(1, first, count), rows_N, found_numbers)
    columns = _blocks(columns_K)
    width = 4 * len(columns)
    if not columns.equal(torch.arange(int(columns[0]), int(columns[0]) + len(columns), device="cpu")):
        raise ValueError("a rank has columns of a matrix in fp8 that are no run")
    _copy_rows(scales.narrow(1, 4 * int(columns[0]), width), _blocks(rows_N), found_scales)
    begin, end = found_scales.numel(), int(found_numbers.storage_offset() - found_B.storage_offset())
    found_B[begin:end].zero_()
    found_B[end + found_numbers.numel() :].zero_()


def _bytes(weight_B: Tensor, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of numbers [N, K] and of scales [I, 4 J] of a packed matrix. They share its memory."""
    numbers_NK, scale_IJ = halves(weight_B, num_outputs, num_inputs)
    return numbers_NK.view(torch.uint8), scale_IJ.view(torch.uint8)


def _copy_rows(whole: Tensor, places: Tensor, found: Tensor) -> None:
    """Copy rows in this order, run by run: a copy by numbers is slow."""
    ends = (places.diff() != 1).nonzero().flatten() + 1
    for begin, end in pairwise([0, *ends.tolist(), len(places)]):
        found[begin:end].copy_(whole.narrow(0, int(places[begin]), end - begin))


def _blocks(places: Tensor) -> Tensor:
    """Return the block of the whole whose scale each block of these rows or columns has."""
    of_whole = places // BLOCK
    found = of_whole[::BLOCK]
    if not of_whole.equal(found.repeat_interleave(BLOCK)[: len(places)]):
        raise ValueError(f"ranks would divide blocks of {BLOCK} rows or columns, each with one scale")
    return found
