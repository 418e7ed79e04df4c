"""Tokens: what the SDK sends in a key's place, and when it is no longer accepted."""

import time
from pathlib import Path

import pytest

from tinker_server.auth import keys
from tinker_server.auth.key import Key
from tinker_server.auth.keys import Keys
from tinker_server.auth.tokens import VALID_S, Tokens


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    keys.add(tmp_path / "keys", "alice", scope="sample")
    return Keys(tmp_path / "keys")


def test_a_token_stands_for_its_key_also_after_a_restart(known: Keys, tmp_path: Path) -> None:
    [key] = known.all()
    token = Tokens(tmp_path, known).make(key)
    assert Tokens(tmp_path, known).find(token) == key and key.scope == "sample"


@pytest.mark.heavy
def test_the_sdk_reads_who_has_a_token_and_for_how_long(known: Keys, tmp_path: Path) -> None:
    from tinker.lib._jwt_auth import jwt_claims

    claims = jwt_claims(Tokens(tmp_path, known).make(known.all()[0]))
    assert (claims["sub"], claims["org_id"]) == ("tml:organization_user:alice", "tinker-server")
    assert claims["exp"] - claims["iat"] == VALID_S and abs(claims["iat"] - time.time()) < 60


def test_a_token_of_a_removed_key_is_not_valid(known: Keys, tmp_path: Path) -> None:
    tokens = Tokens(tmp_path, known)
    token = tokens.make(known.all()[0])
    keys.remove(tmp_path / "keys", "alice")
    assert tokens.find(token) is None


def test_a_token_ends_a_day_after_it_was_made(known: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, now = Tokens(tmp_path, known), time.time()
    token = tokens.make(known.all()[0])
    monkeypatch.setattr("tinker_server.auth.tokens.time.time", lambda: now + VALID_S - 5)
    assert tokens.find(token) is not None
    monkeypatch.setattr("tinker_server.auth.tokens.time.time", lambda: now + VALID_S + 5)
    assert tokens.find(token) is None


def test_a_token_that_was_changed_or_made_elsewhere_is_not_valid(known: Keys, tmp_path: Path) -> None:
    tokens, [key] = Tokens(tmp_path, known), known.all()
    head, claims, signature = tokens.make(key).split(".")
    _, of_admin, _ = tokens.make(Key("root", key.hashed, is_admin=True)).split(".")
    elsewhere = Tokens(tmp_path / "elsewhere", known).make(key)
    changed = (f"{head}.{of_admin}.{signature}", f"{head}.{claims}.", f"{head}.{claims}.é", head, "eyJ", "")
    for wrong in (*changed, elsewhere):
        assert tokens.find(wrong) is None, wrong
