"""A rank's part of a packed matrix in fp8 (`block_fp8.py`): some of its rows and columns, packed again, with the same
numbers.

A part has a scale for each block of its own, which is then that of one block of the whole. So a part begins and ends
where blocks do, or lies within one.

N outputs, K inputs, B bytes of a packed matrix
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinker_server.backends.formats.block_fp8 import BLOCK, halves, packed, packed_bytes


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


def take_part(weight_B: Tensor, shape: tuple[int, int], rows_N: Tensor, columns_K: Tensor) -> Tensor:
    """Return these rows and columns of a matrix of this shape, packed. Raises ValueError where a block of theirs would
    need several scales."""
    numbers_NK, scale_IJ = halves(weight_B, *shape)
    part_NK = _take(_take(numbers_NK.view(torch.uint8), 0, rows_N), 1, columns_K)
    return packed(part_NK, scale_IJ[_blocks(rows_N)][:, _blocks(columns_K)])


def _take(matrix: Tensor, dim: int, places: Tensor) -> Tensor:
    """Return rows or columns in ascending order: a view if they are a run, since a copy by numbers is slow."""
    first, count = int(places[0]), len(places)
    if int(places[-1]) - first + 1 == count:
        return matrix.narrow(dim, first, count)
    return matrix.index_select(dim, places.to(matrix.device))


def _blocks(places: Tensor) -> Tensor:
    """Return the block of the whole whose scale each block of these rows or columns has."""
    of_whole = places // BLOCK
    found = of_whole[::BLOCK]
    if not of_whole.equal(found.repeat_interleave(BLOCK)[: len(places)]):
        raise ValueError(f"ranks would divide blocks of {BLOCK} rows or columns, each with one scale")
    return found
