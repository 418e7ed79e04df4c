"""A run's proof sheet: what it says, and that a change of it is found.

pytest tests/contract/test_proof.py
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard import Owner, alice_and_bob
from tests.fake_server import Running, forward_backward_body
from tinker_server.__main__ import main
from tinker_server.api_schemas import wire


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    with alice_and_bob(tmp_path_factory.mktemp("proof")) as both:
        yield both


@pytest.fixture(scope="module")
def run_id(owners: tuple[Owner, Owner]) -> str:
    alice, _ = owners
    run_id = alice.new_run({"name": "<b>proven</b>"})
    alice.train(run_id, range(3))
    alice.save(run_id, 7, "kept")
    for step in range(3):
        alice.report(run_id, step, reward=step / 4, kl=0.1)
    return run_id


def sheet_of(owner: Owner, run_id: str) -> dict[str, Any]:
    answer = owner.get(f"/runs/{run_id}/proof.json")
    assert answer.status_code == 200 and "attachment" in answer.headers["content-disposition"]
    found: dict[str, Any] = answer.json()
    return found


def test_a_sheet_says_what_was_trained_on_which_bodies_with_what_result(
    owners: tuple[Owner, Owner], run_id: str
) -> None:
    alice, bob = owners
    sheet = sheet_of(alice, run_id)
    lines = ""
    for number in range(3):
        body = b"".join(wire.canonical(forward_backward_body(run_id, 2 * number + 1)))
        step = {"model_id": run_id, "seq_id": 2 * number + 2, "adam_params": {"learning_rate": 0.25}}
        sent = json.dumps(step, separators=(",", ":")).encode()
        lines += f"{2 * number + 1}:{hashlib.sha256(body).hexdigest()}\n"
        lines += f"{2 * number + 2}:{hashlib.sha256(sent).hexdigest()}\n"
    data = sheet["data"]
    assert data["sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    assert (data["operations"], data["without_hash"], data["first_number"], data["last_number"]) == (6, 0, 1, 6)
    assert sheet["training"] == {
        "steps": 3,
        "learning_rate_first_and_last": [0.25, 0.25],
        "server_started_meanwhile": [],
        "trainer_restarted_meanwhile": [],
    }
    assert sheet["evaluations"] == {"reward": {"step": 2, "value": 0.5}}
    assert [one["path"] for one in sheet["checkpoints"]] == [f"tinker://{run_id}/weights/kept"]
    assert (sheet["run"]["id"], sheet["run"]["base_model"], sheet["run"]["trainable"]["rank"]) == (run_id, "tiny", 8)
    made = sheet["reproduced_by"]["new_model"]
    assert made.startswith('service.create_lora_training_client("tiny", rank=8, seed=') and "train_mlp=True" in made
    page = alice.get(f"/runs/{run_id}/proof").text
    assert data["sha256"] in page and "&lt;b&gt;proven" in page and "<b>proven" not in page
    assert bob.get(f"/runs/{run_id}/proof.json").status_code == bob.get(f"/runs/{run_id}/proof").status_code == 404


def test_a_restart_of_the_server_during_the_run_is_on_its_sheet(tmp_path: Path) -> None:
    first = Running(tmp_path / "data")
    owner = Owner(first, "tml-any")
    run_id = owner.new_run()
    owner.train(run_id, range(1))
    owner.pages.close()
    first.stop()
    second = Running(tmp_path / "data")
    with Owner(second, "tml-any") as owner:
        owner.train(run_id, range(1, 2))
        training = sheet_of(owner, run_id)["training"]
    second.stop()
    assert training["steps"] == 2 and len(training["server_started_meanwhile"]) == 1


def test_another_body_gives_another_hash(owners: tuple[Owner, Owner], run_id: str) -> None:
    alice, _ = owners
    before = sheet_of(alice, run_id)["data"]
    alice.save(run_id, 8, "again")
    alice.train(run_id, range(4, 5))
    after = sheet_of(alice, run_id)["data"]
    assert after["sha256"] != before["sha256"] and after["operations"] == before["operations"] + 2


def test_a_sheet_is_verified_and_a_changed_one_or_another_servers_is_refused(
    owners: tuple[Owner, Owner],
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    alice, _ = owners

    def verify(sheet: object, data_dir: Path, doubled: str = "") -> tuple[int, str]:
        file = tmp_path / "sheet.json"
        file.write_text(json.dumps(sheet, indent=4).replace('"evaluations":', f'{doubled}"evaluations":'))
        monkeypatch.setattr(sys, "argv", ["tinker-server", "verify", str(file), "--data-dir", str(data_dir)])
        code = main()
        said = capsys.readouterr()
        return code, said.out + said.err

    sheet, own = sheet_of(alice, run_id), alice.server.settings.data_dir
    code, said = verify(sheet, own)
    assert code == 0 and "signed by this server" in said and run_id in said
    changed = {**sheet, "evaluations": {"reward": {"step": 2, "value": 0.9}}}
    code, said = verify(changed, own)
    assert code == 2 and "was changed" in said
    code, said = verify(sheet, tmp_path)
    assert code == 2 and "has signed no proof sheet" in said
    (tmp_path / "proof-secret").write_bytes(b"x" * 32)
    code, said = verify(sheet, tmp_path)
    assert code == 2 and "another server signed it" in said
    code, said = verify(sheet, own, doubled='"evaluations": {"reward": 0.9}, ')
    assert code == 2 and "'evaluations' occurs twice" in said
    code, said = verify({**sheet, "signature": {"value": "é"}}, own)
    assert code == 2 and "was changed" in said
    for other in ([1], "sheet", 7):
        code, said = verify(other, own)
        assert code == 2 and "is no proof sheet" in said
