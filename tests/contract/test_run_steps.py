"""A step of a run without a browser: its numbers, and the samples of the weights that it began with."""

import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard import Owner, with_keys
from tests.fake_server import Running, forward_backward_body, policy_body
from tests.photographs import photographs

IMAGE = {"type": "image", "format": "jpeg", "data": base64.b64encode(photographs("test", 1)[0].jpeg).decode()}


@pytest.fixture
def alice(tmp_path: Path) -> Iterator[Owner]:
    server, (key,) = with_keys(tmp_path, "alice", samples_shown=4)
    with Owner(server, key) as owner:
        yield owner.sign_in()
    server.stop()


def samples_of(text: str) -> list[str]:
    return re.findall(r'/samples/([0-9a-f]{32})"', text)


def test_an_old_step_shows_its_own_samples_though_many_newer_were_drawn(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.train_and_sample(run_id, range(5), IMAGE)
    for _ in range(6):
        alice.sample()
    assert len(samples_of(alice.get("/samples").text)) == 4
    shown = {step: alice.get(f"/runs/{run_id}/step?step={step}").text for step in range(5)}
    assert all(len(samples_of(text)) == 2 for text in shown.values())
    assert len({sample for text in shown.values() for sample in samples_of(text)}) == 10
    for step, text in shown.items():
        assert f"<h2>Step {step}</h2>" in text and "that this step began with" in text
        assert "nats" in text
        sample = samples_of(text)[0]
        assert f"step {step}" in alice.get(f"/samples/{sample}").text
        assert alice.get(f"/samples/{sample}/thumbnails/0").headers["content-type"] == "image/jpeg"
    assert len(re.findall("<li ", alice.get(f"/samples?run={run_id}").text)) == 10


def test_the_newest_step_shows_its_own_samples_and_leads_on_to_those_after_it(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.train_and_sample(run_id, range(2))
    saved = alice.post("/save_weights_for_sampler", model_id=run_id, seq_id=7, path="after")
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    alice.post("/asample", model_path=saved["path"], prompt=prompt, sampling_params={"max_tokens": 4})
    latest, newest = (alice.get(f"/runs/{run_id}/step{query}").text for query in ("", "?step=1"))
    assert "Of the weights after this step" in latest and len(samples_of(latest)) == 1
    assert 'data-step="1"' in latest and 'data-step="2"' not in latest
    assert "that this step began with" in newest and len(samples_of(newest)) == 2
    assert 'data-step="0"' in newest and 'data-step="2"' in newest


def test_a_step_without_samples_shows_those_of_the_nearest_before_and_its_own_numbers(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.train_and_sample(run_id, range(2))
    alice.train(run_id, range(3, 6))
    alice.report(run_id, 4, reward=0.75)
    text = alice.get(f"/runs/{run_id}/step?step=4").text
    assert "These are of step 1." in text
    assert "<dt>reward</dt><dd>0.75</dd>" in text and "<dt>Loss per token</dt><dd>1</dd>" in text
    assert 'data-step="0"' in text
    first = alice.get(f"/runs/{run_id}/step?step=0").text
    assert 'data-step="1"' in first and 'data-step=""' in first
    assert alice.get(f"/runs/{run_id}/step?step=99").text.count("<h2>Step 4</h2>") == 1
    assert alice.get(f"/runs/{run_id}/step?step=-1").status_code == 404
    empty = alice.new_run()
    assert "No sample is kept" in alice.get(f"/runs/{empty}/step").text


def test_samples_keep_their_step_when_their_weights_are_saved_again_and_after_a_restart(tmp_path: Path) -> None:
    server, (key,) = with_keys(tmp_path, "alice", samples_shown=2)
    with Owner(server, key) as alice:
        run_id = alice.sign_in().new_run()
        alice.train_and_sample(run_id, range(3))
        again = {"model_id": run_id, "seq_id": 10, "path": "at-1", "overwrite": True}
        alice.post("/save_weights_for_sampler", **again)
        before = samples_of(alice.get(f"/runs/{run_id}/step?step=1").text)
    server.stop()
    server = Running(tmp_path / "data", keys_file=tmp_path / "keys", samples_shown=2)
    with Owner(server, key) as alice:
        alice.sign_in()
        assert samples_of(alice.get(f"/runs/{run_id}/step?step=1").text) == before
        assert len(before) == 2
        alice.change("POST", "/runs/delete", run=run_id)
        assert alice.get(f"/samples/{before[0]}").status_code == 404
    server.stop()


def datums(owner: Owner, run_id: str, wanted: str, query: str = "") -> str:
    """The part of the page, once it has what is wanted: datums are kept after the result."""
    until = time.monotonic() + 10
    while wanted not in (text := owner.get(f"/runs/{run_id}/datums{query}").text):
        assert time.monotonic() < until, text
        time.sleep(0.02)
    return text


def test_a_step_shows_the_answers_of_a_prompt_by_advantage_and_the_largest_datums(alice: Owner) -> None:
    run_id = alice.new_run()
    assert "appear here with each forward_backward" in alice.get(f"/runs/{run_id}/datums").text
    for step in range(3):
        answers = [([10 + step, 11], -0.5), ([20 + step, 21, 22], 1.5), ([30], 0.0)]
        alice.train_on(policy_body(run_id, 2 * step + 1, [1, 2], answers))
        datums(alice, run_id, f"word{10 + step}<", f"?step={step}")
        alice.post("/optim_step", model_id=run_id, seq_id=2 * step + 2, adam_params={"learning_rate": 0.25})
    text = alice.get(f"/runs/{run_id}/datums?step=1").text
    group, largest = text.split("Datums with the largest gradients or losses, of 3")
    assert re.findall(r"advantage <strong>([^<]+)<", group) == ["+1.5", "+0", "-0.5"]
    assert re.findall(r'<span class="(\w+)" title[^>]*> (word\d+)<', group) == [
        *(("up", f"word{token}") for token in (21, 21, 22)),
        ("still", "word30"),
        *(("down", f"word{token}") for token in (11, 11)),
    ]
    assert "importance_sampling" in group and " word1 word2" in group
    assert re.findall(r"datum (\d)<", largest)[0] == "1"
    assert "These are of step 2." in alice.get(f"/runs/{run_id}/datums?step=9").text
    assert 'title="+1.5 · -1.000 nats"' in text


def test_a_batch_whose_loss_is_not_known_here_keeps_nothing_and_trains(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.train_on(forward_backward_body(run_id, 1, loss_fn="nan"))
    alice.train_on(forward_backward_body(run_id, 2))
    assert "cross_entropy" not in datums(alice, run_id, "Datums with the largest")
    assert len(alice.server.app.state.services.gallery.batches_of_run("alice", run_id)) == 1


def test_saves_evaluations_and_restarts_of_server_and_trainer_are_marks_on_the_curves(tmp_path: Path) -> None:
    server, (key,) = with_keys(tmp_path, "alice")
    with Owner(server, key) as alice:
        run_id = alice.sign_in().new_run()
        alice.train_and_sample(run_id, range(3))
        alice.report(run_id, 1, **{"test/accuracy": 0.5, "reward": 1.0})
        found = alice.get(f"/runs/{run_id}/marks.json").json()
        assert sorted((save["name"], save["step"]) for save in found["saves"]) == [
            (f"sampler_weights/at-{step}", step) for step in range(3)
        ]
        assert [mark["step"] for mark in found["evaluations"]] == [1] and found["server_restarts"] == []
        assert found["trainer_restarts"] == []
        crashed = time.time()
        server.restart_trainer()
        alice.train_on(forward_backward_body(run_id, 10))
        found = alice.get(f"/runs/{run_id}/marks.json").json()
        (restart,) = found["trainer_restarts"]
        assert restart["at"] == pytest.approx(crashed, abs=10) and found["server_restarts"] == []
        assert len(alice.get(f"/runs/{run_id}/proof.json").json()["training"]["trainer_restarted_meanwhile"]) == 1
    server.stop()
    server = Running(tmp_path / "data", keys_file=tmp_path / "keys")
    with Owner(server, key) as alice:
        started = time.time()
        body = forward_backward_body(run_id, 11)
        alice.sign_in().train_on(body)
        found = alice.get(f"/runs/{run_id}/marks.json").json()
        (restart,) = found["server_restarts"]
        assert len(found["trainer_restarts"]) == 1
        assert restart["at"] == pytest.approx(started, abs=10)
        assert [line["measure"] for line in alice.get("/machine/history.json").json()["lines"]] == []
    server.stop()
