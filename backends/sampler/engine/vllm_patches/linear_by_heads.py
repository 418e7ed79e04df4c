"""Adapters in vLLM 0.32 of an input projection of linear attention whose rows go by heads of keys (`in_proj_qkvz`):
each head has its rows of queries, keys, values and the gate together.

vLLM takes it for a linear of one slice, with one adapter of all rows, and the hosted service has an adapter of each of
these four. Here a slot has a slice for each, as in models that have these rows apart. What the adapters give is brought
into the order of the linear's rows before it is added. An adapter of all rows has the same A in every slice.

N tokens, I inputs, O outputs, R rank
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.lora.layers import MergedColumnParallelLinearWithLoRA
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from tinker_server.backends.families.rows import Rows


class LinearByHeads(MergedColumnParallelLinearWithLoRA):  # type: ignore[misc]
    """Such a linear with adapters. Each of several ranks has the rows of some heads."""

    def __init__(self, base_layer: MergedColumnParallelLinear, rows: Sequence[Rows]) -> None:
        """`rows` are those of each slice on all ranks together, in their order within a head."""
        super().__init__(base_layer)
        assert sum(map(len, rows)) == base_layer.output_size
        self.rows = tuple(rows)
        self.n_slices = len(rows)
        self.output_sizes = [len(part) for part in rows]
        self.output_slices = tuple(size // self.tp_size for size in self.output_sizes)
        self.output_ids = (self.tp_rank,) * self.n_slices

    def set_lora(self, index: int, lora_a: Tensor | list[Tensor | None], lora_b: Tensor | list[Tensor | None]) -> None:
        """Fill a slot from adapters of the slices, or from one adapter of all rows, A [R, I] and B [O, R]. A warm-up's
        has as many rows as the first slice, all zeros: the others get none."""
        if isinstance(lora_a, Tensor) and isinstance(lora_b, Tensor):
            lora_a, lora_b = [lora_a] * self.n_slices, [rows_of(part, lora_b) for part in self.rows]
        super().set_lora(index, lora_a, lora_b)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return this rank's outputs [N, O] for `x` [N, I]."""
        output_NO: Tensor = self._get_quant_method().apply(self.base_layer, x, bias)
        added_NO = torch.zeros_like(output_NO)
        factors = (self.lora_a_stacked, self.lora_b_stacked)
        self.punica_wrapper.add_lora_linear(added_NO, x, *factors, 1.0, self.output_slices)
        num_heads = self.rows[0].num_blocks // self.tp_size
        parts = [part.unflatten(1, (num_heads, -1)) for part in added_NO.split(self.output_slices, 1)]
        return output_NO.add_(torch.cat(parts, 2).flatten(1))


def rows_of(rows: Rows, b_OR: Tensor) -> Tensor:
    """Return these rows of B, head by head."""
    return rows.of(b_OR.mT).flatten(1).mT
