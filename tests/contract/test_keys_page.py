"""Administrators make, expire and revoke keys on the page of owners; nobody else does.

pytest tests/contract/test_keys_page.py
"""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.dashboard import Owner
from tests.fake_server import Running
from tinker_server.auth import keys


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    """An administrator and an owner, signed in."""
    root = tmp_path_factory.mktemp("keys")
    admin, alice = (keys.add(root / "keys", name, is_admin=name == "root") for name in ("root", "alice"))
    server = Running(root / "data", keys_file=root / "keys")
    with Owner(server, admin) as first, Owner(server, alice) as second:
        yield first.sign_in(), second.sign_in()
    server.stop()


def is_taken(server: Running, key: str) -> bool:
    return httpx.get(f"{server.url}/api/v1/auth/apikey/me", headers={"x-api-key": key}).status_code == 200


def path_of(owner: Owner) -> Path:
    return owner.server.settings.resolve_keys_file()


def test_a_key_that_is_made_on_the_page_works_at_once_and_is_shown_once(people: tuple[Owner, Owner]) -> None:
    admin, _ = people
    answer = admin.change("POST", "/owners/keys", name="carol", scope="sample", days="7")
    assert answer.status_code == 200, answer.text
    (key,) = set(re.findall(r"tml-[\w-]{43}", answer.text))
    assert is_taken(admin.server, key) and key not in admin.get("/owners").text
    (made,) = [found for found in keys.read(path_of(admin)).values() if found.name == "carol"]
    assert made.scope == "sample" and made.expires_at is not None and made.created_at is not None
    assert made.expires_at - made.created_at == pytest.approx(7 * 86400, abs=2)
    entries = httpx.get(f"{admin.server.url}/api/v1/audit", headers={"x-api-key": key})
    assert entries.status_code == 403, "a key for samples reads no audit log"


def test_a_key_is_given_an_expiry_and_revoked(people: tuple[Owner, Owner]) -> None:
    admin, _ = people
    key = re.findall(r"tml-[\w-]{43}", admin.change("POST", "/owners/keys", name="dave", days="").text)[0]
    (made,) = [found for found in keys.read(path_of(admin)).values() if found.name == "dave"]
    assert made.expires_at is None
    assert admin.change("POST", f"/owners/keys/{made.id}/expiry", days="2").status_code == 200
    (expiring,) = [found for found in keys.read(path_of(admin)).values() if found.name == "dave"]
    assert expiring.hashed == made.hashed and expiring.expires_at is not None
    assert "in 48 h" in admin.get("/owners").text or "in 2 d" in admin.get("/owners").text
    answer = admin.change("DELETE", f"/owners/keys/{made.id}")
    assert answer.status_code == 200 and made.id not in answer.text and not is_taken(admin.server, key)
    again = admin.change("DELETE", f"/owners/keys/{made.id}")
    assert again.status_code == 400 and f"there is no key {made.id}" in again.text


def test_the_key_of_the_sign_in_is_not_taken_away_and_a_wrong_name_is_refused(people: tuple[Owner, Owner]) -> None:
    admin, _ = people
    (own,) = [found for found in keys.read(path_of(admin)).values() if found.name == "root"]
    for method, path, data in (
        ("DELETE", f"/owners/keys/{own.id}", {}),
        ("POST", f"/owners/keys/{own.id}/expiry", {"days": "1"}),
    ):
        refused = admin.change(method, path, **data)
        assert refused.status_code == 400 and "sign in with another" in refused.text
    assert is_taken(admin.server, admin.key)
    wrong = admin.change("POST", "/owners/keys", name="a b")
    assert wrong.status_code == 400 and "cannot name a key" in wrong.text
    mixed = admin.change("POST", "/owners/keys", name="eve", scope="sample", is_admin="true")
    assert mixed.status_code == 400 and "has the scope all" in mixed.text


def test_nobody_else_has_the_keys_or_changes_them(people: tuple[Owner, Owner]) -> None:
    admin, alice = people
    before = path_of(admin).read_bytes()
    (own,) = [found for found in keys.read(path_of(admin)).values() if found.name == "root"]
    assert alice.get("/owners").status_code == 404
    for method, path, data in (
        ("POST", "/owners/keys", {"name": "mallory"}),
        ("POST", f"/owners/keys/{own.id}/expiry", {"days": "1"}),
        ("DELETE", f"/owners/keys/{own.id}", {}),
    ):
        assert alice.change(method, path, **data).status_code == 404
        assert admin.pages.request(method, path, data=data).status_code == 403, "without the page's own token"
    assert path_of(admin).read_bytes() == before
