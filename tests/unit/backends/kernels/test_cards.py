"""Kernels are chosen by the compute capability of a card, those before Hopper too."""

import pytest

from tinker_server.backends.kernels.cards import Capability, choices_for
from tinker_server.backends.protocol import BackendFailed


@pytest.mark.parametrize(
    ("capability", "in_cudnn", "in_fp8", "is_tuned"),
    [
        ((8, 0), False, False, False),  # A100
        ((8, 6), False, False, False),  # A10, RTX 3090
        ((8, 7), False, False, False),
        ((8, 9), False, True, False),  # L4, L40S, RTX 4090
        ((9, 0), True, True, True),  # H100, H200
        ((10, 0), True, True, False),  # B200
        ((12, 0), True, True, False),  # RTX 5090
    ],
)
def test_cards_before_hopper_have_flash_attention_alone_and_kernels_for_fp8_from_ada_on(
    capability: Capability, in_cudnn: bool, in_fp8: bool, is_tuned: bool
) -> None:
    found = choices_for(capability)
    chosen = found.cudnn_for_long_samples, found.kernels_for_fp8, found.tuned_delta_rule
    assert chosen == (in_cudnn, in_fp8, is_tuned)


def test_cards_without_bfloat16_are_refused_by_name() -> None:
    with pytest.raises(BackendFailed, match=r"capability 7.5 has no bfloat16: 8.0 is the least"):
        choices_for((7, 5))
