"""Which matrices in fp8 the ranks of an engine can divide: their parts begin and end where blocks do, or lie within
one (`formats/divided_fp8.py`)."""

from collections.abc import Iterable, Mapping

from transformers import PretrainedConfig

from tinker_server.backends.configure.model_size import OF_KEYS, REPEATED, ROW_PARALLEL
from tinker_server.backends.formats.block_fp8 import BLOCK
from tinker_server.backends.formats.divided_fp8 import divides_blocks
from tinker_server.backends.formats.expert_names import expert_matrix
from tinker_server.backends.formats.model_files import linear_attention

_JOINED = ("qkv_proj", "gate_up_proj", "in_proj")
"""Linears of several parts, of which nobody has compared an engine's ranks with the trainer in fp8."""


class Fp8Parts:
    """A base's matrices in fp8 by their kinds: the linear's name, outputs and inputs, and a name of the files."""

    def __init__(self, matrices: Mapping[str, tuple[int, int]], text_config: PretrainedConfig) -> None:
        self.shapes = list(matrices.values())
        self._kinds = {(_linear(name), *shape): name for name, shape in matrices.items()}
        self._key_heads = text_config.num_key_value_heads
        self._config = text_config

    def first_undivided(self, ranks: int) -> str | None:
        """Return the name of a matrix that so many ranks cannot divide, or None."""
        for (linear, outputs, inputs), name in self._kinds.items():
            if ranks > 1 and not self._divides(linear, outputs, inputs, ranks):
                return name
        return None

    def divisible(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return those of these numbers of ranks that can divide all matrices."""
        return tuple(ranks for ranks in numbers if self.first_undivided(ranks) is None)

    def _divides(self, linear: str, outputs: int, inputs: int, ranks: int) -> bool:
        if linear in _JOINED:
            return False
        if linear == "in_proj_qkv":  # each rank has a part of queries, of keys and of values, one behind the other
            values = linear_attention(self._config).values
            return all(size % (ranks * BLOCK) == 0 for size in ((outputs - values) // 2, values))
        if linear in ROW_PARALLEL:
            return divides_blocks(inputs, ranks)
        pieces = min(ranks, self._key_heads) if linear in OF_KEYS else ranks
        return linear in REPEATED or divides_blocks(outputs, pieces)


def _linear(name: str) -> str:
    """Return the name of a matrix's linear; of an expert's, as of an MLP's."""
    if (found := expert_matrix(name)) is not None:
        return f"{found[2]}_proj"
    return name.removesuffix(".weight").rpartition(".")[2]
