"""Weights are saved once the sampler scores with them as the trainer did; meanwhile the trainer works for others.

pytest tests/contract/test_publishing.py
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_server import Running, forward_backward_body
from tinker_server.auth import keys

SAVES = {
    "under a name": {"path": "a"},
    "without one": {"sampling_session_seq_id": 7},
    "inflight": {"sampling_session_seq_id": 8, "kind": "inflight"},
}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "data")
    yield running
    running.stop()


@pytest.mark.parametrize("fields", SAVES.values(), ids=SAVES)
def test_weights_that_the_sampler_scores_otherwise_are_not_saved(fake: Running, fields: dict[str, object]) -> None:
    model_id = fake.model()
    sampler = fake.backend.tiny.sampler
    sampler.refuses = True
    failed = fake.result(fake.post("/save_weights_for_sampler", model_id=model_id, seq_id=1, **fields)).json()
    assert "not the trainer's" in failed["error"]
    (weights,) = sampler.published
    assert not weights.exists()
    assert fake.http.get(f"/training_runs/{model_id}/checkpoints").json()["checkpoints"] == []
    sampler.refuses = False
    saved = fake.result(fake.post("/save_weights_for_sampler", model_id=model_id, seq_id=2, **fields)).json()
    assert "error" not in saved
    assert sampler.published[1].is_dir()


@pytest.mark.parametrize("fields", SAVES.values(), ids=SAVES)
def test_the_trainer_is_not_held_while_the_sampler_loads(fake: Running, fields: dict[str, object]) -> None:
    saving, other = fake.model(), fake.model()
    sampler = fake.backend.tiny.sampler
    fake.set_gate(sampler.publish_gate, is_open=False)
    submitted = fake.post("/save_weights_for_sampler", model_id=saving, seq_id=1, **fields)
    while not sampler.published:
        time.sleep(0.01)
    body, headers = forward_backward_body(other, 1), {"content-type": "application/x-protobuf"}
    assert fake.result(fake.http.post("/forward_backward", content=body, headers=headers)).status_code == 200
    assert fake.post("/retrieve_future", request_id=submitted.json()["request_id"]).status_code == 408
    fake.set_gate(sampler.publish_gate, is_open=True)
    assert "error" not in fake.result(submitted).json()


def test_a_session_on_trained_weights_is_warned_once_that_cut_log_probabilities_are_renormalised(fake: Running) -> None:
    saved = fake.post("/save_weights_for_sampler", model_id=fake.model(), seq_id=1, sampling_session_seq_id=7)
    trained, base = fake.result(saved).json()["sampling_session_id"], fake.sampler()
    cut, whole = {"max_tokens": 1, "top_p": 0.9}, {"max_tokens": 1, "top_k": -1, "top_p": 1.0}
    given = [(base, cut), (trained, whole), (trained, cut), (trained, {"max_tokens": 1, "top_k": 5})]
    answers = [fake.sample(one, seq_id, sampling_params=params) for seq_id, (one, params) in enumerate(given)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert ["renormalised" in answer.headers.get("x-deprecation-note", "") for answer in answers] == [
        False,
        False,
        True,
        False,
    ]


def test_another_owner_samples_published_weights_until_they_are_hidden(tmp_path: Path) -> None:
    alice, bob = (keys.add(tmp_path / "data" / "keys", owner) for owner in ("alice", "bob"))
    server = Running(tmp_path / "data")
    try:
        server.http.headers["x-api-key"] = alice
        model_id = server.model()
        saving = server.post("/save_weights_for_sampler", model_id=model_id, seq_id=1, path="shared")
        path = server.result(saving).json()["path"]
        published = f"/training_runs/{model_id}/checkpoints/sampler_weights/shared/publish"
        own = server.sampler(model_path=path)
        assert server.http.post(published).status_code == 204
        server.http.headers["x-api-key"] = bob
        others = server.sampler(model_path=path)
        assert "json" not in server.result(server.sample(others, 1)).headers["content-type"]
        server.http.headers["x-api-key"] = alice
        assert server.http.delete(published).status_code == 204
        assert "json" not in server.result(server.sample(own, 1)).headers["content-type"]
        server.http.headers["x-api-key"] = bob
        failed = server.result(server.sample(others, 2)).json()
        assert (failed["category"], path in failed["error"]) == ("user", True)
    finally:
        server.stop()
