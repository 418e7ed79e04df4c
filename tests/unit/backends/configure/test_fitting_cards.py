"""The cards that would do are the smallest with which the plan succeeds, for each number of them."""

import pytest

from tests.shapes import shape
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.fitting_cards import fitting_cards
from tinker_server.backends.configure.gpus import CARDS_GIB, cards
from tinker_server.backends.configure.memory_plan import GIB, Machine
from tinker_server.backends.configure.placement import make_plan
from tinker_server.backends.protocol import BackendFailed

HERE = Machine(main_bytes=64 * GIB)


def fits(name: str, context: int, card: str, count: int) -> bool:
    names, sizes = zip(*cards(f"{card}:{count}"), strict=True)
    machine = Machine(main_bytes=64 * GIB, gpu_bytes=sizes, gpu_names=names)
    try:
        make_plan([shape(name)], BackendConfig(device="cuda", max_context_length=context), machine, "cuda")
    except BackendFailed:
        return False
    return True


@pytest.mark.parametrize("name", ["8b-text", "30b-a3b"])
def test_each_number_of_cards_has_the_smallest_card_that_does(name: str) -> None:
    found = fitting_cards([shape(name)], BackendConfig(), HERE)
    assert [fit.context for fit in found] == [32768, 16384]
    by_size = sorted(CARDS_GIB, key=CARDS_GIB.__getitem__)
    for fit in found:
        counts, names = zip(*fit.cards, strict=True)
        assert list(counts) == sorted(counts) and list(names) == sorted(names, key=by_size.index, reverse=True)
        for count, card in fit.cards:
            assert fits(name, fit.context, card, count)
            smaller = by_size[: by_size.index(card)]
            assert not any(fits(name, fit.context, other, count) for other in smaller)


def test_a_shorter_context_is_named_only_where_other_cards_do() -> None:
    (asked,) = fitting_cards([shape("8b-text")], BackendConfig(max_context_length=8192), HERE)
    assert asked.context == 8192
    longest = shape("8b-text").longest_context
    of_all, _ = fitting_cards([shape("8b-text")], BackendConfig(max_context_length=8 * longest), HERE)
    assert of_all.context == longest, "a model has no longer context than its own"
    assert fitting_cards([shape("235b-a22b"), shape("70b")], BackendConfig(base_copies=2), HERE) == []
