"""A search for saved weights, as the SDK has it from 0.39: conditions, pages, and whose weights are found.

pytest tests/contract/test_search_checkpoints.py
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboard import Owner
from tests.fake_server import Running
from tinker_server.auth import keys


@pytest.fixture(scope="module")
def owners(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    folder = tmp_path_factory.mktemp("search")
    made = [keys.add(folder / "keys", name) for name in ("alice", "bob")]
    server = Running(folder / "data", keys_file=folder / "keys", database_url=module_database_url)
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        yield alice, bob
    server.stop()


@pytest.fixture(scope="module")
def saved(owners: tuple[Owner, Owner]) -> list[str]:
    """Paths of alice's weights, the newest first; the second is published."""
    alice, _ = owners
    run_id = alice.new_run()
    paths: list[str] = []
    for seq_id in range(1, 5):
        notes = {"user_metadata": {"kind": "even" if seq_id % 2 == 0 else "odd"}}
        made = alice.post("/save_weights", model_id=run_id, seq_id=seq_id, path=f"w{seq_id}", **notes)
        paths.insert(0, made["path"])
    made = alice.post("/save_weights_for_sampler", model_id=run_id, seq_id=5, path="s")
    url = f"/training_runs/{run_id}/checkpoints/weights/w4/publish"
    assert alice.server.http.post(url, headers={"x-api-key": alice.key}).status_code == 204
    return [made["path"], *paths]


def found(who: Owner, **conditions: Any) -> list[str]:
    answer = who.post("/checkpoints/search", **conditions)
    assert all(one["base_model"] == "tiny" for one in answer["checkpoints"])
    return [one["tinker_path"] for one in answer["checkpoints"]]


def test_each_condition_selects_and_all_must_hold(owners: tuple[Owner, Owner], saved: list[str]) -> None:
    alice, _ = owners
    assert found(alice) == saved
    assert found(alice, checkpoint_type="sampler") == saved[:1]
    assert found(alice, user_metadata={"kind": "even"}) == [saved[1], saved[3]]
    assert found(alice, user_metadata={"kind": "even"}, checkpoint_type="sampler") == []
    assert found(alice, base_models=["tiny", "other"]) == saved
    assert found(alice, base_models=["other"]) == [] and found(alice, base_models=[]) == []
    assert found(alice, project_ids=["default"]) == saved and found(alice, project_ids=["other"]) == []


def test_pages_follow_one_another_without_a_gap(owners: tuple[Owner, Owner], saved: list[str]) -> None:
    alice, _ = owners
    paths, cursor = [], None
    for _ in range(3):
        answer = alice.post("/checkpoints/search", limit=2, cursor=cursor)
        paths += [one["tinker_path"] for one in answer["checkpoints"]]
        cursor = answer.get("next_cursor")
    assert paths == saved and cursor is None


def test_a_cursor_tells_nothing_of_weights_that_the_caller_may_not_read(
    owners: tuple[Owner, Owner], saved: list[str]
) -> None:
    _, bob = owners
    assert found(bob, owner={"type": "accessible"}) == [saved[1]]
    for path in (saved[0], "tinker://nobody:train:0/weights/nothing"):
        cursor = {"last_created_at": "2000-01-01T00:00:00Z", "last_checkpoint_uuid": path}
        assert found(bob, owner={"type": "accessible"}, cursor=cursor) == [], "older than the client says"


def test_another_owner_finds_what_is_published_alone(owners: tuple[Owner, Owner], saved: list[str]) -> None:
    _, bob = owners
    assert found(bob) == []
    assert found(bob, owner={"type": "accessible"}) == [saved[1]]
    for name in ("tml:organization_user:alice", "alice"):
        assert found(bob, owner={"type": "user", "owner_urns": [name]}) == [saved[1]]
    assert found(bob, owner={"type": "user", "owner_urns": ["bob"]}) == []


def test_a_key_of_metadata_that_no_database_can_name_is_refused(owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    headers = {"x-api-key": alice.key}
    body = {"user_metadata": {'a"b': "c"}}
    answer = alice.server.http.post("/checkpoints/search", json=body, headers=headers)
    assert answer.status_code == 400 and "cannot be searched for" in answer.text
