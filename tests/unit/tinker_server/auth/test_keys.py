"""API keys: hashed in a file, read again when it changes."""

import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinker_server.__main__ import require_keys_beyond_loopback
from tinker_server.auth import keys
from tinker_server.auth.keys import Keys
from tinker_server.command_line import change_keys, parse, read_settings
from tinker_server.errors import BadRequest, StartFailed
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
    known.revoke(first)
    assert known.owner_of(first) is None and known.owner_of(second) == "alice"
    assert Keys(file).owner_of(first) is None
    assert keys.remove(file, "alice") == 1 and known.owner_of(second) is None


def test_a_broken_file_fails_the_start_and_changes_nothing_later(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = keys.add(file, "alice")
    known = Keys(file)
    file.write_text("# a comment\n\nalice tml-a-plain-key\n")
    assert known.owner_of(key) == "alice"
    with pytest.raises(StartFailed, match="line 3 is not 'NAME sha256:HASH'"):
        Keys(file)


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
        change_keys(parsed, read_settings(parsed).resolved_keys_file())
        return capsys.readouterr().out.strip()

    key = run("add", "alice")
    run("add", "alice")
    assert Keys(tmp_path / "keys").owner_of(key) == "alice"
    assert run("list") == "alice 2"
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
        gone = pool.map(known.revoke, added)
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
