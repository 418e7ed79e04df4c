"""Tiles of a product with a matrix in fp8 (`kernels/fp8.py`): those in use, and the fastest of many.

    python benchmarks/fp8_tiles.py [--processes 10] [--figures FILE]

The linears of 8 B and 70 B (Llama). Beside each is torch's product with the matrix in bfloat16. Several processes
compile first. Each result is compared with torch's: one that differs by more than 0.4 % of the norm is named.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.fp8_experts import compile_first, microseconds
from tinker_server.backends.formats.block_fp8 import BLOCK
from tinker_server.backends.kernels import fp8
from tinker_server.backends.kernels.fp8 import Tiles

SHAPES = (
    *((57344, 8192), (8192, 28672), (8192, 8192), (10240, 8192)),
    *((24576, 4096), (4096, 12288), (4096, 4096), (6144, 4096)),
)
"""Outputs and inputs."""
ROWS = (1, 16, 32, 64, 128, 256)
SPLITS = (1, 2, 3, 4, 8)
MOST_PROGRAMS, LEAST_STEPS, SHARED_BYTES = 1100, 4, 225_000
LARGEST_DIFFERENCE = 4e-3


def candidates(num_rows: int, num_outputs: int, num_inputs: int) -> Iterator[Tiles]:
    """Yield tiles to try."""
    rows = fp8.tiles(num_rows, num_outputs, num_inputs).rows
    for outputs, inputs, splits, stages, warps in product((64, 128), (64, 128), SPLITS, (3, 4), (4, 8)):
        programs = triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs) * splits
        is_small = (2 * rows * inputs + outputs * inputs) * stages < SHARED_BYTES
        is_worth_it = programs <= MOST_PROGRAMS and num_inputs // inputs // splits >= LEAST_STEPS
        if is_small and (splits == 1 or is_worth_it):
            yield Tiles(rows, outputs, inputs, splits, stages, warps)


class Product:
    """A product of random numbers."""

    def __init__(self, num_rows: int, num_outputs: int, num_inputs: int) -> None:
        torch.manual_seed(0)
        self._weight_NK = torch.randn(num_outputs, num_inputs, device="cuda").to(torch.float8_e4m3fn)
        self._scale_IJ = 0.5 + torch.rand(triton.cdiv(num_outputs, BLOCK), num_inputs // BLOCK, device="cuda")
        self._x_MK = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
        whole_NK = self._x_MK.new_empty(num_outputs, num_inputs)
        self._whole_KN = fp8.dequantise(self._weight_NK, self._scale_IJ, BLOCK, whole_NK).T
        self._found_MN = self._x_MK.new_empty(num_rows, num_outputs)
        self._exact_MN = torch.mm(self._x_MK, self._whole_KN).float()

    def in_bfloat16(self) -> Tensor:
        """Multiply by the dequantised matrix."""
        return torch.mm(self._x_MK, self._whole_KN, out=self._found_MN)

    def run(self, chosen: Tiles | None) -> None:
        """Multiply by the matrix in fp8, in these tiles or those in use."""
        fp8.product(self._x_MK, self._weight_NK, self._scale_IJ, BLOCK, self._found_MN, chosen)

    def difference(self, chosen: Tiles | None) -> float:
        """Return the norm of the difference from the exact result, as a part of its norm."""
        self._found_MN.fill_(torch.nan)
        self.run(chosen)
        return float((self._found_MN - self._exact_MN).norm() / self._exact_MN.norm())


def compile_share(number: int, of: int) -> None:
    """Compile every so many-th of the candidates."""
    num_outputs, num_inputs = SHAPES[-1]
    cases = [(rows, tiles) for rows in ROWS for tiles in candidates(rows, num_outputs, num_inputs)]
    for rows, tiles in cases[number::of]:
        Product(rows, num_outputs, num_inputs).run(tiles)


def main() -> None:
    """Compile, time, and print a line for each case."""
    path = compile_first(__doc__, compile_share)
    figures = []
    for (num_outputs, num_inputs), num_rows in product(SHAPES, ROWS):
        case, name = Product(num_rows, num_outputs, num_inputs), f"{num_outputs} x {num_inputs}, {num_rows} rows"
        tried = [*candidates(num_rows, num_outputs, num_inputs)]
        for tiles in (None, *tried):
            if not (difference := case.difference(tiles)) < LARGEST_DIFFERENCE:
                print(f"{name}: {tiles or 'in use'} differ by {difference:.2g}", flush=True)
        whole, ours = microseconds(case.in_bfloat16), microseconds(partial(case.run, None))
        times = [(microseconds(partial(case.run, tiles)), tiles) for tiles in tried]
        best, tiles = min(times, key=lambda timed: timed[0])
        print(f"{name}: bfloat16 {whole:.0f}, in use {ours:.0f}, best {best:.0f} us ({tiles})", flush=True)
        figures.append({"case": name, "bfloat16": whole, "ours": ours, "all": [(us, vars(of)) for us, of in times]})
        if path is not None:
            path.write_text(json.dumps(figures))
        del case


if __name__ == "__main__":
    main()
