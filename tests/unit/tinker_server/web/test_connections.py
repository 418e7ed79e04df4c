"""The bound on open connections: who has to go."""

import resource

import pytest

from tinker_server.web.connections import MOST_STRANGERS, Accounts, Connections, account_of


class Open:
    """A connection that only notes its end."""

    def __init__(self) -> None:
        self.is_open = True

    def end(self) -> None:
        self.is_open = False


def added(accounts: Accounts, account: str, number: int) -> list[Open]:
    made = [Open() for _ in range(number)]
    for one in made:
        accounts.add(account, one)
    return made


def is_open(*connections: Open) -> list[bool]:
    return [one.is_open for one in connections]


def test_the_account_with_the_most_loses_the_one_that_was_silent_for_longest() -> None:
    accounts = Accounts()
    few, many = added(accounts, "few", 2), added(accounts, "many", 4)
    accounts.note_activity("many", many[0])
    accounts.end_one()
    assert is_open(*few, *many) == [True, True, True, False, True, True]
    accounts.remove("many", many[1])  # as its connection is lost, after it was ended
    assert accounts.num == 5
    accounts.remove("few", few[0])
    assert accounts.num == 4


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    return Connections()


def test_strangers_go_first_but_for_the_part_that_is_always_theirs(hundred: Connections) -> None:
    owned, strangers = added(hundred.owners, "alice", 45), added(hundred.strangers, "10.0.0.1", 31)
    hundred.make_room()
    assert is_open(*strangers) == [False] + [True] * 30 and all(is_open(*owned))
    added(hundred.owners, "bob", 6)
    for _ in range(6):
        hundred.make_room()
    assert (hundred.strangers.num, hundred.owners.num) == (25, 50), "alice has the most, and loses one"
    assert is_open(*owned) == [False] + [True] * 44


def test_with_room_nobody_is_ended_whatever_one_address_holds(hundred: Connections) -> None:
    burst = added(hundred.strangers, "10.0.0.1", 75)
    hundred.make_room()
    assert all(is_open(*burst)), "a client whose keys have not come yet may open all of its connections at once"


def test_strangers_are_bounded_where_descriptors_abound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    made = Connections()
    burst = added(made.strangers, "10.0.0.1", MOST_STRANGERS + 1)
    made.make_room()
    assert not burst[0].is_open and made.strangers.num == MOST_STRANGERS


def test_an_address_is_an_account_and_of_ipv6_its_network() -> None:
    assert account_of("10.0.0.1") == account_of("::ffff:10.0.0.1") != account_of("10.0.0.2")
    assert account_of("2001:db8:1:2::3") == account_of("2001:db8:1:2:ffff::4") != account_of("2001:db8:1:3::3")
    assert account_of("") == ""
