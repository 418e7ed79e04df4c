"""Making training clients, from nothing and from saved weights; numbers are the checklist's.

Another owner's weights (25) are in test_isolation.py.

pytest tests/conformance/test_creation.py
"""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from tests.conformance.wire import Wire, paths
from tests.factories import present
from tests.fake_server import HOLD_S, Running, datum, forward_backward_body
from tests.servers import MODEL

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
ADAM = types.AdamParams()
LORA = {"rank": 8}


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_015_a_lora_client_has_what_was_asked_for(fake: Running, wire: Wire, client: tinker.ServiceClient) -> None:
    asked: dict[str, Any] = {
        "rank": 16,
        "seed": 3,
        "train_mlp": False,
        "train_attn": True,
        "train_unembed": False,
        "user_metadata": {"a": "b"},
    }

    async def later() -> list[tinker.TrainingClient]:
        return [
            await client.create_lora_training_client("tiny", **asked),
            await client.create_lora_training_client_async("tiny", **asked),
        ]

    with wire.recording() as requests:
        models = [client.create_lora_training_client("tiny", **asked).result(), *asyncio.run(later())]
    assert paths(requests()) == ["/create_model", "/get_info"] * 3
    numbers = [one.json()["model_seq_id"] for one in requests()[::2]]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    session_id = client.holder.get_session_id()
    rest = tinker.RestClient(base_url=fake.url, api_key="tml-test")
    for number, model in zip(numbers, models, strict=True):
        info = model.get_info()
        assert info.model_id == model.model_id == f"{session_id}:train:{number}"
        assert (info.is_lora, info.lora_rank, info.model_name) == (True, 16, "tiny")
        assert (info.model_data.arch, info.model_data.model_name) == ("fake", "tiny")
        assert info.model_data.tokenizer_id == "org/tiny"
        assert rest.get_training_run(model.model_id).result().user_metadata == {"a": "b"}
        path = model.save_state("a").result().path
        flags = rest.get_weights_info_by_tinker_path(path).result()
        assert (flags.train_attn, flags.train_mlp, flags.train_unembed) == (True, False, False)


def test_017_a_repeated_creation_is_the_same_model(fake: Running) -> None:
    session_id = fake.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
    first = fake.post("/create_model", **body)
    model_id = fake.result(first).json()["model_id"]
    again = fake.post("/create_model", **body)
    assert again.json() == first.json() and fake.result(again).json()["model_id"] == model_id
    assert fake.backend.tiny.trainer.calls.count(("create_model", model_id)) == 1


def test_018_an_unknown_base_model_is_refused_with_the_served_ones(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="'other' is not served here; served: tiny") as failed:
        client.create_lora_training_client("other", rank=8).result()
    assert failed.value.category == "user"


@pytest.mark.parametrize(
    "optimizer", [{"type": "dimuon", "version": 1}, {"type": "sgd", "momentum": 0.9}, {"type": "adamw", "version": 2}]
)
def test_020_another_optimizer_is_refused_at_creation(fake: Running, optimizer: dict[str, object]) -> None:
    body = {"session_id": fake.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
    answer = fake.result(fake.post("/create_model", optimizer_config=optimizer, **body)).json()
    assert answer["category"] == "user" and str(optimizer["type"]) in answer["error"] and "adamw" in answer["error"]


def test_020_the_sdks_other_optimizer_is_refused_too(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="dimuon") as failed:
        client.create_lora_training_client("tiny", rank=8, optimizer=types.DimuonOptimizerConfig()).result()
    assert failed.value.category == "user"


def test_021_a_creation_that_waits_for_a_grant_is_polled_and_then_succeeds(fake: Running) -> None:
    """There is no bound on models but memory, so a creation never waits for room: only for a grant of the trainer."""
    busy = fake.model()
    gate = fake.backend.tiny.trainer.gates["long"]
    fake.set_gate(gate, is_open=False)
    headers = {"content-type": "application/x-protobuf"}
    long = fake.http.post("/forward_backward", content=forward_backward_body(busy, 1, loss_fn="long"), headers=headers)
    body = {"session_id": fake.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
    submitted = fake.post("/create_model", **body)
    poll = {"request_id": submitted.json()["request_id"], "allow_metadata_only": True}
    for _ in range(2):
        pending = fake.post("/retrieve_future", **poll)
        assert pending.status_code == 408 and pending.headers["content-type"] == "application/json"
        assert pending.json()["type"] == "try_again"
        assert pending.json()["queue_state"] in ("active", "paused_capacity", "paused_rate_limit")
    fake.set_gate(gate, is_open=True)
    assert fake.result(submitted).json()["model_id"] == f"{body['session_id']}:train:0"
    assert fake.result(long).status_code == 200


def test_021_a_poll_says_what_is_waited_for_beside_a_turn(fake: Running) -> None:
    trainer, model_id = fake.backend.tiny.trainer, fake.model()
    gate = trainer.gates["held"]
    fake.set_gate(gate, is_open=False)
    headers = {"content-type": "application/x-protobuf"}
    held = fake.http.post(
        "/forward_backward", content=forward_backward_body(model_id, 1, loss_fn="held"), headers=headers
    )
    poll = {"request_id": held.json()["request_id"], "allow_metadata_only": True}
    pending = fake.post("/retrieve_future", **poll).json()
    assert pending["queue_state"] == "active" and "queue_state_reason" not in pending
    trainer.waited_for = "the trainer of tiny starts again"
    pending = fake.post("/retrieve_future", **poll).json()
    trainer.waited_for = None
    assert pending["queue_state"] == "paused_capacity"
    assert pending["queue_state_reason"] == "the trainer of tiny starts again"
    fake.set_gate(gate, is_open=True)
    assert fake.result(held).status_code == 200


def test_021_the_sdk_waits_for_its_creation(fake: Running, client: tinker.ServiceClient) -> None:
    gate = fake.backend.tiny.trainer.gates["slow"]
    busy = client.create_lora_training_client("tiny", rank=8).result()
    fake.set_gate(gate, is_open=False)
    held = busy.forward_backward([datum()], "slow")  # type: ignore[arg-type]
    while not fake.backend.tiny.trainer.begun[busy.model_id]:
        time.sleep(0.01)
    waiting = client.create_lora_training_client("tiny", rank=8)
    threading.Timer(3 * HOLD_S, lambda: fake.set_gate(gate, is_open=True)).start()
    began = time.monotonic()
    assert waiting.result().get_info().lora_rank == 8
    assert time.monotonic() - began > 2 * HOLD_S
    assert held.result().metrics == {"loss:sum": 1}


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_022_and_023_resuming_is_one_request(
    wire: Wire, client: tinker.ServiceClient, training: tinker.TrainingClient, with_optimizer: bool
) -> None:
    for _ in range(2):
        training.optim_step(ADAM).result()
    path = training.save_state("a").result().path
    suffix = "_with_optimizer" if with_optimizer else ""
    create = getattr(client, f"create_training_client_from_state{suffix}")
    create_async = getattr(client, f"create_training_client_from_state{suffix}_async")
    with wire.recording() as requests:
        resumed = [create(path).result(), asyncio.run(create_async(path))]
    assert paths(requests()) == ["/load_weights", "/get_info"] * 2
    for request, model in zip(requests()[::2], resumed, strict=True):
        body = request.json()
        assert model.model_id == f"{body['session_id']}:train:{body['model_seq_id']}"
        assert body["optimizer"] is with_optimizer and "model_id" not in body
        assert model.get_info().lora_rank == 8
        assert model.optim_step(ADAM).result().metrics["step"] == (3 if with_optimizer else 1)
    assert present(training.optim_step(ADAM).result().metrics)["step"] == 3


def test_024_what_comes_with_a_state_is_checked_or_kept(
    fake: Running, client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_state("a").result().path
    for wrong in ("other", "tests/none"):
        with pytest.raises(tinker.RequestFailedError, match=f"is of tiny, not of {wrong}") as failed:
            client.create_training_client_from_state(path, base_model=wrong).result()
        assert failed.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        client.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()).result()
    resumed = client.create_training_client_from_state(
        path,
        base_model="tiny",
        user_metadata={"resumed": "yes"},
        weights_access_token="tml-someone",
        optimizer=types.AdamOptimizerConfig(),
    ).result()
    rest = tinker.RestClient(base_url=fake.url, api_key="tml-test")
    assert rest.get_training_run(resumed.model_id).result().user_metadata == {"resumed": "yes"}
    assert resumed.get_info().optimizer_config.type == "adamw"
    assert present(resumed.optim_step(ADAM).result().metrics)["step"] == 1


def test_025_an_expired_state_is_refused(
    client: tinker.ServiceClient, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = training.save_state("a", ttl_seconds=3600).result().path
    assert client.create_training_client_from_state(path).result().model_id
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 3700)
    with pytest.raises(tinker.RequestFailedError, match="expired") as failed:
        client.create_training_client_from_state(path).result()
    assert failed.value.category == "user"


def test_026_get_info_is_kept(wire: Wire, training: tinker.TrainingClient) -> None:
    with wire.recording() as requests:
        assert training.get_info() == training.get_info()
    assert requests() == []


def test_026_and_084_a_served_name_is_what_the_tokenizer_loads_by(
    service: tinker.ServiceClient, tiny_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a path from where the client is; of the server's own paths it hears nothing."""
    at = tmp_path / MODEL
    at.parent.mkdir()
    at.symlink_to(tiny_vl)
    monkeypatch.chdir(tmp_path)
    training = service.create_lora_training_client(MODEL, rank=2).result()
    info = training.get_info()
    assert (info.model_name, info.model_data.model_name, info.model_data.tokenizer_id) == (MODEL, MODEL, MODEL)
    expected = AutoTokenizer.from_pretrained(tiny_vl).encode("hello world")
    assert training.get_tokenizer().encode("hello world") == expected
    sampler = service.create_sampling_client(base_model=MODEL).result()
    assert sampler.get_base_model() == MODEL and sampler.get_tokenizer().encode("hello world") == expected
