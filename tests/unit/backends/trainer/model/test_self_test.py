"""Checks of a trainer at start."""

import pytest
import torch
from torch import Tensor

from backends.protocol import BackendFailed
from backends.trainer.lora.linear import add_product
from backends.trainer.model import self_test
from backends.trainer.model.self_test import require_whole_products

CPU = torch.device("cpu")


def test_complete_products_over_tokens_let_the_trainer_start():
    require_whole_products([3, 16], CPU)


@pytest.mark.parametrize(("lost", "of"), [(1, 1), (2, 2), (3, 3)])
def test_a_product_that_drops_the_last_tokens_stops_the_trainer_at_start(lost, of, monkeypatch):
    """Lost as in cuBLAS: the tokens left for a last step of 64."""

    def losing(total_RN: Tensor, left_TR: Tensor, right_TN: Tensor) -> None:
        num_tokens = len(left_TR) - (lost if len(left_TR) % 64 == of else 0)
        add_product(total_RN, left_TR[:num_tokens], right_TN[:num_tokens])

    monkeypatch.setattr(self_test, "add_product", losing)
    with pytest.raises(BackendFailed, match=f"a product of {4096 + of} tokens, rank 8 and 3 outputs lacks the last"):
        require_whole_products([3], CPU)
