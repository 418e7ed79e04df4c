"""Parts of packed matrices that the ranks of an engine have.

pytest tests/unit/backends/formats/test_divided_fp8.py
"""

import pytest
import torch

from tinker_server.backends.formats.block_fp8 import packed, packed_bytes, unpack
from tinker_server.backends.formats.divided_fp8 import copy_part, count_rows, divides_blocks, rows_of_rank


def matrix(num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed matrix, and its numbers."""
    weight = torch.randn(num_outputs, num_inputs).to(torch.float8_e4m3fn)
    bytes_ = packed(weight, torch.rand(-(-num_outputs // 128), -(-num_inputs // 128)))
    return bytes_, unpack(bytes_, torch.empty(num_outputs, num_inputs))


def take_part(whole_B: torch.Tensor, shape: tuple[int, int], rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """These rows and columns, in memory that was not empty."""
    part = torch.full((packed_bytes(len(rows), len(columns)),), 7, dtype=torch.uint8)
    copy_part(whole_B, shape, rows, columns, part)
    return part


@pytest.mark.parametrize(
    ("shape", "num_ranks"), [((512, 200), 2), ((512, 200), 4), ((128, 130), 4), ((256, 64), 8), ((96, 140), 1)]
)
def test_parts_have_the_numbers_of_the_whole(shape: tuple[int, int], num_ranks: int) -> None:
    whole_B, whole_NK = matrix(*shape)
    turned_B, turned_NK = matrix(*shape[::-1])
    size, all_columns = shape[0] // num_ranks, torch.arange(shape[1])
    for rank in range(num_ranks):
        mine = rows_of_rank([size], shape[0], rank, num_ranks)
        assert mine.tolist() == list(range(rank * size, (rank + 1) * size))
        part = take_part(whole_B, shape, mine, all_columns)
        assert len(part) == packed_bytes(size, shape[1])
        assert unpack(part, torch.empty(size, shape[1])).equal(whole_NK[mine])
        part = take_part(turned_B, shape[::-1], all_columns, mine)
        assert unpack(part, torch.empty(shape[1], size)).equal(turned_NK[:, mine])


def test_a_tensor_of_several_parts_is_divided_part_by_part() -> None:
    whole_B, whole_NK = matrix(1024, 64)
    rows = rows_of_rank([128, 128, 256], 1024, 1, 2)
    assert rows.tolist() == [*range(128, 256), *range(384, 512), *range(768, 1024)]
    found = unpack(take_part(whole_B, (1024, 64), rows, torch.arange(64)), torch.empty(512, 64))
    assert found.equal(whole_NK[rows])


def test_ranks_share_a_piece_where_there_are_fewer() -> None:
    assert [rows_of_rank([64], 128, rank, 4)[0].item() for rank in range(4)] == [0, 0, 64, 64]
    assert count_rows(packed_bytes(128, 200), 64, 200, 4) == 128
    with pytest.raises(ValueError, match="2 ranks cannot have 64 of 100 rows each"):
        rows_of_rank([64], 100, 0, 2)
    with pytest.raises(ValueError, match="2 ranks have 64 rows each"):
        count_rows(packed_bytes(192, 200), 64, 200, 2)


@pytest.mark.parametrize(("size", "num_ranks"), [(384, 2), (96, 2), (1536, 8)])
def test_blocks_that_ranks_would_divide_are_refused(size: int, num_ranks: int) -> None:
    assert not divides_blocks(size, num_ranks)
    if size > 128:
        bytes_, _ = matrix(size, 16)
        with pytest.raises(ValueError, match="ranks would divide blocks of 128"):
            take_part(bytes_, (size, 16), rows_of_rank([size // num_ranks], size, 1, num_ranks), torch.arange(16))
