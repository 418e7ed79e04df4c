"""Linears of which some rows have adapters of their own, as at the hosted service, in files of adapters.

Saved weights, and the tools' form of an export, have the parts' names (`in_proj_q`). PEFT knows no adapter of some
rows. Its form has one adapter of the whole linear with the ranks of all parts: A has the parts' A below each other, and
B their B as blocks, with zeros in all other places. The header of a file says which linears these are.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DIVIDED_LINEARS = "divided_linears"
"""The header's key."""


@dataclass(frozen=True)
class DividedLinear:
    """A linear with adapters of parts of its rows."""

    num_outputs: int
    parts: Mapping[str, tuple[int, int, int]]
    """Rows by the name of their adapter, in the order of the blocks: from a first to an end, in each of so many equal
    runs of the linear's rows."""

    def rows(self, part: str) -> Iterator[int]:
        """Yield the rows of a part."""
        begin, end, num_runs = self.parts[part]
        for first in range(0, self.num_outputs, self.num_outputs // num_runs):
            yield from range(first + begin, first + end)

    def sources(self) -> list[tuple[int, int] | None]:
        """Return for each of the linear's rows the number of its part and the row in it; None for a row of no part."""
        found: list[tuple[int, int] | None] = [None] * self.num_outputs
        for number, part in enumerate(self.parts):
            for row_of_part, row in enumerate(self.rows(part)):
                found[row] = number, row_of_part
        return found


def to_header(linears: Mapping[str, DividedLinear]) -> dict[str, str]:
    """Return what a header says of divided linears, by the last parts of their names."""
    texts = {name: [linear.num_outputs, dict(linear.parts)] for name, linear in linears.items()}
    return {DIVIDED_LINEARS: json.dumps(texts)} if texts else {}


def from_header(header: Mapping[str, str] | None) -> dict[str, DividedLinear]:
    """Return the divided linears that a header names, by the last parts of their names."""
    texts = json.loads((header or {}).get(DIVIDED_LINEARS, "{}"))
    return {
        name: DividedLinear(num_outputs, {part: (begin, end, runs) for part, (begin, end, runs) in parts.items()})
        for name, (num_outputs, parts) in texts.items()
    }


def parts_of_whole(name: str, divided: Mapping[str, DividedLinear]) -> list[str]:
    """Return the names of the tensors of a divided linear's parts, in their order; none for other tensors."""
    module, _, half = name.rpartition(".lora_")
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{part}.lora_{half}" for part in divided[last].parts] if last in divided else []
