"""Pages of usage and of the audit log: each owner's own, and for administrators those of all.

pytest tests/contract/test_records_pages.py
"""

import re
import time
from collections.abc import Iterator

import pytest

from tests.dashboard import Owner
from tests.fake_server import Running
from tinker_server.auth import keys


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner, Owner]]:
    """An administrator and two owners, of whom the first has trained and saved."""
    root = tmp_path_factory.mktemp("records")
    made = [keys.add(root / "keys", name, is_admin=name == "root") for name in ("root", "alice", "bob")]
    server = Running(root / "data", keys_file=root / "keys")
    admin, alice, bob = (Owner(server, key) for key in made)
    with admin, alice, bob:
        run_id = alice.new_run()
        alice.train(run_id, range(3))
        alice.save(run_id, 7, "kept")
        yield admin.sign_in(), alice.sign_in(), bob.sign_in()
    server.stop()


def cells(text: str, row: str) -> list[str]:
    """The cells of the table row with this head."""
    (found,) = re.findall(rf'<th scope="row">{re.escape(row)}</th>(.*?)</tr>', text, re.DOTALL)
    return [cell.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", found, re.DOTALL)]


def test_usage_is_shown_by_owner_and_by_day(people: tuple[Owner, Owner, Owner]) -> None:
    admin, alice, bob = people
    own = alice.get("/usage").text
    day = time.strftime("%Y-%m-%d", time.gmtime())
    assert cells(own, "alice") == cells(own, day) and cells(own, "alice")[1] == "3"
    assert cells(admin.get("/usage").text, "alice") == cells(own, "alice")
    assert re.search('<input type="number" name="days"[^>]* required', own), "an empty number is no page"
    assert "Nothing was computed" in admin.get("/usage?owner=bob").text
    assert "Nothing was computed" in bob.get("/usage").text
    assert "Nothing was computed" in bob.get("/usage?owner=alice").text, "the name is for administrators"


def test_the_audit_log_is_an_owners_own_and_an_administrators(people: tuple[Owner, Owner, Owner]) -> None:
    admin, alice, bob = people
    for viewer in (alice, admin):
        text = viewer.get("/audit").text
        assert "checkpoint_" in text and "kept" in text and "alice" in text
        assert re.search('<input type="date" name="day"[^>]* required', text), "an empty day is no page"
    assert "No changes on" in bob.get("/audit").text and "No changes on" in bob.get("/audit?owner=alice").text
    assert "No changes on 2020-01-01" in admin.get("/audit?day=2020-01-01").text
