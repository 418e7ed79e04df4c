"""Some rows of a matrix, which have an adapter of their own.

T tokens, O outputs of the matrix
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Rows from `begin` to `end` in each of so many equal blocks of a matrix."""

    begin: int
    end: int
    num_blocks: int = 1

    def __len__(self) -> int:
        return self.num_blocks * (self.end - self.begin)

    def of(self, outputs_TO: Tensor) -> Tensor:
        """Return these rows' outputs, a view: [T, rows], or of several blocks [T, blocks, rows of a block]."""
        if self.num_blocks == 1:
            return outputs_TO[:, self.begin : self.end]
        by_block: Tensor = outputs_TO.unflatten(1, (self.num_blocks, -1))
        return by_block[:, :, self.begin : self.end]
