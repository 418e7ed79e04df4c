"""Which rows a graph takes. What it computes of them is for `tests/gpu`."""

import numpy as np
import pytest
import torch

from backends.families.text import Text
from backends.rendering import Rendered
from backends.trainer.batching import Microbatch, pack
from backends.trainer.graphs import samples_of_graph


def row(lengths: list[int]) -> Microbatch:
    texts = [np.zeros(length, np.int64) for length in lengths]
    return pack([(Rendered(text, [], []), text) for text in texts], Text(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "num_samples"),
    [
        ([64] * 4, 256, 32),
        ([8] * 32, 256, 32),
        ([7] * 32, 256, None),
        ([7] * 31, 256, 32),
        ([32] * 63, 2048, 64),
        ([32] * 64, 2048, 64),
        ([31] * 64, 2048, 256),
        ([8] * 256, 2048, 256),
        ([64] * 64, 4096, 64),
        ([63] * 64, 4096, None),
        ([63] * 63, 4096, 64),
        ([4095], 4096, 64),
    ],
)
def test_a_graph_has_room_for_a_rows_samples_and_one_that_fills_it_up(lengths, num_tokens, num_samples) -> None:
    """Tokens that are in no sample are left as they are in memory."""
    assert samples_of_graph(row(lengths), num_tokens) == num_samples
