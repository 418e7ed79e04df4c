"""Models of clients that end, die, or are silent for a while (items 8, 64).

pytest tests/conformance/test_silent_clients.py
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.factories import present
from tests.fake_server import Running, datum
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
TIMEOUT_S = 1.0
PATIENCE_S = 120
"""A suspension and a sweep sync the disk a dozen times, which others may keep busy for a second each time."""
CLIENT = """
import sys, time, tinker
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-test")
print(client.create_lora_training_client("tiny", rank=8).result().model_id, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """With settings as parameters."""
    running = Running(tmp_path, session_timeout_s=TIMEOUT_S, **getattr(request, "param", {}))
    yield running
    running.stop()


def test_064_a_killed_clients_model_leaves_memory(server: Running) -> None:
    trainer = server.backend.tiny.trainer
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.url], stdout=subprocess.PIPE, text=True)
    model_id = present(client.stdout).readline().strip()
    assert model_id in trainer.steps
    client.kill()
    client.wait()
    present(client.stdout).close()
    wait_until(lambda: model_id not in trainer.steps, PATIENCE_S)


def test_064_a_silent_client_finds_its_model_as_it_was(server: Running) -> None:
    """The SDK's heartbeat of every 10 s is rarer than this server's patience, so it is a silent client."""
    trainer = server.backend.tiny.trainer
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test").create_lora_training_client("tiny", rank=8)
    training = client.result()
    training.forward_backward([datum(3)], "cross_entropy").result()
    assert present(training.optim_step(types.AdamParams()).result().metrics)["step"] == 1
    for expected in (2, 3):
        wait_until(lambda: training.model_id not in trainer.steps, PATIENCE_S)
        assert list(server.settings.data_dir.glob("checkpoints/*/snapshots/*")), "not on disk"
        assert present(training.optim_step(types.AdamParams()).result().metrics)["step"] == expected
        assert len(list(server.settings.data_dir.glob("checkpoints/*/snapshots/*"))) == 1, "older ones are still there"


def test_064_a_suspended_model_outlives_a_restart(tmp_path: Path) -> None:
    first = Running(tmp_path, session_timeout_s=TIMEOUT_S)
    model_id = first.model()
    first.result(first.post("/optim_step", model_id=model_id, seq_id=1))
    wait_until(lambda: model_id not in first.backend.tiny.trainer.steps, PATIENCE_S)
    first.stop()
    second = Running(tmp_path, session_timeout_s=TIMEOUT_S)
    try:
        stepped = second.result(second.post("/optim_step", model_id=model_id, seq_id=2))
        assert stepped.json()["metrics"]["step"] == 2
    finally:
        second.stop()


def test_064_who_works_without_heartbeats_is_not_silent(server: Running) -> None:
    model_id = server.model()
    for number in range(1, 8):
        server.result(server.post("/optim_step", model_id=model_id, seq_id=number))
        time.sleep(TIMEOUT_S / 3)
    assert [call for call in server.backend.tiny.trainer.calls if call[0] == "create_model"] == [
        ("create_model", model_id)
    ]


def test_008_a_finished_session_takes_no_more_work_and_its_models_are_freed(server: Running) -> None:
    model_id = server.model()
    session_id = model_id.partition(":")[0]
    finish = f"/sessions/{session_id}/finish"
    assert server.post(finish, reason={"type": "success"}).status_code == 204
    refused = [
        server.post("/optim_step", model_id=model_id, seq_id=1),
        server.post("/create_model", session_id=session_id, model_seq_id=1, base_model="tiny", lora_config={"rank": 8}),
        server.post("/create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model="tiny"),
    ]
    assert [answer.status_code for answer in refused] == [403] * 3
    assert all("finished" in answer.json()["detail"] for answer in refused)
    wait_until(lambda: model_id not in server.backend.tiny.trainer.steps, PATIENCE_S)


@pytest.mark.parametrize("server", [{"unnamed_kept_s": 1.5}], indirect=True)
def test_085_unnamed_sampler_weights_go_when_nobody_uses_them(server: Running) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test").create_lora_training_client("tiny", rank=8)
    training = client.result()
    prompt, one = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    used, unused = (training.save_weights_and_get_sampling_client().result() for _ in range(2))
    named = training.save_weights_for_sampler("kept").result().path

    def one_is_gone() -> bool:
        used.sample(prompt, 1, one).result()
        return len(list(server.settings.data_dir.glob("checkpoints/*/snapshot/*"))) < 2

    wait_until(one_is_gone, PATIENCE_S)
    used.sample(prompt, 1, one).result()
    with pytest.raises(tinker.RequestFailedError, match="had no name"):
        unused.sample(prompt, 1, one).result()
    time.sleep(2.5)
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    assert service.create_sampling_client(model_path=named).result().sample(prompt, 1, one).result().sequences


@pytest.mark.parametrize("server", [{"unnamed_kept_s": 1.0}], indirect=True)
def test_085_shared_inflight_weights_stay_while_one_session_uses_them(server: Running) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test").create_lora_training_client("tiny", rank=8)
    training = client.result()
    prompt, one = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    samplers = [training.save_weights_and_get_sampling_client(kind="inflight").result() for _ in range(2)]
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        samplers[0].sample(prompt, 1, one).result()
        time.sleep(0.2)
    assert samplers[1].sample(prompt, 1, one).result().sequences, "its weights are those of the other"
