"""API keys: hashed in a file, read again when it changes."""

import hashlib
import re
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tinker_server.__main__ import require_keys_beyond_loopback
from tinker_server.auth import key_uses, keys
from tinker_server.auth.key import Key, Scope, hash_of
from tinker_server.auth.key_uses import KeyUses
from tinker_server.auth.keys import Keys
from tinker_server.command_line import change_keys, parse, read_settings
from tinker_server.errors import BadRequest, KeysUnreadable, StartFailed
from tinker_server.settings import Settings


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)


def test_a_key_speaks_for_its_name_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "new" / "keys"
    first, second, other = keys.add(file, "alice"), keys.add(file, "alice"), keys.add(file, "bob")
    assert first.startswith("tml-") and len({first, second, other}) == 3
    text = file.read_text()
    assert first not in text and hashlib.sha256(first.encode()).hexdigest() in text
    assert file.stat().st_mode & 0o077 == 0
    known = Keys(file)
    assert [known.owner_of(key) for key in (first, second, other)] == ["alice", "alice", "bob"]
    assert known.owner_of("tml-other") is None and known.owner_of("") is None


def test_without_keys_everything_is_locals_and_one_key_ends_that(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    known = Keys(file)
    assert known.owner_of("tml-anything") == "local" and known.owner_of("eyJ.a.b") == "local"
    assert known.owner_of("sk-anything") is None
    key = keys.add(file, "alice")
    assert known.owner_of("tml-anything") is None and known.owner_of(key) == "alice"
    keys.remove(file, "alice")
    assert known.owner_of(key) is None and known.owner_of("tml-anything") is None, "it opened again"


def test_keys_are_added_revoked_and_removed_while_a_server_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first = keys.add(file, "alice")
    known = Keys(file)
    second = keys.add(file, "alice")
    assert known.owner_of(second) == "alice"
    known.revoke(hash_of(first))
    assert known.owner_of(first) is None and known.owner_of(second) == "alice"
    assert Keys(file).owner_of(first) is None
    assert keys.remove(file, "alice") == 1 and known.owner_of(second) is None


def test_a_wrong_line_fails_the_start_and_later_costs_only_its_own_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    removed, kept, hand = keys.add(file, "bob"), keys.add(file, "carol"), keys.add(file, "alice")
    known = Keys(file)
    line = next(line for line in file.read_text().splitlines() if line.startswith("carol"))
    file.write_text(f"# a comment\n{line}\nalice tml-a-plain-key\n\xff\n")
    assert [known.owner_of(key) for key in (removed, kept, hand)] == [None, "carol", None]
    assert "line 3 is not 'NAME sha256:HASH'" in caplog.text and caplog.text.count("is skipped") == 2
    with pytest.raises(StartFailed, match="line 3 is not 'NAME sha256:HASH'"):
        Keys(file)


def unread(file: Path) -> None:
    """Put something there that cannot be read, also not by root."""
    file.rename(file.with_name("aside"))
    file.mkdir()


def deleted(file: Path) -> None:
    file.rename(file.with_name("aside"))


@pytest.mark.parametrize(("lose", "said"), [(unread, "Is a directory"), (deleted, "it was deleted")])
def test_keys_stay_valid_for_a_while_without_their_file_and_then_nobody_is_let_in(
    tmp_path: Path,
    lose: Callable[[Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "keys"
    removed, kept = keys.add(file, "bob"), keys.add(file, "alice")
    known = Keys(file)
    fingerprint = next(key.fingerprint for key in known.all() if key.name == "alice")
    lose(file)
    for _ in range(3):
        assert known.owner_of(kept) == "alice" and known.owner_of("tml-anything") is None
    assert caplog.text.count("cannot be read") == 1 and said in caplog.text and "60 s" in caplog.text
    monkeypatch.setattr(keys, "UNREADABLE_S", 0.0)
    for ask in (known.find, known.owner_of):
        with pytest.raises(KeysUnreadable):
            ask(kept)
    with pytest.raises(KeysUnreadable):
        known.find_by_fingerprint(fingerprint)
    assert len(known.all()) == 2 and not known.is_open
    if file.exists():
        file.rmdir()
    file.with_name("aside").rename(file)
    assert keys.remove(file, "bob") == 1
    assert known.owner_of(kept) == "alice" and known.owner_of(removed) is None


def test_a_key_that_is_removed_while_no_file_can_be_opened_is_gone_once_files_can(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    removed, kept = keys.add(file, "bob"), keys.add(file, "alice")
    known = Keys(file)
    keys.remove(file, "bob")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with file.open() as lowest:
        next_free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
    try:
        assert known.owner_of(removed) == "bob", "for a while"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert known.owner_of(removed) is None and known.owner_of(kept) == "alice"


def test_a_server_without_keys_closes_when_a_keys_file_comes_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "UNREADABLE_S", 0.0)
    file = tmp_path / "keys"
    known = Keys(file)
    file.mkdir()
    with pytest.raises(KeysUnreadable):
        known.find("tml-anything")
    file.rmdir()
    assert known.owner_of("tml-anything") == "local", "there are no keys, as at its start"


def test_a_token_of_another_owner_lets_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys.add(file, "alice")
    token = keys.add(file, "bob")
    known = Keys(file)
    assert known.readers("alice", None) == {"alice"}
    assert known.readers("alice", token) == {"alice", "bob"}
    with pytest.raises(BadRequest, match="weights_access_token"):
        known.readers("alice", "tml-unknown")


def test_the_command_line_adds_lists_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        parsed = parse(["keys", *arguments, "--data-dir", str(tmp_path)])
        change_keys(parsed, read_settings(parsed))
        return capsys.readouterr().out.strip()

    parsed = parse(["keys", "list", "--data-dir", str(tmp_path)])
    change_keys(parsed, read_settings(parsed))
    printed = capsys.readouterr()
    assert printed.out == "" and f"no API keys in {tmp_path}/keys: `tinker-server keys add NAME" in printed.err
    parsed = parse(["keys", "add", "alice", "--data-dir", str(tmp_path)])
    change_keys(parsed, read_settings(parsed))
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert printed.err.startswith(f"made {tmp_path}/keys: a server reads it only with the same --data-dir")
    run("add", "alice")
    assert Keys(tmp_path / "keys").owner_of(key) == "alice"
    listed = [row for row in run("list").splitlines() if "alice" in row]
    assert len(listed) == 2 and Key.parse(f"alice {hash_of(key)}").id in listed[0]
    assert run("remove", "alice") == "removed 2 of alice"
    for arguments, text in ((("remove", "alice"), "no key of the name 'alice'"), (("add", "a b"), "cannot name a key")):
        with pytest.raises(StartFailed, match=text):
            run(*arguments)


@pytest.mark.parametrize(("host", "refused"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_without_keys_only_loopback_is_listened_on(tmp_path: Path, host: str, refused: bool) -> None:
    settings = Settings(data_dir=tmp_path, host=host)
    with socket.socket() as listener:
        listener.bind((host, 0))
        if refused:
            with pytest.raises(StartFailed, match=f"tinker-server keys add NAME --keys-file {tmp_path}/keys"):
                require_keys_beyond_loopback(settings, listener)
        else:
            require_keys_beyond_loopback(settings, listener)
        keys.add(tmp_path / "keys", "alice")
        require_keys_beyond_loopback(settings, listener)


def test_keys_added_at_once_all_work(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with ThreadPoolExecutor(12) as pool:
        added = list(pool.map(lambda number: keys.add(file, f"name{number % 3}"), range(24)))
    known = Keys(file)
    assert [known.owner_of(key) for key in added] == [f"name{number % 3}" for number in range(24)]
    with ThreadPoolExecutor(12) as pool:
        more = pool.map(lambda number: keys.add(file, "new"), range(12))
        gone = pool.map(known.revoke, map(hash_of, added))
    list(gone)
    known = Keys(file)
    assert {known.owner_of(key) for key in added} == {None} and {known.owner_of(key) for key in more} == {"new"}


def test_the_removal_of_the_last_key_opens_no_server_that_starts_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = keys.add(file, "alice")
    keys.remove(file, "alice")
    known = Keys(file)
    assert not known.is_open and known.owner_of("tml-anything") is None and known.owner_of(key) is None
    assert str(file) in caplog.text and "keys add" in caplog.text
    assert known.owner_of(keys.add(file, "bob")) == "bob"


def test_a_server_is_open_again_once_its_operator_has_deleted_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys.add(file, "alice")
    file.unlink()
    assert Keys(file).owner_of("tml-anything") == "local"


def test_a_key_has_its_scope_role_and_times_in_the_file_and_no_other_key_changes(tmp_path: Path) -> None:
    file, began = tmp_path / "keys", int(time.time())
    plain = f"old {hash_of('tml-old')}"  # as a server before scopes wrote it
    file.write_text(f"{plain}\n")
    narrow = keys.add(file, "alice", scope="sample", valid_s=3600)
    admin = keys.add(file, "root", is_admin=True)
    known = Keys(file)
    old, found, root = (known.find(key) for key in ("tml-old", narrow, admin))
    assert old == Key("old", hash_of("tml-old")) and plain in file.read_text()
    assert found is not None and (found.scope, found.is_admin) == ("sample", False)
    assert found.created_at is not None and began <= found.created_at <= time.time()
    assert found.expires_at == found.created_at + 3600
    assert root is not None and (root.scope, root.is_admin, root.expires_at) == ("all", True, None)
    assert Key.parse(found.line()) == found and Key.parse(root.line()) == root


def test_an_expired_key_is_unknown_and_opens_no_weights(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    short, lasting = keys.add(file, "alice", valid_s=1.0), keys.add(file, "bob")
    known = Keys(file)
    expires_at = known.all()[0].expires_at
    assert expires_at is not None
    time.sleep(max(0.0, expires_at - time.time()) + 0.01)
    assert known.find(short) is None and known.owner_of(lasting) == "bob"
    assert known.find_by_fingerprint(known.all()[0].fingerprint) is None
    with pytest.raises(BadRequest, match="weights_access_token"):
        known.readers("bob", short)
    assert [key.name for key in known.all()] == ["alice", "bob"], "it is listed until it is removed"


@pytest.mark.parametrize("scope", ["sample", "metrics"])
def test_a_key_of_a_narrow_scope_opens_no_weights_to_others(tmp_path: Path, scope: Scope) -> None:
    file = tmp_path / "keys"
    token = keys.add(file, "bob", scope=scope)
    known = Keys(file)
    with pytest.raises(BadRequest, match="of the scope all"):
        known.readers("alice", token)
    with pytest.raises(BadRequest, match="of the scope all"):
        known.readers_by_seal("alice", known.seal(token))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("scope=none", "has scope=none role=; a scope is all, sample, metrics, and a role admin"),
        ("role=root", "role=root"),
        ("role=admin scope=sample", "an administrator's key has the scope all"),
        ("expires=soon", "has the time 'soon'; a time is like 2026-01-31T23:59:59Z"),
        ("until=2026-01-31T23:59:59Z", "line 1 is not 'NAME sha256:HASH', perhaps with created=TIME"),
        ("all", "line 1 is not 'NAME sha256:HASH'"),
    ],
)
def test_a_wrong_field_of_a_line_is_named(tmp_path: Path, fields: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {hash_of('tml-one')} {fields}\n")
    with pytest.raises(StartFailed, match=re.escape(said)):
        Keys(file)


async def test_the_last_use_of_a_key_survives_a_restart_and_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    used, _, gone = (keys.add(file, name) for name in ("alice", "bob", "carol"))
    known = Keys(file)
    uses = KeyUses(tmp_path, known)
    found = known.find(used)
    assert found is not None and known.find(gone) is not None
    at = known.used_at[found.fingerprint]
    keys.remove(file, "carol")
    await uses.save()
    again = Keys(file)
    KeyUses(tmp_path, again)
    assert again.used_at == {found.fingerprint: at}
    parsed = parse(["keys", "list", "--data-dir", str(tmp_path)])
    change_keys(parsed, read_settings(parsed))
    alice, bob = (row for row in capsys.readouterr().out.splitlines() if "alice" in row or "bob" in row)
    assert datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M") in alice
    assert bob.split()[-1] == "never"
    (tmp_path / "key-uses").write_text("[1]")
    assert key_uses.read(tmp_path) == {}


def test_one_key_of_a_name_is_removed_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    first, second = keys.add(file, "alice"), keys.add(file, "alice", valid_s=60.0)
    known = Keys(file)
    found = known.find(first)
    assert found is not None
    for key_id, fails in (("00000000", True), (found.id, False)):
        parsed = parse(["keys", "remove", "alice", "--key", key_id, "--data-dir", str(tmp_path)])
        if fails:
            with pytest.raises(StartFailed, match="no key of the name 'alice' with the id 00000000"):
                change_keys(parsed, read_settings(parsed))
        else:
            change_keys(parsed, read_settings(parsed))
    assert known.find(first) is None and known.owner_of(second) == "alice"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--expires-days", "0"], "number of days, more than 0"),
        (["--scope", "train"], "invalid choice: 'train'"),
    ],
)
def test_a_wrong_lifetime_or_scope_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["keys", "add", "alice", *arguments])
    assert said in capsys.readouterr().err
