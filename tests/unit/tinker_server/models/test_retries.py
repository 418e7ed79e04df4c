"""How often interrupted work is done again."""

from collections.abc import Callable

import pytest

from tinker_server.backends.protocol import BackendFailed, ModelLost, ProcessDied
from tinker_server.errors import DatabaseUnavailable, Superseded
from tinker_server.models.retries import Retries


@pytest.mark.parametrize(
    ("make_error", "allowed"), [(ProcessDied, 1), (ModelLost, 4), (DatabaseUnavailable, 3), (Superseded, 3)]
)
def test_each_kind_of_interruption_has_its_own_limit(make_error: Callable[[str], Exception], allowed: int) -> None:
    retries = Retries()
    assert [retries.allow(make_error("away")) for _ in range(allowed + 1)] == [True] * allowed + [False]
    assert Retries().allow(make_error("away")), "another operation begins anew"


def test_interruptions_of_other_kinds_do_not_use_up_a_limit() -> None:
    retries = Retries()
    assert retries.allow(ProcessDied("")) and retries.allow(ModelLost("")) and retries.allow(DatabaseUnavailable(""))
    assert not retries.allow(ProcessDied(""))


def test_an_error_that_interrupts_nothing_is_final() -> None:
    assert not Retries().allow(BackendFailed("out of memory"))
    assert not Retries(outages=1).allow(DatabaseUnavailable("away"))
