"""Reads adapters of parts of a linear from an adapter of the whole, as PEFT has them
(`api_schemas/divided_linears.py`)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tinker_server.api_schemas.divided_linears import DividedLinear, parts_of_whole
from tinker_server.backends.protocol import InvalidInput


def take_part(name: str, whole: str, read: Callable[[str], Tensor], divided: Mapping[str, DividedLinear]) -> Tensor:
    """Return a part's A or B of the tensor of a whole linear. Raises InvalidInput if a B has other numbers than those
    of the blocks."""
    linear = divided[whole.rpartition(".lora_")[0].rpartition(".")[2]]
    number, tensor = parts_of_whole(whole, divided).index(name), read(whole)
    if ".lora_A." in name:
        return tensor.chunk(len(linear.parts))[number]
    if len(tensor) != linear.num_outputs:
        raise InvalidInput(f"{whole} has {len(tensor)} rows; this model's linear has {linear.num_outputs}")
    blocks = tensor.chunk(len(linear.parts), 1)
    rows = [torch.tensor(list(linear.rows(part))) for part in linear.parts]
    if any(block.index_fill(0, own, 0).count_nonzero() for block, own in zip(blocks, rows, strict=True)):
        raise InvalidInput(
            f"{whole} is not zero in places of no part: its ranks are {len(blocks)} equal runs, each for the rows of a"
            f" part alone, in the order {', '.join(linear.parts)}"
        )
    return blocks[number][rows[number]]
